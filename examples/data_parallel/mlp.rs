//! The model: six layers, each followed by a ReLU.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{Linear, linear, relu};
use candle_nn::VarBuilder;

pub(crate) struct Mlp(Vec<Linear>);

impl Mlp {
    pub(crate) fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self((0..6).map(|layer| linear(width, width, vb.pp(layer))).collect::<Result<_>>()?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| relu(&layer.forward(&x)?))
    }
}
