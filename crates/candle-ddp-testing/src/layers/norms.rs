//! LayerNorm and RMSNorm against PyTorch's.
use crate::{assert_close, floats, tensor};
use candle_core::{DType, Device, Module, Tensor, Var, safetensors};
use candle_ddp_nn::{LayerNorm, RmsNorm, add, no_grad, relu};
use std::collections::HashMap;

fn golden(group: &str, device: &Device) -> HashMap<String, Tensor> {
    let all = safetensors::load_buffer(include_bytes!("../../../../tests/golden/nn.safetensors"), device).unwrap();
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

pub fn layer_norm_matches_pytorch(device: &Device) {
    check(device, "layer_norm", |weight, bias| Box::new(LayerNorm::new(weight.clone(), bias.unwrap().clone(), 1e-5)));
}

pub fn rms_norm_matches_pytorch(device: &Device) {
    check(device, "rms_norm", |weight, _| Box::new(RmsNorm::new(weight.clone(), 1e-5)));
}

/// A norm at the end of a residual connection, whose sum is used again: results and gradients are the same bits as those of two
/// layers, with rows of vectors, odd ones, and ones that do not fit into registers, and with residuals that are views.
pub fn add_norm_is_add_and_norm(device: &Device) {
    let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16];
    let shapes: [&[usize]; 4] = [&[3, 5, 16], &[70, 264], &[4, 7], &[2, 8200]];
    for (dtype, shape) in dtypes.into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape))) {
        let size = *shape.last().unwrap();
        let of = |shape: &[usize], seed| tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
        let var = |shape: &[usize], seed| Var::from_tensor(&of(shape, seed)).unwrap();
        let (x, residual, weight, bias) = (var(shape, 1), var(shape, 2), var(&[size], 3), var(&[size], 4));
        let layer = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
        let rms = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
        let flat = |t: &Tensor| t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for (centred, is_view, is_used_again) in
            [(true, false, true), (true, true, true), (false, false, true), (true, false, false)]
        {
            let run = |together: bool| {
                let added = match is_view {
                    true => residual.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap(),
                    false => residual.as_tensor().clone(),
                };
                let norm: &dyn Module = if centred { &layer } else { &rms };
                let (sum, normed) = match (together, centred) {
                    (true, true) => layer.add_norm(&relu(&x).unwrap(), &added).unwrap(),
                    (true, false) => rms.add_norm(&relu(&x).unwrap(), &added).unwrap(),
                    (false, _) => {
                        let sum = add(&relu(&x).unwrap(), &added).unwrap();
                        let normed = norm.forward(&sum).unwrap();
                        (sum, normed)
                    }
                };
                // Backward, the norm follows what has used the sum later.
                let y = if is_used_again { add(&sum, &relu(&normed).unwrap()).unwrap() } else { normed.clone() };
                let grads = (&y * of(shape, 5)).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&x, &residual, &weight, &bias].map(|var| grads.get(var).map(flat));
                (flat(&sum), flat(&normed), gradients)
            };
            let what = format!("{dtype:?} {shape:?}, centred {centred}, a view {is_view}, used again {is_used_again}");
            assert_eq!(run(true), run(false), "{what}");
        }
        // The gradient of a sum that was used twice is the sum of what both uses contribute.
        let gradient = |of_sum: bool, of_norm: bool| {
            let (sum, normed) = layer.add_norm(&relu(&x).unwrap(), &residual).unwrap();
            let parts = [of_sum.then_some(sum), of_norm.then(|| relu(&normed).unwrap())];
            let y = parts.into_iter().flatten().reduce(|a, b| add(&a, &b).unwrap()).unwrap();
            floats((&y * of(shape, 5)).unwrap().sum_all().unwrap().backward().unwrap().get(&residual).unwrap())
        };
        let parts: Vec<f32> = gradient(true, false).iter().zip(gradient(false, true)).map(|(a, b)| a + b).collect();
        let tolerance = if dtype == DType::BF16 { 2e-2 } else { 2e-3 };
        assert_close(&gradient(true, true), &parts, tolerance, &format!("{dtype:?} {shape:?}"));
        let (sum, normed) = no_grad(|| layer.add_norm(&x, &residual)).unwrap();
        assert!(!sum.track_op() && !normed.track_op());
        assert_eq!(flat(&sum), flat(&add(&x, &residual).unwrap()));
    }
    let of = |shape: &[usize], dtype| Tensor::ones(shape, dtype, device).unwrap();
    let layer = RmsNorm::new(of(&[8], DType::F32), 1e-5);
    // candle cannot fill a tensor without elements on GPUs.
    let empty = Tensor::zeros((0, 8), DType::F32, device).unwrap();
    let (sum, normed) = layer.add_norm(&empty, &empty).unwrap();
    assert_eq!([sum.dims(), normed.dims()], [&[0, 8]; 2]);
    assert!(layer.add_norm(&of(&[2, 8], DType::F32), &of(&[2, 8], DType::BF16)).is_err());
    assert!(layer.add_norm(&of(&[2, 8], DType::F32), &of(&[3, 8], DType::F32)).is_err());
    assert!(layer.add_norm(&of(&[2, 4], DType::F32), &of(&[2, 4], DType::F32)).is_err());
}
