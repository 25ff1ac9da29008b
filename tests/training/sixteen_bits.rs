//! What candle calculates in 16 bits in the models of the bench `step`.
#[allow(dead_code, reason = "the bench uses all of it")]
#[path = "../../benches/step/net/mod.rs"]
pub(crate) mod net;

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_ddp::nn::{add, cat};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use net::Model;

/// The tensors of 16 bits to whose gradients candle adds, one number at a time. Functions of candle-ddp-nn pass their gradients on outside of
/// candle's graph, so it has only the arguments of candle's own operations; those of parameters go to DDP.
fn of_candle(loss: &Tensor) -> Vec<Vec<usize>> {
    let is_narrow = |dtype| matches!(dtype, DType::F16 | DType::BF16);
    let nodes = loss.sorted_nodes().into_iter().filter(|node| is_narrow(node.dtype()) && !node.is_variable());
    nodes.map(|node| node.dims().to_vec()).collect()
}

/// Cuts images to a small part, and text to a few words. The graph stays the same.
fn few(x: &Tensor, model: Model) -> candle_core::Result<Tensor> {
    match (x.rank(), model) {
        (4, _) => x.narrow(2, 0, 32)?.narrow(3, 0, 32)?.contiguous(),
        (_, Model::Lstm) => x.narrow(0, 0, 3),
        _ => Ok(x.clone()),
    }
}

/// Variables of zeros, since random numbers take most of the time of such a test.
struct Zeros;

impl SimpleBackend for Zeros {
    fn get(&self, s: Shape, _: &str, _: Init, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        Ok(Var::zeros(s, dtype, dev)?.as_tensor().clone())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("the shape of {name} is not known")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

#[test]
fn candle_adds_no_gradients_of_16_bits() {
    // The graph network shows what candle's index_select and index_add cost.
    let of_vision = [Model::Resnet18, Model::Deeplab, Model::Mobilenet, Model::Unet, Model::Vit];
    let models = [Model::Mlp, Model::Gpt, Model::Muon, Model::Lstm].into_iter().chain(of_vision);
    for model in models {
        let device = &Device::Cpu;
        let vb = VarBuilder::from_backend(Box::new(Zeros), DType::BF16, device.clone());
        let net = model.build(32, false, Some(2), vb).unwrap();
        let batch = model.batch(2, 32, DType::BF16, device).unwrap();
        let loss = net(&few(&batch.input, model).unwrap(), &few(&batch.targets, model).unwrap()).unwrap();
        assert_eq!(of_candle(&loss), [[0; 0]; 0], "{model:?}");
    }
    let x = Tensor::ones((2, 3), DType::BF16, &Device::Cpu).unwrap();
    let x = candle_core::Var::from_tensor(&x).unwrap();
    let sum = add(&x, &x).unwrap();
    // The result itself is one of the tensors.
    let used = |joined: Tensor| of_candle(&add(&joined, &joined).unwrap());
    assert_eq!(used(cat(&[&sum, &sum], 0).unwrap()), [[4, 3]]);
    assert!(used(Tensor::cat(&[&sum, &sum], 0).unwrap()).contains(&vec![2, 3]));
}
