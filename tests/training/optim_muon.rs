//! Muon, compared with PyTorch's: see golden/optim.md.
use crate::common::{assert_error, floats, golden, ranks, tensor, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::nn::autocast;
use candle_ddp::optim::*;
use candle_ddp::{DistributedDataParallel, Error};
use candle_nn::{Init, VarBuilder, VarMap};

const SHAPES: [(usize, usize); 3] = [(6, 4), (4, 6), (5, 5)];

/// Three matrices from a row of 73 numbers.
fn matrices(row: &Tensor) -> Vec<Tensor> {
    let starts = [0, 24, 48];
    let matrix =
        |((rows, columns), start)| row.narrow(0, start, rows * columns).unwrap().reshape((rows, columns)).unwrap();
    SHAPES.into_iter().zip(starts).map(matrix).collect()
}

/// A loss with these gradients.
fn gradients(vars: &[Var], gradients: &[Tensor]) -> GradStore {
    let terms = vars.iter().zip(gradients).map(|(var, gradient)| (var.as_tensor() * gradient)?.sum_all());
    Tensor::stack(&terms.collect::<Result<Vec<_>>>().unwrap(), 0).unwrap().sum_all().unwrap().backward().unwrap()
}

#[test]
fn muon_follows_pytorch() {
    let golden = golden("optim.safetensors");
    let base = ParamsMuon { lr: 0.02, ..Default::default() };
    let other = ParamsMuon {
        weight_decay: 0.,
        momentum: 0.8,
        nesterov: false,
        ns_coefficients: [2., -1.5, 0.5],
        eps: 1e-3,
        ns_steps: 3,
        adjust_lr: AdjustLr::MatchRmsAdamw,
        ..base
    };
    let spectral = ParamsMuon { adjust_lr: AdjustLr::SpectralUnclamped, ..base.clone() };
    for (name, options) in [("default", base), ("other", other), ("spectral", spectral)] {
        for inside in [false, true] {
            let vars: Vec<Var> =
                matrices(&golden["muon.start"]).iter().map(|matrix| Var::from_tensor(matrix).unwrap()).collect();
            let none = ParamsAdamW::default();
            let mut muon = Muon::with_adamw(vars.clone(), options.clone(), none, |_| false).unwrap();
            for step in 0..10 {
                let row = golden["muon.gradients"].get(step).unwrap();
                let grads = gradients(&vars, &matrices(&row));
                // Autocast does not reach the optimizer.
                match inside {
                    true => autocast(DType::F16, || muon.step(&grads)),
                    false => muon.step(&grads),
                }
                .unwrap();
                let expected = matrices(&golden[&format!("muon.{name}")].get(step).unwrap());
                for (index, (var, expected)) in vars.iter().zip(&expected).enumerate() {
                    let errors = floats(var).into_iter().zip(floats(expected)).map(|(a, b)| (a - b).abs());
                    // Both round to 8 bits in each iteration. A step moves each number by up to 0.02.
                    let error = errors.fold(0., f32::max);
                    assert!(error < 2e-4 * (step + 1) as f32, "{name}, step {step}, matrix {index}: off by {error}");
                }
            }
        }
    }
}

/// A kernel is trained as the matrix that its authors make of it, and each matrix of a stack as if it were alone.
#[test]
fn kernels_and_stacks_are_trained_as_their_matrices() {
    for adjust_lr in [AdjustLr::Original, AdjustLr::MatchRmsAdamw, AdjustLr::SpectralUnclamped] {
        let options = MuonGroup::Muon(ParamsMuon { lr: 0.02, adjust_lr, ..Default::default() });
        for (shape, matrices) in [
            (&[7, 2, 3, 1][..], vec![(7, 6)]),
            (&[2, 2, 3, 3], vec![(2, 18)]),
            (&[2, 1, 2, 1, 3], vec![(2, 6)]),
            (&[3, 5, 4], vec![(5, 4); 3]),
        ] {
            let var = |tensor: Tensor| Var::from_tensor(&tensor).unwrap();
            let one = var(tensor(shape, 1));
            let split = |tensor: &Tensor| -> Vec<Tensor> {
                let flat = tensor.flatten_all().unwrap();
                let size = matrices[0].0 * matrices[0].1;
                let part = |index: usize| flat.narrow(0, index * size, size).unwrap().reshape(matrices[index]).unwrap();
                (0..matrices.len()).map(part).collect()
            };
            let alone: Vec<Var> = split(&one).into_iter().map(|matrix| var(matrix.copy().unwrap())).collect();
            let mut optimizer = Muon::new(vec![one.clone()], options.clone()).unwrap();
            let mut reference = Muon::new(alone.clone(), options.clone()).unwrap();
            for step in 0..4 {
                let gradient = tensor(shape, 10 + step);
                optimizer.step(&gradients(std::slice::from_ref(&one), std::slice::from_ref(&gradient))).unwrap();
                reference.step(&gradients(&alone, &split(&gradient))).unwrap();
                let expected: Vec<f32> = alone.iter().flat_map(|matrix| floats(matrix)).collect();
                assert_eq!(floats(&one), expected, "{shape:?}, {adjust_lr:?}, step {step}");
            }
        }
    }
}

type Net = (Tensor, Tensor, Tensor);

fn build(vb: VarBuilder) -> Result<Net> {
    let init = Init::Randn { mean: 0., stdev: 1. };
    let matrix = |name: &str, shape| vb.get_with_hints(shape, name, init);
    Ok((matrix("hidden", (4, 3))?, matrix("head", (3, 2))?, vb.get_with_hints(2, "bias", init)?))
}

#[test]
fn other_parameters_have_adamw_in_files_and_steps() {
    let (muon, adamw) = (ParamsMuon::default(), ParamsAdamW { lr: 0.01, ..Default::default() });
    let found = ranks(2, |pg| {
        let (varmap, of_reference) = (VarMap::new(), VarMap::new());
        let ddp = DistributedDataParallel::new(&pg, &varmap, build)?;
        let alone = DistributedDataParallel::new(&pg, &of_reference, build)?;
        var(&of_reference, "head").set(var(&varmap, "head").as_tensor())?;
        var(&of_reference, "bias").set(var(&varmap, "bias").as_tensor())?;
        let is_head = |name: &str| name == "head";
        let mut optimizer = Muon::with_adamw(&ddp, muon.clone(), adamw.clone(), is_head)?;
        let others: Vec<(String, Var)> =
            Parameters::from(&alone).into_iter().filter(|(name, _)| name != "hidden").collect();
        let mut reference = AdamW::from_groups(vec![ParameterGroup { parameters: others, options: adamw.clone() }])?;
        let loss = |net: &Net| (&net.0.sin()?.sum_all()? + net.1.sqr()?.sum_all()?)? + net.2.cos()?.sum_all()?;
        let grads = |ddp: &DistributedDataParallel<Net>| ddp.backward(&ddp.call(|net| loss(net))?);
        for _ in 0..3 {
            optimizer.step(&grads(&ddp)?)?;
            reference.step(&grads(&alone)?)?;
        }
        for name in ["head", "bias"] {
            assert_eq!(floats(&var(&varmap, name)), floats(&var(&of_reference, name)), "{name}");
        }
        let debug = format!("{optimizer:?}");
        let at = |text: &str| debug.find(text).unwrap_or_else(|| panic!("{text} is not in {debug}"));
        assert!(at("ParamsMuon") < at("hidden") && at("hidden") < at("ParamsAdamW") && at("ParamsAdamW") < at("head"));
        assert_eq!(optimizer.learning_rates(), [muon.lr, adamw.lr]);
        // A loaded state continues with the same numbers.
        let state = optimizer.state_dict()?;
        assert_eq!(state["state.hidden.momentum_buffer"].dims(), [4, 3]);
        assert!(state.contains_key("state.bias.exp_avg_sq"));
        let mut loaded = Muon::with_adamw(&ddp, muon.clone(), adamw.clone(), is_head)?;
        loaded.load_state_dict(&state)?;
        let before = floats(&var(&varmap, "hidden"));
        optimizer.step(&grads(&ddp)?)?;
        let expected = floats(&var(&varmap, "hidden"));
        var(&varmap, "hidden").set(&Tensor::new(before, &Device::Cpu)?.reshape((4, 3))?)?;
        loaded.step(&grads(&ddp)?)?;
        assert_eq!(floats(&var(&varmap, "hidden")), expected);
        Ok(expected)
    });
    assert_eq!(found[0], found[1]);
}

#[test]
fn parameters_and_options_that_do_not_fit_are_refused() {
    let zeros = |shape: &[usize]| Var::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let group = |var: Var, options| vec![ParameterGroup { parameters: vec![("bias".to_string(), var)], options }];
    let muon = ParamsMuon::default();
    for shape in [&[6][..], &[]] {
        let error = Muon::from_groups(group(zeros(shape), MuonGroup::Muon(muon.clone()))).map(drop).unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }) && error.to_string().contains("MuonGroup::AdamW"), "{error}");
        Muon::from_groups(group(zeros(shape), MuonGroup::AdamW(Default::default()))).unwrap();
    }
    let wrong = [
        ("lr", ParamsMuon { lr: -1., ..muon.clone() }),
        ("momentum", ParamsMuon { momentum: 1., ..muon.clone() }),
        ("eps", ParamsMuon { eps: f64::NAN, ..muon.clone() }),
        ("weight_decay", ParamsMuon { weight_decay: -0.1, ..muon.clone() }),
        ("ns_coefficients", ParamsMuon { ns_coefficients: [1., f64::INFINITY, 0.], ..muon.clone() }),
    ];
    for (name, options) in wrong {
        assert_error(Muon::from_groups(group(zeros(&[2, 3]), MuonGroup::Muon(options))), &[name]);
    }
    // A gradient of zeros changes nothing but by decay.
    let zero = zeros(&[2, 3]);
    let mut optimizer = Muon::from_groups(group(zero.clone(), MuonGroup::Muon(muon))).unwrap();
    optimizer.step(&gradients(std::slice::from_ref(&zero), &[zero.zeros_like().unwrap()])).unwrap();
    assert_eq!(floats(&zero), [0.; 6]);
}
