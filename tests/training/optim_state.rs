//! Optimizer state: saving, loading, and errors that name the refused part.
use crate::common::{assert_close, assert_error, floats, tensor};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::Error;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;

fn parameters(dtype: DType) -> Vec<(String, Var)> {
    let var = |name: &str, shape: &[usize], seed| {
        (name.to_string(), Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap()).unwrap())
    };
    vec![var("fc.weight", &[3, 5], 1), var("fc.bias", &[5], 2), var("scale", &[], 3)]
}

/// Gradients that depend only on the step.
fn gradients(parameters: &[(String, Var)], step: u64) -> GradStore {
    let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().backward().unwrap();
    for (index, (_, var)) in parameters.iter().enumerate() {
        let gradient = tensor(var.dims(), 100 * step + index as u64).to_dtype(var.dtype()).unwrap();
        grads.insert(var, gradient);
    }
    grads
}

fn values(parameters: &[(String, Var)]) -> Vec<f32> {
    parameters.iter().flat_map(|(_, var)| floats(var)).collect()
}

/// Saves after three steps, loads into a new optimizer and continues: the values must be bit-identical to an
/// uninterrupted run.
fn resume<R: UpdateRule>(options: R, dtype: DType) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("optimizer.safetensors");
    let (straight, broken) = (parameters(dtype), parameters(dtype));
    let mut one = FusedOptimizer::new(straight.clone(), options.clone()).unwrap();
    let mut two = FusedOptimizer::new(broken.clone(), options.clone()).unwrap();
    for step in 0..6 {
        if step == 3 {
            two.set_learning_rate(0.02).unwrap();
            two.save(&file).unwrap();
            two = FusedOptimizer::new(broken.clone(), options.clone()).unwrap();
            two.load(&file).unwrap();
            assert_eq!(two.learning_rate(), 0.02);
            one.set_learning_rate(0.02).unwrap();
        }
        one.step(&gradients(&straight, step)).unwrap();
        two.step(&gradients(&broken, step)).unwrap();
    }
    assert_eq!(values(&straight), values(&broken), "{options:?}, {dtype:?}");
    assert_ne!(values(&straight), values(&parameters(dtype)), "{options:?}, {dtype:?}");
    let files: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["optimizer.safetensors"], "no temporary file is left");
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        resume(ParamsAdamW { lr: 0.1, ..Default::default() }, dtype);
        resume(ParamsAdam { lr: 0.1, ..Default::default() }, dtype);
        resume(ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() }, dtype);
        resume(ParamsSgd { lr: 0.1, ..Default::default() }, dtype);
        resume(ParamsLamb { lr: 0.1, ..Default::default() }, dtype);
    }
}

/// Three steps with 16-bit parameters must match f32 within the parameters' own rounding.
#[test]
fn parameters_of_16_bits_are_updated_in_f32() {
    for dtype in [DType::BF16, DType::F16] {
        let (half, full) = (parameters(dtype), parameters(dtype));
        let full: Vec<(String, Var)> = full
            .into_iter()
            .map(|(name, var)| (name, Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap()))
            .collect();
        let options = ParamsAdamW { lr: 0.01, ..Default::default() };
        let mut one = AdamW::new(half.clone(), options.clone()).unwrap();
        let mut two = AdamW::new(full.clone(), options).unwrap();
        for step in 0..3 {
            let grads = gradients(&half, step);
            let mut same = gradients(&full, step);
            for ((_, half), (_, full)) in half.iter().zip(&full) {
                same.insert(full, grads.get(half).unwrap().to_dtype(DType::F32).unwrap());
            }
            one.step(&grads).unwrap();
            two.step(&same).unwrap();
        }
        assert_close(&values(&half), &values(&full), 3. / 256., &format!("{dtype:?}"));
        let states = one.state_dict().unwrap();
        assert_eq!(states["state.fc.weight.exp_avg_sq"].dtype(), DType::F32);
    }
}

#[test]
fn gradients_may_be_views_and_have_another_float_dtype() {
    let (a, b) = (parameters(DType::F32), parameters(DType::F32));
    let options = ParamsSgd { lr: 0.5, ..Default::default() };
    let mut one = Sgd::new(a.clone(), options.clone()).unwrap();
    let mut two = Sgd::new(b.clone(), options).unwrap();
    let plain = gradients(&a, 1);
    let mut views = gradients(&b, 1);
    let transposed = plain.get(&a[0].1).unwrap().t().unwrap().contiguous().unwrap().t().unwrap();
    views.insert(&b[0].1, transposed);
    views.insert(&b[1].1, plain.get(&a[1].1).unwrap().to_dtype(DType::F64).unwrap());
    one.step(&plain).unwrap();
    two.step(&views).unwrap();
    assert_eq!(values(&a), values(&b));
}

#[track_caller]
fn assert_parameter_error<T: std::fmt::Debug>(result: candle_ddp::Result<T>, name: &str, words: &str) {
    match result {
        Err(Error::Parameter { parameter, reason }) => {
            assert_eq!(parameter, name);
            assert!(reason.contains(words), "{name}: {words:?} is not in {reason}");
        }
        other => panic!("{name}, {words:?}: {other:?}"),
    }
}

#[test]
fn the_state_of_another_model_is_refused_by_name() {
    let options = ParamsAdamW { lr: 0.1, ..Default::default() };
    let mine = parameters(DType::F32);
    let mut optimizer = AdamW::new(mine.clone(), options.clone()).unwrap();
    optimizer.step(&gradients(&mine, 0)).unwrap();
    let state = optimizer.state_dict().unwrap();
    let before: Vec<f32> = floats(&state["state.fc.bias.exp_avg"]);

    let mut other = state.clone();
    other.remove("state.fc.bias.exp_avg_sq");
    assert_parameter_error(optimizer.load_state_dict(&other), "state.fc.bias.exp_avg_sq", "missing");

    for (name, value, words) in [
        ("state.fc2.bias.step", state["state.fc.bias.step"].clone(), "nothing here has that name"),
        ("state.fc.weight.exp_avg", tensor(&[5, 3], 1), "f32[3, 5]"),
        ("state.fc.weight.exp_avg", tensor(&[3, 5], 1).to_dtype(DType::F64).unwrap(), "f64"),
        ("state.scale.step", Tensor::new(&[-1i64], &Device::Cpu).unwrap(), "negative"),
    ] {
        let mut other = state.clone();
        other.insert(name.to_string(), value);
        assert_parameter_error(optimizer.load_state_dict(&other), name, words);
    }

    let mut lamb = Lamb::new(mine.clone(), ParamsLamb::default()).unwrap();
    assert_parameter_error(lamb.load_state_dict(&state), "kind", "AdamW");

    let groups =
        mine.iter().map(|parameter| ParameterGroup { parameters: vec![parameter.clone()], options: options.clone() });
    let mut grouped = AdamW::from_groups(groups.collect()).unwrap();
    assert_parameter_error(grouped.load_state_dict(&state), "learning_rates", "3");

    // The refused states changed nothing; neither does loading its own state.
    optimizer.load_state_dict(&state).unwrap();
    assert_eq!(floats(&optimizer.state_dict().unwrap()["state.fc.bias.exp_avg"]), before);
}

#[test]
fn bad_files_are_errors_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let mut optimizer = AdamW::new(parameters(DType::F32), ParamsAdamW::default()).unwrap();
    assert!(matches!(optimizer.load(&file), Err(Error::Io { .. })));
    std::fs::write(&file, b"no safetensors").unwrap();
    assert!(matches!(optimizer.load(&file), Err(Error::InvalidArgument { argument: "path", .. })));
    // A folder already has the file's name: the rename fails, and the temporary file is removed.
    let taken = folder.path().join("taken");
    std::fs::create_dir(&taken).unwrap();
    assert!(matches!(optimizer.save(&taken), Err(Error::Io { .. })));
    assert!(matches!(optimizer.save(folder.path().join("missing").join("state")), Err(Error::Io { .. })));
    assert_eq!(folder.path().read_dir().unwrap().count(), 2);
    optimizer.save(&file).unwrap();
    optimizer.load(&file).unwrap();
}

#[test]
fn saving_needs_names() {
    let vars: Vec<Var> = parameters(DType::F32).into_iter().map(|(_, var)| var).collect();
    let optimizer: AdamW = candle_nn::Optimizer::new(vars, ParamsAdamW::default()).unwrap();
    assert_error(optimizer.state_dict(), &["must have names"]);
}

#[test]
fn parameters_that_cannot_be_trained_are_refused_by_name() {
    let named = |name: &str, var: &Var| (name.to_string(), var.clone());
    let float = Var::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let eight = Var::zeros(2, DType::F8E4M3, &Device::Cpu).unwrap();
    let options = ParamsAdamW::default;
    assert_parameter_error(AdamW::new(vec![named("w8", &eight)], options()), "w8", "F8E4M3");
    let twice = vec![named("a", &float), named("b", &float)];
    assert_parameter_error(AdamW::new(twice, options()), "b", "twice");
    let other = Var::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let same = vec![named("a", &float), named("a", &other)];
    assert_parameter_error(AdamW::new(same, options()), "a", "name");

    let integers = Var::zeros(2, DType::I64, &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(vec![named("n", &integers), named("w", &float)], options()).unwrap();
    assert!(format!("{optimizer:?}").contains("[\"w\"]"));
    let mut grads = gradients(&[], 0);
    grads.insert(&float, tensor(&[3, 2], 1));
    assert_error(optimizer.step(&grads), &["parameter w", "f32[3, 2]"]);
}

#[test]
fn invalid_options_are_refused() {
    let refused = |result: candle_ddp::Result<()>, name: &str| match result {
        Err(Error::InvalidArgument { argument, .. }) => assert_eq!(argument, name),
        other => panic!("{other:?}"),
    };
    let adamw = |options| AdamW::new(parameters(DType::F32), options).map(|_| ());
    refused(adamw(ParamsAdamW { beta1: 1., ..Default::default() }), "beta1");
    refused(adamw(ParamsAdamW { lr: f64::NAN, ..Default::default() }), "lr");
    let sgd = |options| Sgd::new(parameters(DType::F32), options).map(|_| ());
    refused(sgd(ParamsSgd { nesterov: true, ..Default::default() }), "nesterov");
    let mut plain = Sgd::new(parameters(DType::F32), ParamsSgd::default()).unwrap();
    refused(plain.set_options(0, ParamsSgd { momentum: 0.9, ..Default::default() }), "options");
    refused(plain.set_options(1, ParamsSgd::default()), "group");
    refused(plain.set_learning_rates(&[0.1, 0.1]), "learning_rates");
    refused(StepLr::new(&mut plain, ParamsStepLr { step_size: 0, gamma: 0.1 }).map(|_| ()), "step_size");
    refused(Ema::new(parameters(DType::F32), 1.5).map(|_| ()), "decay");
}

#[test]
fn clipping_can_refuse_non_finite_norms() {
    let parameters = parameters(DType::F32);
    let vars: Vec<Var> = parameters.iter().map(|(_, var)| var.clone()).collect();
    for bad in [f32::NAN, f32::INFINITY] {
        for norm_type in [NormType::L2, NormType::Inf] {
            let mut grads = gradients(&parameters, 1);
            grads.insert(&vars[1], Tensor::new(&[0f32, bad, 0., 0., 0.], &Device::Cpu).unwrap());
            let options = ClipOptions { norm_type, error_if_nonfinite: true };
            let before = floats(grads.get(&vars[0]).unwrap());
            clip_grad_norm_with(&mut grads, vars.clone(), 1., options).unwrap_err();
            assert_eq!(floats(grads.get(&vars[0]).unwrap()), before);
            let norm =
                clip_grad_norm_with(&mut grads, vars.clone(), 1., ClipOptions { norm_type, ..Default::default() });
            assert_eq!(norm.unwrap().to_scalar::<f64>().unwrap().is_nan(), bad.is_nan());
        }
    }
}

#[test]
fn invalid_learning_rates_are_refused_and_change_nothing() {
    let mut optimizer = AdamW::new(parameters(DType::F32), ParamsAdamW { lr: 0.5, ..Default::default() }).unwrap();
    let mut dict = optimizer.state_dict().unwrap();
    dict.insert("learning_rates".to_string(), Tensor::new(&[f64::NAN], &Device::Cpu).unwrap());
    dict.insert("state.fc.bias.step".to_string(), Tensor::new(&[7i64], &Device::Cpu).unwrap());
    assert!(matches!(optimizer.load_state_dict(&dict), Err(Error::InvalidArgument { .. })));
    assert!(optimizer.set_learning_rates(&[-1.]).is_err());
    assert_eq!(optimizer.learning_rates(), [0.5]);
    assert_eq!(optimizer.state_dict().unwrap()["state.fc.bias.step"].to_vec1::<i64>().unwrap(), [0]);
}

/// As in PyTorch, a weight decay of zero is not added at all.
#[test]
fn infinite_parameters_stay_infinite_without_weight_decay() {
    fn assert_kept<R: UpdateRule>(options: R) {
        let var = Var::new(&[f32::NEG_INFINITY, 1.], &Device::Cpu).unwrap();
        let mut optimizer = FusedOptimizer::new(vec![("w".to_string(), var.clone())], options.clone()).unwrap();
        let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().backward().unwrap();
        grads.insert(&var, Tensor::new(&[0f32, 0.5], &Device::Cpu).unwrap());
        optimizer.step(&grads).unwrap();
        let values = floats(&var);
        assert!(values[0] == f32::NEG_INFINITY && values[1] < 1., "{options:?}: {values:?}");
    }
    assert_kept(ParamsSgd { lr: 0.1, ..Default::default() });
    assert_kept(ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() });
    assert_kept(ParamsSgd { lr: 0.1, momentum: 0.9, nesterov: true, ..Default::default() });
    assert_kept(ParamsAdam { lr: 0.1, weight_decay: 0., ..Default::default() });
    assert_kept(ParamsAdamW { lr: 0.1, weight_decay: 0., ..Default::default() });
    assert_kept(ParamsAdamW { lr: 0.1, weight_decay: 0.01, ..Default::default() });
    assert_kept(ParamsLamb { lr: 0.1, weight_decay: 0., max_grad_norm: None, ..Default::default() });
}

#[test]
fn clipping_without_any_gradient_is_refused() {
    let named = parameters(DType::F32);
    let vars: Vec<Var> = named.iter().map(|(_, var)| var.clone()).collect();
    let refused = |error: Error| {
        let text = error.to_string();
        assert!(text.starts_with("grads: none of the parameters has a gradient in it"), "{text}");
        assert!(text.contains("the model is sharded") && text.contains("the store that `backward`"), "{text}");
    };
    let mut none = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().backward().unwrap();
    refused(clip_grad_norm(&mut none, vars.clone(), 1.).unwrap_err());
    refused(clip_grad_value(&mut none, vars.clone(), 1.).unwrap_err());
    assert_eq!(clip_grad_norm(&mut none, Vec::<Var>::new(), 1.).unwrap().to_scalar::<f64>().unwrap(), 0.);
    clip_grad_value(&mut none, Vec::<Var>::new(), 1.).unwrap();
    // One gradient is enough.
    none.insert(&vars[2], Tensor::new(3f32, &Device::Cpu).unwrap());
    assert_eq!(clip_grad_norm(&mut none, vars.clone(), 1.).unwrap().to_scalar::<f64>().unwrap(), 3.);
    clip_grad_value(&mut none, vars.clone(), 1.).unwrap();
}
