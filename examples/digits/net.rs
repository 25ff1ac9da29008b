//! The model: two convolutions and two linear layers, 13 706 parameters.
use candle_core::{ModuleT, Result, Tensor, Var};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

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

/// Initialises the parameters from `seed` as PyTorch does for such layers: uniformly within ±1/√fan-in. candle cannot
/// seed its own CPU generator.
pub(crate) fn initialise(parameters: &[Var], seed: u64) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bound = 0.;
    for parameter in parameters {
        // A bias follows its layer's weight and has the same bound.
        if parameter.rank() > 1 {
            bound = 1. / (parameter.elem_count() as f32 / parameter.dim(0)? as f32).sqrt();
        }
        let values: Vec<f32> = (0..parameter.elem_count()).map(|_| random.random_range(-bound..bound)).collect();
        parameter.set(&Tensor::from_vec(values, parameter.shape(), parameter.device())?)?;
    }
    Ok(())
}
