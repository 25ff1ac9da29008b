//! Averages of weights over time and over ranks.
use crate::common::{assert_close, floats, ranks, try_ranks, values};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;
use candle_ddp::{DistributedDataParallel, Error};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap, linear_no_bias};
use std::collections::HashMap;

#[test]
fn averages_are_applied_and_restored() {
    for dtype in [DType::F32, DType::BF16] {
        let var = Var::zeros(3, dtype, &Device::Cpu).unwrap();
        let set =
            |value: f32| var.set(&Tensor::full(value, 3, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap();
        let mut ema = Ema::new(vec![("w".to_string(), var.clone())], 0.75).unwrap();
        let watched = ema.averages().unwrap().remove(0).1;
        for value in [4., 8., 16.] {
            set(value);
            ema.update().unwrap();
        }
        let averaged = vec![4. * 0.75 * 0.75 + 8. * 0.25 * 0.75 + 16. * 0.25; 3];
        assert_eq!(floats(&watched), averaged, "tensors returned earlier follow the updates");
        ema.apply().unwrap();
        assert!(
            ema.state_dict().unwrap_err().to_string().contains("call restore first"),
            "a checkpoint of the averages"
        );
        assert_eq!(floats(&var), averaged, "{dtype:?}");
        assert!(matches!(ema.apply(), Err(Error::InvalidArgument { .. })), "the weights would be lost");
        assert!(matches!(ema.update(), Err(Error::InvalidArgument { .. })), "it would average averages");
        ema.restore().unwrap();
        assert_eq!(floats(&var), [16.; 3]);
        assert!(matches!(ema.restore(), Err(Error::InvalidArgument { .. })));
        assert!(matches!(ema.set_decay(1.5), Err(Error::InvalidArgument { argument: "decay", .. })));

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ema");
        ema.save(&file).unwrap();
        let mut loaded = Ema::new(vec![("w".to_string(), var.clone())], 0.75).unwrap();
        loaded.load(&file).unwrap();
        assert_eq!(loaded.updates(), 3);
        loaded.copy_to_parameters().unwrap();
        assert_eq!(floats(&var), averaged);
        // Tensors returned before the load show the loaded averages.
        let held = loaded.averages().unwrap().remove(0).1;
        loaded.load(&file).unwrap();
        // The loaded average continues without changing the original.
        set(0.);
        loaded.update().unwrap();
        assert_eq!(floats(&loaded.averages().unwrap()[0].1), averaged.iter().map(|x| x * 0.75).collect::<Vec<_>>());
        assert_eq!(floats(&held), floats(&loaded.averages().unwrap()[0].1));
        assert_eq!(floats(&ema.averages().unwrap()[0].1), averaged);
    }
}

#[test]
fn ranks_average_in_the_same_steps_as_pytorch() {
    for world_size in [1, 2, 3] {
        let met = ranks(world_size, |pg| {
            let var = |dtype, shape: &[usize]| Var::zeros(shape, dtype, pg.device()).unwrap();
            let vars = [var(DType::F32, &[2, 3]), var(DType::F64, &[2]), var(DType::F32, &[4]), var(DType::I64, &[1])];
            // Each rank lists them in a different order, as a VarMap may.
            let mut named: Vec<_> = vars.iter().enumerate().map(|(i, var)| (format!("{i}"), var.clone())).collect();
            named.rotate_left(pg.rank());
            let mut averager = PeriodicModelAverager::new(&pg, 3, 2, None)?;
            let mut met = Vec::new();
            for step in 0..10 {
                for (index, var) in vars.iter().enumerate() {
                    let mine = Tensor::full((10 * index + pg.rank()) as f32, var.dims(), pg.device())?;
                    var.set(&mine.to_dtype(var.dtype())?)?;
                }
                let due = averager.average_parameters(named.clone())?;
                if due {
                    met.push(step);
                }
                for (index, var) in vars.iter().enumerate() {
                    let mean = (world_size - 1) as f32 / 2.;
                    let averaged = due && var.dtype().is_float();
                    let expected = (10 * index) as f32 + if averaged { mean } else { pg.rank() as f32 };
                    let expected = vec![expected; var.elem_count()];
                    assert_close(&floats(var), &expected, 1e-6, &format!("step {step}, variable {index}"));
                }
                // A loaded averager continues counting.
                let state = averager.state_dict()?;
                averager = PeriodicModelAverager::new(&pg, 3, 2, None)?;
                averager.load_state_dict(&state)?;
            }
            Ok(met)
        });
        assert_eq!(met, vec![vec![2, 5, 8]; world_size]);
    }
}

/// The parameters do not fit into one message.
#[test]
fn large_parameters_travel_in_several_messages() {
    ranks(2, |pg| {
        let vars: Vec<Var> = (0..3)
            .map(|index| {
                let mine = values(5_000_000, 1 + index).into_iter().map(|x| x + pg.rank() as f32 - 0.5).collect();
                Var::from_vec(mine, 5_000_000, pg.device())
            })
            .collect::<candle_core::Result<_>>()?;
        let named: Vec<_> = vars.iter().enumerate().map(|(i, var)| (format!("{i}"), var.clone())).collect();
        PeriodicModelAverager::new(&pg, 5, 0, None)?.average_parameters(named.clone())?;
        for (index, var) in vars.iter().enumerate() {
            let expected = values(5_000_000, 1 + index as u64);
            assert_close(&floats(var), &expected, 1e-6, &format!("variable {index}"));
        }
        Ok(())
    });
    assert!(matches!(
        try_ranks(1, |pg| PeriodicModelAverager::new(&pg, 0, 0, None).map(|_| ())),
        Err(Error::InvalidArgument { argument: "period", .. })
    ));
}

/// The first steps average gradients, the later ones weights. The model is linear and has no bias, so that the expected
/// values can be calculated directly.
#[test]
fn post_local_sgd_averages_gradients_first_and_weights_later() {
    const RATE: f32 = 0.1;
    let x = |rank: usize| [1. + rank as f32, -0.5];
    // The gradient of the loss (w·x)² is 2 (w·x) x.
    let gradient = |w: [f32; 2], rank: usize| {
        let x = x(rank);
        let y = w[0] * x[0] + w[1] * x[1];
        [2. * y * x[0], 2. * y * x[1]]
    };
    let mean = |a: [f32; 2], b: [f32; 2]| [(a[0] + b[0]) / 2., (a[1] + b[1]) / 2.];
    let moved = |w: [f32; 2], g: [f32; 2]| [w[0] - RATE * g[0], w[1] - RATE * g[1]];
    let mut expected = [[1., 2.]; 2];
    for step in 0..6 {
        let gradients = [gradient(expected[0], 0), gradient(expected[1], 1)];
        if step < 2 {
            expected = [moved(expected[0], mean(gradients[0], gradients[1])); 2];
        } else {
            expected = [moved(expected[0], gradients[0]), moved(expected[1], gradients[1])];
            if (step - 2) % 2 == 0 {
                expected = [mean(expected[0], expected[1]); 2];
            }
        }
    }
    let found = ranks(2, |pg| {
        let varmap = VarMap::new();
        let build = |vb: VarBuilder| linear_no_bias(2, 1, vb);
        let ddp = DistributedDataParallel::new(&pg, &varmap, build)?;
        let weights = ddp.parameters();
        weights[0].set(&Tensor::new(&[[1f32, 2.]], &Device::Cpu)?)?;
        let local = build(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
        let mut optimizer = SGD::new(weights.clone(), f64::from(RATE))?;
        let mut averager = PeriodicModelAverager::new(&pg, 2, 2, None)?;
        let x = Tensor::new(&[x(pg.rank())], &Device::Cpu)?;
        for step in 0..6 {
            let gradients = match step < 2 {
                true => ddp.backward(&ddp.forward(&x)?.sqr()?.sum_all()?)?,
                false => local.forward(&x)?.sqr()?.sum_all()?.backward()?,
            };
            optimizer.step(&gradients)?;
            averager.average_parameters(&ddp)?;
        }
        Ok(floats(&weights[0]))
    });
    assert!(found[0] != found[1], "the last step must be local");
    for (found, expected) in found.iter().zip(&expected) {
        assert_close(found, expected, 1e-5, "weights");
    }
}

#[test]
fn parameters_that_differ_are_an_error_on_all_ranks() {
    ranks(2, |pg| {
        let var = |shape: &[usize]| Var::zeros(shape, DType::F32, pg.device()).unwrap();
        let parameters = vec![("a".to_string(), var(&[3])), ("b".to_string(), var(&[2 + pg.rank()]))];
        let error = PeriodicModelAverager::new(&pg, 2, 0, None)?.average_parameters(parameters).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the list of parameters of rank 1 differs from that of other ranks: b f32[3] on rank 1, b f32[2] on rank 0. \
             All ranks must have the same one: it may depend on the rank, on a file that differs between hosts, or on the program's version"
        );
        Ok(())
    });
}

fn ema(var: &Var, decay: Option<f64>, from_construction: bool) -> Ema {
    let ema = Ema::new(vec![("w".to_string(), var.clone())], decay).unwrap();
    if from_construction { ema.starting_from_construction() } else { ema }
}

/// The average of most diffusion programs begins with the weights from its construction.
#[test]
fn the_first_update_copies_or_averages() {
    for (from_construction, expected) in [(false, 8.), (true, 4. * 0.75 + 8. * 0.25)] {
        let var = Var::new(&[4f32], &Device::Cpu).unwrap();
        let mut ema = ema(&var, Some(0.75), from_construction);
        var.set(&Tensor::new(&[8f32], &Device::Cpu).unwrap()).unwrap();
        ema.update().unwrap();
        assert_eq!(floats(&ema.averages().unwrap()[0].1), [expected], "{from_construction}");
    }
}

#[test]
fn averages_are_equal_without_a_decay_which_may_change() {
    for from_construction in [false, true] {
        let var = Var::new(&[2f64], &Device::Cpu).unwrap();
        let mut ema = ema(&var, None, from_construction);
        let average = ema.averages().unwrap().remove(0).1;
        let update = |ema: &mut Ema, value: f64| {
            var.set(&Tensor::new(&[value], &Device::Cpu).unwrap()).unwrap();
            ema.update().unwrap();
            average.to_vec1::<f64>().unwrap()[0]
        };
        let mut seen = if from_construction { vec![2.] } else { vec![] };
        for value in [5., -1., 7.5, 3.] {
            seen.push(value);
            let mean = seen.iter().sum::<f64>() / seen.len() as f64;
            assert!((update(&mut ema, value) - mean).abs() < 1e-12, "{seen:?}");
        }
        // A decay from here on, and equal shares again.
        ema.set_decay(0.5).unwrap();
        let mean = seen.iter().sum::<f64>() / seen.len() as f64;
        let decayed = (mean + 9.) / 2.;
        assert!((update(&mut ema, 9.) - decayed).abs() < 1e-12);
        ema.set_decay(None).unwrap();
        let count = seen.len() as f64 + 1.;
        assert!((update(&mut ema, 6.) - (decayed * count + 6.) / (count + 1.)).abs() < 1e-12);
    }
}

#[test]
fn an_average_of_variables_without_names_cannot_be_saved() {
    let var = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let mut ema = Ema::new(vec![var], 0.9).unwrap();
    ema.update().unwrap();
    let saved = ema.state_dict().unwrap_err().to_string();
    assert!(saved.contains("must have names for an average to be saved"), "{saved}");
    assert_eq!(ema.load_state_dict(&HashMap::new()).unwrap_err().to_string(), saved);
}
