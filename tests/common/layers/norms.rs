//! LayerNorm and RMSNorm against PyTorch's.
use crate::common::{assert_close, floats};
use candle_core::{Device, Module, Tensor, Var, safetensors};
use candle_ddp::nn::{LayerNorm, RmsNorm};
use std::collections::HashMap;

fn golden(group: &str, device: &Device) -> HashMap<String, Tensor> {
    let all = safetensors::load_buffer(include_bytes!("../../golden/nn.safetensors"), device).unwrap();
    let strip = |name: &str| Some(name.strip_prefix(group)?.strip_prefix('.')?.to_string());
    all.into_iter().filter_map(|(name, value)| Some((strip(&name)?, value))).collect()
}

fn check(device: &Device, group: &str, make: impl Fn(&Tensor, Option<&Tensor>) -> Box<dyn Module>) {
    let golden = golden(group, device);
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

pub(crate) fn layer_norm_matches_pytorch(device: &Device) {
    check(device, "layer_norm", |weight, bias| Box::new(LayerNorm::new(weight.clone(), bias.unwrap().clone(), 1e-5)));
}

pub(crate) fn rms_norm_matches_pytorch(device: &Device) {
    check(device, "rms_norm", |weight, _| Box::new(RmsNorm::new(weight.clone(), 1e-5)));
}
