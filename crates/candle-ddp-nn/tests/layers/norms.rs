//! LayerNorm and RMSNorm, compared with PyTorch and used as drop-ins for candle's.
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp_nn::{
    GroupNorm, InstanceNorm, InstanceNormConfig, RmsNorm, group_norm, instance_norm, layer_norm, layer_norm_no_bias,
    rms_norm,
};
use candle_ddp_tensor::Error;
use candle_ddp_testing::{assert_close, assert_error, fill, floats, tensor, var};
use candle_nn::{VarBuilder, VarMap};

#[test]
fn they_are_drop_ins_for_candles_layers() {
    let x = tensor(&[3, 5, 8], 1);
    let varmap = VarMap::new();
    let vb = |name: &str| VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu).pp(name);
    candle_nn::layer_norm(8, 1e-5, vb("layer")).unwrap();
    candle_nn::layer_norm_no_bias(8, 1e-5, vb("no_bias")).unwrap();
    candle_nn::rms_norm(8, 1e-5, vb("rms")).unwrap();
    for name in ["gamma", "beta"] {
        vb("old").get_with_hints(8, name, candle_nn::Init::Const(0.0)).unwrap();
    }
    fill(&varmap, 3);
    let count = varmap.data().lock().unwrap().len();
    let pairs: [(Box<dyn Module>, Box<dyn Module>); 4] = [
        (
            Box::new(layer_norm(8, 1e-5, vb("layer")).unwrap()),
            Box::new(candle_nn::layer_norm(8, 1e-5, vb("layer")).unwrap()),
        ),
        (
            Box::new(layer_norm(8, 1e-5, vb("old")).unwrap()),
            Box::new(candle_nn::layer_norm(8, 1e-5, vb("old")).unwrap()),
        ),
        (
            Box::new(layer_norm_no_bias(8, 1e-5, vb("no_bias")).unwrap()),
            Box::new(candle_nn::layer_norm_no_bias(8, 1e-5, vb("no_bias")).unwrap()),
        ),
        (Box::new(rms_norm(8, 1e-5, vb("rms")).unwrap()), Box::new(candle_nn::rms_norm(8, 1e-5, vb("rms")).unwrap())),
    ];
    for (ours, candles) in pairs {
        assert_close(&floats(&ours.forward(&x).unwrap()), &floats(&candles.forward(&x).unwrap()), 1e-5, "y");
    }
    assert_eq!(varmap.data().lock().unwrap().len(), count, "the same names");
}

/// The reason for our own layers. If this test fails, candle's layers compute gradients now, and the documentation must
/// change.
#[test]
fn candles_own_layers_give_no_gradients() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let layer = candle_nn::layer_norm(8, 1e-5, vb).unwrap();
    let x = Var::from_tensor(&tensor(&[3, 8], 1)).unwrap();
    let grads = layer.forward(&x).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&x).is_none() && grads.get(&var(&varmap, "weight")).is_none());
}

#[test]
fn empty_batches_and_bad_inputs() {
    let weight = Var::from_tensor(&tensor(&[8], 1)).unwrap();
    let layer = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
    let y = layer.forward(&Tensor::zeros((0, 8), DType::F32, &Device::Cpu).unwrap()).unwrap();
    assert_eq!(y.dims(), [0, 8]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(floats(grads.get(&weight).unwrap()), [0.0; 8]);
    assert_error(layer.forward(&tensor(&[3, 7], 1)), &["f32[3, 7]", "must be 8"]);
    assert_error(layer.forward(&Tensor::zeros((3, 8), DType::U8, &Device::Cpu).unwrap()), &["U8"]);
}

#[test]
fn group_norm_is_a_drop_in_for_candles() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let candles = candle_nn::group_norm(4, 8, 1e-5, vb.clone()).unwrap();
    fill(&varmap, 3);
    let ours = group_norm(4, 8, 1e-5, vb.clone()).unwrap();
    let affine = InstanceNormConfig { affine: true, ..Default::default() };
    let instances = instance_norm(8, affine, vb.clone()).unwrap();
    assert_eq!(varmap.data().lock().unwrap().len(), 2, "the same names");
    let x = tensor(&[3, 8, 5, 7], 1);
    let close = |a: &Tensor, b: &Tensor| assert_close(&floats(a), &floats(b), 1e-5, "y");
    close(&ours.forward(&x).unwrap(), &candles.forward(&x).unwrap());
    let candles = candle_nn::group_norm(8, 8, 1e-5, vb.clone()).unwrap();
    close(&instances.forward(&x).unwrap(), &candles.forward(&x).unwrap());
    let none = VarMap::new();
    instance_norm(8, 1e-5, VarBuilder::from_varmap(&none, DType::F32, &Device::Cpu)).unwrap();
    assert!(none.all_vars().is_empty());
}

/// Groups around the lengths of runs, lanes and blocks, whose numbers are close to each other and far from zero.
#[test]
fn groups_of_all_sizes_far_from_zero() {
    for (shape, groups) in [(&[2, 3, 4097][..], 1), (&[1, 2, 3, 5], 2), (&[70, 4, 33], 2), (&[1, 6, 130, 127], 3)] {
        let x = (tensor(shape, 1) + 1e3).unwrap();
        let of = |value: f32| Tensor::full(value, shape[1], &Device::Cpu).unwrap();
        let layer = GroupNorm::new(of(1.0), of(0.0), shape[1], groups, 1e-5).unwrap();
        let y = layer.forward(&x).unwrap();
        let exact = x.to_dtype(DType::F64).unwrap().reshape((shape[0] * groups, ())).unwrap();
        let exact = exact.broadcast_sub(&exact.mean_keepdim(1).unwrap()).unwrap();
        let deviation = (exact.sqr().unwrap().mean_keepdim(1).unwrap() + 1e-5).unwrap().sqrt().unwrap();
        let exact = exact.broadcast_div(&deviation).unwrap();
        assert_close(&floats(&y), &floats(&exact), 2e-4, &format!("{shape:?} in {groups} groups"));
    }
}

#[test]
fn group_norm_with_parameters_of_another_dtype() {
    let var = |shape: &[usize], seed, dtype| Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap()).unwrap();
    let (weight, bias) = (var(&[4], 1, DType::F32), var(&[4], 2, DType::F64));
    let x = var(&[2, 4, 9], 3, DType::BF16);
    let run = |x: &Tensor| {
        let layer = GroupNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 4, 2, 1e-5).unwrap();
        let y = layer.forward(x).unwrap();
        let grads = y.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        (y, [&weight, &bias].map(|var| grads.get(var).unwrap().clone()))
    };
    let (y, gradients) = run(&x);
    assert_eq!((y.dtype(), gradients.each_ref().map(Tensor::dtype)), (DType::BF16, [DType::F32, DType::F64]));
    let (exact, expected) = run(&x.to_dtype(DType::F64).unwrap());
    assert_close(&floats(&y), &floats(&exact), 1e-2, "y");
    for (gradient, expected) in gradients.iter().zip(&expected) {
        assert_close(&floats(gradient), &floats(expected), 2e-2, "a gradient");
    }
}

#[test]
fn bad_groups_and_inputs_are_refused() {
    let refused = |error: candle_core::Error, text: &str| {
        let error = Error::from(error);
        assert!(
            matches!(error, Error::Base(candle_ddp_base::Error::InvalidArgument { .. }))
                && error.to_string().contains(text),
            "{error}"
        );
    };
    let of = |size: usize| tensor(&[size], 1);
    let layer = |weight, channels, groups, eps| GroupNorm::new(weight, of(channels), channels, groups, eps);
    refused(layer(of(6), 6, 4, 1e-5).unwrap_err(), "must divide num_channels, which is 6, but is 4");
    refused(layer(of(6), 6, 0, 1e-5).unwrap_err(), "but is 0");
    refused(layer(of(5), 6, 2, 1e-5).unwrap_err(), "weight");
    refused(layer(of(6), 6, 2, -1.0).unwrap_err(), "eps");
    refused(InstanceNorm::new(3, Some((of(3), of(4))), 1e-5).unwrap_err(), "bias");
    let norm = layer(of(6), 6, 2, 1e-5).unwrap();
    refused(norm.forward(&tensor(&[2, 5, 3], 1)).unwrap_err(), "must be (N, 6) or (N, 6, …), not f32[2, 5, 3]");
    refused(norm.forward(&tensor(&[6], 1)).unwrap_err(), "f32[6]");
    assert_error(norm.forward(&Tensor::zeros((2, 6), DType::U8, &Device::Cpu).unwrap()), &["U8"]);
    let instances = InstanceNorm::new(3, None, 1e-5).unwrap();
    refused(instances.forward(&tensor(&[2, 4, 5], 1)).unwrap_err(), "f32[2, 4, 5]");
    refused(instances.forward(&tensor(&[2, 3, 1, 1], 1)).unwrap_err(), "one has no variance");
    refused(instances.forward(&tensor(&[2, 3], 1)).unwrap_err(), "one has no variance");
    // A group of one number is its mean: PyTorch refuses it only in a batch of one.
    let bias = Var::from_tensor(&of(3)).unwrap();
    let single = GroupNorm::new(of(3), bias.as_tensor().clone(), 3, 3, 1e-5).unwrap();
    let y = single.forward(&tensor(&[2, 3], 2)).unwrap();
    assert_eq!(floats(&y), floats(&Tensor::cat(&[of(3), of(3)], 0).unwrap()));
}
