//! LayerNorm and RMSNorm on a GPU, against the same on the CPU.
use super::common::{assert_close, floats, tensor};
use candle_core::{DType, Device, Module, Var};
use candle_ddp::nn::LayerNorm;

/// Around the threads of a block, with more rows than are added up together; without rows.
const SHAPES: [[usize; 2]; 7] = [[1, 1], [3, 15], [40, 256], [33, 257], [20_000, 3], [4096, 1024], [0, 8]];

pub(crate) fn norms_alike(gpu: &Device) {
    let dtypes = [(DType::F32, 1e-4), (DType::F64, 1e-5), (DType::F16, 1e-2), (DType::BF16, 5e-2)];
    for (dtype, tolerance) in dtypes {
        for (shape, kind) in SHAPES.into_iter().flat_map(|shape| [0, 1, 2].map(|kind| (shape, kind))) {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| {
                    let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    Var::from_tensor(&values).unwrap()
                };
                // An input that begins in the middle of its storage.
                let (x, dy) = (var(&[shape[0] + 1, shape[1]], 1), var(&shape, 2));
                let (weight, bias) = (var(&[shape[1]], 3), var(&[shape[1]], 4));
                let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
                let norm = match kind {
                    0 => LayerNorm::new(w, b, 0.1),
                    1 => LayerNorm::new_no_bias(w, 0.1),
                    _ => LayerNorm::rms_norm(w, 0.1),
                };
                let y = norm.forward(&x.narrow(0, 1, shape[0]).unwrap()).unwrap();
                if shape[0] == 0 {
                    // candle cannot do more with a tensor without elements on a GPU: it launches empty grids.
                    assert_eq!(y.dims(), shape);
                    return Vec::new();
                }
                let grads = (&y * dy.as_tensor()).unwrap().backward().unwrap();
                let vars = [&x, &weight, &bias];
                let gradients = vars.into_iter().filter_map(|var| grads.get(var)).map(floats);
                std::iter::once(floats(&y)).chain(gradients).collect::<Vec<_>>()
            };
            for (number, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("{number} of {dtype:?} {shape:?}, kind {kind}"));
            }
        }
    }
}
