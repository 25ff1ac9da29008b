//! MobileNetV2 in miniature: inverted residuals with depthwise convolutions.
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Conv2d, adaptive_avg_pool2d, add, batch_norm, conv2d_no_bias, flatten, linear};
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, func_t};

/// The channels, the number of blocks and the stride of the first of each stage.
const STAGES: [(usize, usize, usize); 4] = [(24, 2, 1), (32, 3, 2), (64, 3, 2), (96, 2, 1)];
/// How many times as many channels a block has inside.
const EXPANSION: usize = 6;

pub(super) fn mobilenet(vb: VarBuilder) -> Result<FuncT<'static>> {
    let stem = Layer::new(3, 16, 3, 2, 1, vb.pp("stem"))?;
    let (mut blocks, mut channels) = (Vec::new(), 16);
    for (width, count, stride) in STAGES {
        for block in 0..count {
            let stride = if block == 0 { stride } else { 1 };
            blocks.push(Block::new(channels, width, stride, vb.pp(format!("blocks.{}", blocks.len())))?);
            channels = width;
        }
    }
    let last = Layer::new(channels, 384, 1, 1, 1, vb.pp("last"))?;
    let head = linear(384, 100, vb.pp("head"))?;
    Ok(func_t(move |images, train| {
        let x = stem.forward_relu(images, train)?;
        let x = blocks.iter().try_fold(x, |x, block| block.forward(&x, train))?;
        head.forward(&flatten(&adaptive_avg_pool2d(&last.forward_relu(&x, train)?, 1)?, 1, 3)?)
    }))
}

/// A convolution and its batch normalisation.
struct Layer {
    convolution: Conv2d,
    norm: BatchNorm,
}

impl Layer {
    fn new(inputs: usize, outputs: usize, kernel: usize, stride: usize, groups: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
        let convolution = conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("conv"))?;
        Ok(Self { convolution, norm: batch_norm(outputs, 1e-5, vb.pp("norm"))? })
    }

    fn forward_relu(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_relu_t(&self.convolution.forward(x)?, train)
    }
}

struct Block {
    expand: Layer,
    depthwise: Layer,
    project: Layer,
    is_residual: bool,
}

impl Block {
    fn new(inputs: usize, outputs: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let inner = EXPANSION * inputs;
        Ok(Self {
            expand: Layer::new(inputs, inner, 1, 1, 1, vb.pp("expand"))?,
            depthwise: Layer::new(inner, inner, 3, stride, inner, vb.pp("depthwise"))?,
            project: Layer::new(inner, outputs, 1, 1, 1, vb.pp("project"))?,
            is_residual: inputs == outputs && stride == 1,
        })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let inner = self.depthwise.forward_relu(&self.expand.forward_relu(x, train)?, train)?;
        let Layer { convolution, norm } = &self.project;
        let projected = norm.forward_t(&convolution.forward(&inner)?, train)?;
        if self.is_residual { add(x, &projected) } else { Ok(projected) }
    }
}
