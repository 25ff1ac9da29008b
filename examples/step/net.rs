//! The models, built as in any candle program.
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Conv2d, batch_norm, conv2d_no_bias, linear, relu};
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, func_t};
use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Model {
    /// Six layers of 1024 × 1024, each followed by a ReLU.
    Mlp,
    /// ResNet-18 for images of 32 × 32.
    Resnet18,
}

impl Model {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Resnet18 => "resnet18",
        }
    }

    pub(crate) fn batch_size(self) -> usize {
        match self {
            Self::Mlp => 256,
            Self::Resnet18 => 32,
        }
    }

    /// The shape of a sample.
    pub(crate) fn input(self) -> &'static [usize] {
        match self {
            Self::Mlp => &[1024],
            Self::Resnet18 => &[3, 32, 32],
        }
    }

    pub(crate) fn build(self, vb: VarBuilder) -> Result<FuncT<'static>> {
        match self {
            Self::Mlp => mlp(vb),
            Self::Resnet18 => resnet18(vb),
        }
    }
}

fn mlp(vb: VarBuilder) -> Result<FuncT<'static>> {
    let layers = (0..6).map(|layer| linear(1024, 1024, vb.pp(layer))).collect::<Result<Vec<_>>>()?;
    Ok(func_t(move |x, _| layers.iter().try_fold(x.clone(), |x, layer| relu(&layer.forward(&x)?))))
}

fn resnet18(vb: VarBuilder) -> Result<FuncT<'static>> {
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
        head.forward(&x.mean((2, 3))?)
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
