//! The model: two convolutions and two linear layers, 13 706 parameters.
use candle_core::{ModuleT, Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder};

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
            conv1: candle_nn::conv2d(1, 16, 3, padded, vb.pp("conv1"))?,
            conv2: candle_nn::conv2d(16, 32, 3, padded, vb.pp("conv2"))?,
            fc1: candle_nn::linear(128, 64, vb.pp("fc1"))?,
            fc2: candle_nn::linear(64, 10, vb.pp("fc2"))?,
        })
    }
}

impl ModuleT for Net {
    fn forward_t(&self, images: &Tensor, _train: bool) -> Result<Tensor> {
        let x = max_pool(&self.conv1.forward(images)?.relu()?)?;
        let x = max_pool(&self.conv2.forward(&x)?.relu()?)?;
        let x = self.fc1.forward(&x.flatten_from(1)?)?.relu()?;
        self.fc2.forward(&x)
    }
}

/// Returns the maximum of every 2 × 2 window. candle's `max_pool2d` computes only a quarter of the gradient.
fn max_pool(x: &Tensor) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    x.reshape((n, c, h / 2, 2, w / 2, 2))?.max(5)?.max(3)
}
