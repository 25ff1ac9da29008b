//! Convolutions without bias that a batch norm follows.
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Conv2d, conv2d_no_bias};
use candle_ddp::vision::models::NormLayer;
use candle_nn::{Conv2dConfig, VarBuilder};

/// A convolution, which keeps the height and width of its input but for the stride, and a batch norm.
pub(crate) struct Convolution {
    conv: Conv2d,
    norm: BatchNorm,
}

impl Convolution {
    pub(crate) fn new(
        channels: [usize; 2],
        kernel: usize,
        stride: usize,
        dilation: usize,
        norm: &NormLayer,
        names: [VarBuilder; 2],
    ) -> Result<Self> {
        Self::grouped(channels, kernel, Conv2dConfig { stride, dilation, ..Default::default() }, norm, names)
    }

    /// A 3 × 3 convolution of each channel by itself.
    pub(crate) fn depthwise(
        channels: usize,
        stride: usize,
        dilation: usize,
        norm: &NormLayer,
        names: [VarBuilder; 2],
    ) -> Result<Self> {
        let config = Conv2dConfig { stride, dilation, groups: channels, ..Default::default() };
        Self::grouped([channels; 2], 3, config, norm, names)
    }

    fn grouped(
        [inputs, outputs]: [usize; 2],
        kernel: usize,
        config: Conv2dConfig,
        norm: &NormLayer,
        [conv_vb, norm_vb]: [VarBuilder; 2],
    ) -> Result<Self> {
        let config = Conv2dConfig { padding: config.dilation * (kernel / 2), ..config };
        Ok(Self { conv: conv2d_no_bias(inputs, outputs, kernel, config, conv_vb)?, norm: norm(outputs, norm_vb)? })
    }

    /// With a ReLU at the end.
    pub(crate) fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_relu_t(&self.conv.forward(x)?, train)
    }
}

impl ModuleT for Convolution {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.norm.forward_t(&self.conv.forward(x)?, train)
    }
}

/// A separable convolution: 3 × 3 of each channel by itself, then 1 × 1 of all channels, each with its batch norm.
pub(crate) struct Separable {
    depthwise: Convolution,
    pointwise: Convolution,
}

impl Separable {
    /// The variables are named `conv_dw`, `bn_dw`, `conv_pw` and `bn_pw`.
    pub(crate) fn new(
        [inputs, outputs]: [usize; 2],
        stride: usize,
        dilation: usize,
        norm: &NormLayer,
        vb: VarBuilder,
    ) -> Result<Self> {
        let names = |part: &str| [vb.pp(format!("conv_{part}")), vb.pp(format!("bn_{part}"))];
        Ok(Self {
            depthwise: Convolution::depthwise(inputs, stride, dilation, norm, names("dw"))?,
            pointwise: Convolution::new([inputs, outputs], 1, 1, 1, norm, names("pw"))?,
        })
    }

    /// With a ReLU after each of the two.
    pub(crate) fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.pointwise.forward_relu_t(&self.depthwise.forward_relu_t(x, train)?, train)
    }
}

impl ModuleT for Separable {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.pointwise.forward_t(&self.depthwise.forward_t(x, train)?, train)
    }
}
