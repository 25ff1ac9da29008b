//! LayerNorm and RMSNorm against PyTorch's, and as drop-ins for candle's.
use crate::common::{assert_close, fill, floats, tensor, var};
use candle_core::{DType, Device, Module, Tensor, Var, safetensors};
use candle_ddp::nn::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashMap;

fn golden(group: &str) -> HashMap<String, Tensor> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/nn.safetensors");
    let all = safetensors::load(path, &Device::Cpu).unwrap();
    let strip = |name: &str| Some(name.strip_prefix(group)?.strip_prefix('.')?.to_string());
    all.into_iter().filter_map(|(name, value)| Some((strip(&name)?, value))).collect()
}

fn check(group: &str, make: impl Fn(&Tensor, Option<&Tensor>) -> Box<dyn Module>) {
    let golden = golden(group);
    let var = |name: &str| Var::from_tensor(&golden[name]).unwrap();
    let (x, weight) = (var("x"), var("weight"));
    let bias = golden.contains_key("bias").then(|| var("bias"));
    let layer = make(weight.as_tensor(), bias.as_ref().map(Var::as_tensor));
    // A transposed input is not contiguous.
    let transposed = Var::from_tensor(&golden["x"].transpose(0, 1).unwrap().contiguous().unwrap()).unwrap();
    for (x, is_transposed) in [(&x, false), (&transposed, true)] {
        let back = |t: &Tensor| if is_transposed { t.transpose(0, 1).unwrap() } else { t.clone() };
        let y = layer.forward(&back(x)).unwrap();
        assert_close(&floats(&y), &floats(&golden["y"]), 1e-5, "y");
        let grads = (y * &golden["dy"]).unwrap().sum_all().unwrap().backward().unwrap();
        let gradient = |var: &Var| grads.get(var).unwrap().clone();
        assert_close(&floats(&back(&gradient(x))), &floats(&golden["dx"]), 1e-5, "dx");
        assert_close(&floats(&gradient(&weight)), &floats(&golden["d_weight"]), 1e-5, "d_weight");
        if let Some(bias) = &bias {
            assert_close(&floats(&gradient(bias)), &floats(&golden["d_bias"]), 1e-5, "d_bias");
        }
    }
}

#[test]
fn layer_norm_is_pytorchs() {
    check("layer_norm", |weight, bias| Box::new(LayerNorm::new(weight.clone(), bias.unwrap().clone(), 1e-5)));
}

#[test]
fn rms_norm_is_pytorchs() {
    check("rms_norm", |weight, _| Box::new(RmsNorm::new(weight.clone(), 1e-5)));
}

#[test]
fn they_take_the_places_of_candles_layers() {
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

/// Why these layers exist. If it fails, candle's layers have learnt it, and the documentation has to change.
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
