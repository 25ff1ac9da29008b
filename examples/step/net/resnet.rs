//! ResNet-18 for images of 32 × 32.
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Conv2d, adaptive_avg_pool2d, batch_norm, conv2d_no_bias, linear};
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, func_t};

pub(super) fn resnet18(vb: VarBuilder) -> Result<FuncT<'static>> {
    let stem = Convolution::new(3, 64, 3, 1, vb.pp("stem"))?;
    let (mut blocks, mut channels) = (Vec::new(), 64);
    for (stage, width) in [64, 128, 256, 512].into_iter().enumerate() {
        for block in 0..2 {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            blocks.push(Block::new(channels, width, stride, vb.pp(format!("stage{stage}.{block}")))?);
            channels = width;
        }
    }
    let head = linear(channels, 10, vb.pp("head"))?;
    Ok(func_t(move |x, train| {
        let x = stem.forward_relu_t(x, train)?;
        let x = blocks.iter().try_fold(x, |x, block| block.forward_t(&x, train))?;
        head.forward(&adaptive_avg_pool2d(&x, 1)?.flatten_from(1)?)
    }))
}

/// A convolution without bias, followed by batch normalisation.
struct Convolution(Conv2d, BatchNorm);

impl Convolution {
    fn new(inputs: usize, outputs: usize, kernel: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { stride, padding: kernel / 2, ..Default::default() };
        Ok(Self(
            conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("conv"))?,
            batch_norm(outputs, 1e-5, vb.pp("bn"))?,
        ))
    }
}

impl Convolution {
    fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.1.forward_relu_t(&self.0.forward(x)?, train)
    }
}

impl ModuleT for Convolution {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.1.forward_t(&self.0.forward(x)?, train)
    }
}

/// Two convolutions with a residual connection.
struct Block {
    first: Convolution,
    second: Convolution,
    shortcut: Option<Convolution>,
}

impl Block {
    fn new(inputs: usize, outputs: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let fits = inputs == outputs && stride == 1;
        Ok(Self {
            first: Convolution::new(inputs, outputs, 3, stride, vb.pp("first"))?,
            second: Convolution::new(outputs, outputs, 3, 1, vb.pp("second"))?,
            shortcut: if fits { None } else { Some(Convolution::new(inputs, outputs, 1, stride, vb.pp("shortcut"))?) },
        })
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let z = match &self.shortcut {
            Some(shortcut) => shortcut.forward_t(x, train)?,
            None => x.clone(),
        };
        let Convolution(convolution, norm) = &self.second;
        let y = convolution.forward(&self.first.forward_relu_t(x, train)?)?;
        norm.forward_add_relu_t(&y, &z, train)
    }
}
