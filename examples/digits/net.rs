//! The model: two convolutions and two linear layers, 13 706 parameters.
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{self, Conv2d, Linear, max_pool2d, relu};
use candle_nn::{Conv2dConfig, VarBuilder};

pub(crate) struct Net {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    pub(crate) fn new(vb: VarBuilder) -> Result<Self> {
        let padded = Conv2dConfig { padding: 1, ..Default::default() };
        Ok(Self {
            conv1: nn::conv2d(1, 16, 3, padded, vb.pp("conv1"))?,
            conv2: nn::conv2d(16, 32, 3, padded, vb.pp("conv2"))?,
            fc1: nn::linear(128, 64, vb.pp("fc1"))?,
            fc2: nn::linear(64, 10, vb.pp("fc2"))?,
        })
    }
}

impl ModuleT for Net {
    fn forward_t(&self, images: &Tensor, _train: bool) -> Result<Tensor> {
        let x = max_pool2d(&relu(&self.conv1.forward(images)?)?, 2, Default::default())?;
        let x = max_pool2d(&relu(&self.conv2.forward(&x)?)?, 2, Default::default())?;
        let x = relu(&self.fc1.forward(&x.flatten_from(1)?)?)?;
        self.fc2.forward(&x)
    }
}
