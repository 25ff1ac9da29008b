//! LayerNorm and RMSNorm, compared with PyTorch and used as drop-ins for candle's.
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp_nn::{RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
use candle_ddp_testing::{assert_close, fill, floats, layers, tensor, var};
use candle_nn::{VarBuilder, VarMap};

#[test]
fn layer_norm_matches_pytorch() {
    layers::layer_norm_matches_pytorch(&Device::Cpu);
}

#[test]
fn rms_norm_matches_pytorch() {
    layers::rms_norm_matches_pytorch(&Device::Cpu);
}

#[test]
fn add_norm_is_add_and_norm() {
    layers::add_norm_is_add_and_norm(&Device::Cpu);
}

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
    let error = layer.forward(&tensor(&[3, 7], 1)).unwrap_err().to_string();
    assert!(error.contains("f32[3, 7]") && error.contains("must be 8"), "{error}");
    let error = layer.forward(&Tensor::zeros((3, 8), DType::U8, &Device::Cpu).unwrap()).unwrap_err().to_string();
    assert!(error.contains("U8"), "{error}");
}
