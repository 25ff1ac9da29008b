//! The gradient scaler: the same scales as PyTorch's, one decision for all ranks, and errors for calls out of order.
use crate::common::{floats, golden, ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{Error, ProcessGroup, Result};

fn sgd(vars: Vec<Var>, lr: f64) -> Result<Sgd> {
    let named = vars.into_iter().enumerate().map(|(index, var)| (format!("w{index}"), var)).collect::<Vec<_>>();
    Sgd::new(named, ParamsSgd { lr, ..Default::default() })
}

fn weight(value: f32) -> Vec<(String, Var)> {
    vec![("w".to_string(), Var::new(&[value], &Device::Cpu).unwrap())]
}

/// A weight of this value, its scaler, and an optimizer with this learning rate.
fn made(pg: &ProcessGroup, value: f32, options: GradScalerOptions, lr: f64) -> Result<(Var, GradScaler, Sgd)> {
    let named = weight(value);
    let var = named[0].1.clone();
    Ok((var.clone(), GradScaler::new(pg, named, options)?, sgd(vec![var], lr)?))
}

/// The gradient of the scaled sum of `var`, infinite if `overflow` is set.
fn backward(scaler: &GradScaler, var: &Var, overflow: bool) -> Result<GradStore> {
    let mut grads = scaler.scale(&var.sum_all()?)?.backward()?;
    if overflow {
        grads.insert(var, (var.ones_like()? * f64::INFINITY)?);
    }
    Ok(grads)
}

/// Trains one weight and returns this rank's observations; `overflows` gives, for each step, the rank that overflows.
fn train(pg: &ProcessGroup, overflows: &[Option<usize>]) -> Result<(Vec<f32>, Vec<f32>)> {
    let options = GradScalerOptions { init_scale: 1024.0, growth_interval: 3, ..Default::default() };
    let (var, mut scaler, mut optimizer) = made(pg, 0.0, options, 1.0)?;
    let (mut scales, mut weights) = (Vec::new(), Vec::new());
    for overflow in overflows {
        let mut grads = backward(&scaler, &var, *overflow == Some(pg.rank()))?;
        assert_eq!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?, overflow.is_none());
        scaler.update()?;
        scales.push(scaler.current_scale() as f32);
        weights.extend(floats(&var));
    }
    Ok((scales, weights))
}

#[test]
fn the_scale_follows_pytorch_and_an_overflow_on_one_rank_counts_for_all() {
    let golden = golden("nn.safetensors");
    let golden = |name: &str| floats(&golden[&format!("scaler.{name}")]);
    for world in [1, 2, 3] {
        // A different rank overflows each time.
        let culprit = |(step, overflow): (usize, &f32)| (*overflow > 0.0).then_some(step % world);
        let overflows: Vec<Option<usize>> = golden("overflows").iter().enumerate().map(culprit).collect();
        for (scales, weights) in ranks(world, |pg| train(&pg, &overflows)) {
            assert_eq!(scales, golden("scales"), "{world} ranks");
            assert_eq!(weights, golden("weights"), "{world} ranks");
        }
    }
}

#[test]
fn gradients_are_divided_once_and_nan_is_an_overflow() {
    ranks(1, |pg| {
        let (var, mut scaler, mut optimizer) = made(&pg, 2.0, GradScalerOptions::default(), 0.5)?;
        let mut grads = backward(&scaler, &var, false)?;
        assert_eq!(floats(grads.get(&var).unwrap()), [65536.0]);
        scaler.unscale(&mut grads)?;
        assert_eq!(floats(grads.get(&var).unwrap()), [1.0]);
        assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
        assert_eq!(floats(&var), [1.5]);
        scaler.update()?;
        // A strided gradient takes another code path.
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let wide = Var::zeros((2, 2), DType::F32, &Device::Cpu)?;
            let mut scaler = GradScaler::new(&pg, vec![("wide".into(), wide.clone())], GradScalerOptions::default())?;
            let mut store = scaler.scale(&wide.sum_all()?)?.backward()?;
            let strided = Tensor::new(&[[65536f32, 131072.0], [0.0, 0.0]], &Device::Cpu)?.t()?;
            store.insert(&wide, strided);
            scaler.unscale(&mut store)?;
            assert_eq!(floats(store.get(&wide).unwrap()), [1.0, 0.0, 2.0, 0.0]);
            scaler.update()?;
            let mut store = scaler.scale(&wide.sum_all()?)?.backward()?;
            store.insert(&wide, Tensor::new(&[[1f32, bad], [0.0, 0.0]], &Device::Cpu)?.t()?);
            assert!(!scaler.step_if_finite(&mut store, |_| Ok(()))?);
            scaler.update()?;
            let mut store = scaler.scale(&wide.sum_all()?)?.backward()?;
            store.insert(&wide, Tensor::new(&[[1f32, bad], [0.0, 0.0]], &Device::Cpu)?);
            assert!(!scaler.step_if_finite(&mut store, |_| Ok(()))?);
        }
        Ok(())
    });
}

#[test]
fn calls_out_of_order_are_refused() {
    ranks(2, |pg| {
        let (var, mut scaler, mut optimizer) = made(&pg, 2.0, GradScalerOptions::default(), 0.5)?;
        let refused = |result: Result<()>, name: &str| match result {
            Err(Error::GradScaler { call, .. }) if call == name => {}
            other => panic!("{name}: {other:?}"),
        };
        refused(scaler.update(), "update");
        let mut grads = backward(&scaler, &var, false)?;
        scaler.unscale(&mut grads)?;
        refused(scaler.unscale(&mut grads).map(drop), "unscale");
        let dict = scaler.state_dict()?;
        refused(scaler.load_state_dict(&dict), "load_state_dict");
        scaler.step(&mut optimizer, &mut grads)?;
        let again = scaler.step(&mut optimizer, &mut grads);
        assert!(
            again.as_ref().is_err_and(|error| error.to_string().contains("step_if_finite")),
            "what two optimizers need"
        );
        refused(again.map(drop), "step");
        refused(scaler.unscale(&mut grads).map(drop), "unscale");
        assert_eq!(floats(&var), [1.5], "the second step did nothing");
        scaler.update()?;
        refused(scaler.update(), "update");
        Ok(())
    });
}

/// Two optimizers, each with half of the parameters, match one with all: gradients are divided once, and an overflow in
/// one half skips the step of both.
#[test]
fn two_optimizers_step_together() {
    let trained = ranks(2, |pg| {
        let run = |together: bool| -> Result<Vec<f32>> {
            let vars = [Var::new(&[2f32, 3.0], pg.device())?, Var::new(&[-1f32], pg.device())?];
            let named: Vec<_> =
                vars.iter().enumerate().map(|(index, var)| (format!("w{index}"), var.clone())).collect();
            let options = GradScalerOptions { init_scale: 1024.0, ..Default::default() };
            let mut scaler = GradScaler::new(&pg, named, options)?;
            let mut one = sgd(vars.to_vec(), 0.25)?;
            let mut two = [sgd(vec![vars[0].clone()], 0.25)?, sgd(vec![vars[1].clone()], 0.25)?];
            let mut seen = Vec::new();
            for overflow in [false, true, false] {
                let loss = (vars[0].sqr()?.sum_all()? + vars[1].sqr()?.sum_all()?)?;
                let mut grads = scaler.scale(&loss)?.backward()?;
                if overflow && pg.rank() == 1 {
                    grads.insert(&vars[1], (vars[1].ones_like()? * f64::INFINITY)?);
                }
                if together {
                    scaler.step(&mut one, &mut grads)?;
                } else {
                    let stepped = scaler.step_if_finite(&mut grads, |grads| {
                        two.iter_mut().try_for_each(|optimizer| optimizer.step(grads))
                    })?;
                    assert_eq!(stepped, !overflow);
                }
                scaler.update()?;
                seen.extend(vars.iter().flat_map(|var| floats(var)));
            }
            assert_eq!(scaler.current_scale(), 512.0);
            Ok(seen)
        };
        Ok((run(true)?, run(false)?))
    });
    // The gradient of x² is 2x: each step halves the weights.
    for (one, two) in trained {
        assert_eq!(one, [1.0, 1.5, -0.5, 1.0, 1.5, -0.5, 0.5, 0.75, -0.25]);
        assert_eq!(one, two);
    }
}

#[test]
fn a_scale_may_be_constant() {
    ranks(1, |pg| {
        let constant = GradScalerOptions { growth_factor: 1.0, backoff_factor: 1.0, ..Default::default() };
        let options = GradScalerOptions { init_scale: 128.0, growth_interval: 1, ..constant };
        let (var, mut scaler, mut optimizer) = made(&pg, 0.0, options, 1.0)?;
        for overflow in [false, true, false] {
            let mut grads = backward(&scaler, &var, overflow)?;
            assert_eq!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?, !overflow);
            scaler.update()?;
            assert_eq!(scaler.current_scale(), 128.0);
        }
        assert_eq!(floats(&var), [-2.0]);
        let dict = scaler.state_dict()?;
        scaler.load_state_dict(&dict)
    });
}

#[test]
fn gradients_in_f16_are_refused_by_name_and_nobody_hangs() {
    ranks(2, |pg| {
        let dtype = if pg.rank() == 0 { DType::F16 } else { DType::F32 };
        let var = Var::zeros(1, dtype, &Device::Cpu)?;
        let mut scaler = GradScaler::new(&pg, vec![("layer.weight".into(), var.clone())], Default::default())?;
        let mut grads = scaler.scale(&var.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        match scaler.unscale(&mut grads) {
            Err(Error::Parameter { parameter, .. }) => assert_eq!((parameter.as_str(), pg.rank()), ("layer.weight", 0)),
            other => assert!(other.is_ok() && pg.rank() == 1, "{other:?}"),
        }
        Ok(())
    });
}

#[test]
fn a_scaler_resumes_from_its_state() {
    ranks(1, |pg| {
        let options = GradScalerOptions { init_scale: 8.0, growth_interval: 2, ..Default::default() };
        let named = weight(0.0);
        let var = named[0].1.clone();
        let mut first = GradScaler::new(&pg, named.clone(), options)?;
        first.unscale(&mut backward(&first, &var, false)?)?;
        first.update()?;
        let mut second = GradScaler::new(&pg, named, GradScalerOptions::default())?;
        second.load_state_dict(&first.state_dict()?)?;
        second.unscale(&mut backward(&second, &var, false)?)?;
        second.update()?;
        assert_eq!(second.current_scale(), 16.0, "the second clean step of two");
        for bad in [
            GradScalerOptions { init_scale: f64::NAN, ..options },
            GradScalerOptions { growth_factor: 0.5, ..options },
            GradScalerOptions { backoff_factor: 1.5, ..options },
            GradScalerOptions { growth_interval: 0, ..options },
        ] {
            assert!(
                matches!(GradScaler::new(&pg, Vec::<Var>::new(), bad), Err(Error::InvalidArgument { .. })),
                "{bad:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn a_scaler_that_is_not_enabled_does_nothing() {
    ranks(2, |pg| {
        let disabled = GradScalerOptions { enabled: false, ..Default::default() };
        let (var, mut scaler, mut optimizer) = made(&pg, 1.0, disabled, 0.5)?;
        let mut grads = backward(&scaler, &var, false)?;
        scaler.unscale(&mut grads)?;
        scaler.step(&mut optimizer, &mut grads)?;
        scaler.update()?;
        assert_eq!((floats(&var), scaler.current_scale()), (vec![0.5], 1.0));
        Ok(())
    });
}

#[test]
fn refused_gradients_are_not_changed() {
    ranks(1, |pg| {
        let [wide, narrow] = [DType::F32, DType::F16].map(|dtype| Var::ones(1, dtype, pg.device()).unwrap());
        let named = vec![("wide".to_string(), wide.clone()), ("narrow".to_string(), narrow.clone())];
        let mut scaler = GradScaler::new(&pg, named, GradScalerOptions::default())?;
        let loss = (wide.sum_all()? + narrow.to_dtype(DType::F32)?.sum_all()?)?;
        let mut grads = scaler.scale(&loss)?.backward()?;
        let error = scaler.unscale(&mut grads).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "narrow"), "{error}");
        assert_eq!(floats(grads.get(&wide).unwrap()), [65536.]);
        Ok(())
    });
}

#[test]
fn a_scaler_is_saved_and_loaded_like_an_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    ranks(1, |pg| {
        let options =
            GradScalerOptions { init_scale: 8.0, growth_factor: 1.1, backoff_factor: 0.3, ..Default::default() };
        let mut saved = GradScaler::new(&pg, weight(1.0), options)?;
        let counts = |interval: i64, tracker: i64| -> Result<_> {
            let mut dict = saved.state_dict()?;
            dict.insert("growth_interval".to_string(), Tensor::new(&[interval], pg.device())?);
            dict.insert("growth_tracker".to_string(), Tensor::new(&[tracker], pg.device())?);
            Ok(dict)
        };
        let dict = counts(9, 7)?;
        saved.load_state_dict(&dict)?;
        let file = folder.path().join("scaler.safetensors");
        saved.save(&file)?;
        let mut loaded = GradScaler::new(&pg, weight(1.0), GradScalerOptions::default())?;
        let values = |scaler: &GradScaler| -> Result<Vec<f64>> {
            let dict = scaler.state_dict()?;
            let names = ["scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker"];
            names.iter().map(|name| Ok(dict[*name].to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?[0])).collect()
        };
        assert_eq!(values(&loaded)?, [65536., 2., 0.5, 2000., 0.]);
        loaded.load(&file)?;
        assert_eq!(values(&loaded)?, [8., 1.1, 0.3, 9., 7.]);

        // A state that does not fit is refused and changes nothing.
        let dict = saved.state_dict()?;
        let with = |name: &str, value: Tensor| {
            let mut dict = dict.clone();
            dict.insert(name.to_string(), value);
            dict
        };
        let negative = with("scale", Tensor::new(&[-1f64], pg.device())?);
        let error = loaded.load_state_dict(&negative).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "scale", .. }), "{error}");
        let unknown = with("surplus", Tensor::new(&[1f64], pg.device())?);
        let error = loaded.load_state_dict(&unknown).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "surplus"), "{error}");
        let error = loaded.load_state_dict(&Default::default()).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "kind"), "{error}");
        assert_eq!(values(&loaded)?, [8., 1.1, 0.3, 9., 7.]);

        // A growth interval that is never reached.
        let never = GradScaler::new(&pg, weight(1.0), GradScalerOptions { growth_interval: usize::MAX, ..options })?;
        loaded.load_state_dict(&never.state_dict()?)?;
        assert_eq!(values(&loaded)?[3], i64::MAX as f64);
        Ok(())
    });
}
