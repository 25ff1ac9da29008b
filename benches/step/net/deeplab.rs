//! DeepLabv3+ in miniature: separable convolutions, atrous spatial pyramid pooling, bilinear upsampling.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{
    BatchNorm, Conv2d, InterpolateMode, adaptive_avg_pool2d, batch_norm, cat, conv2d, conv2d_no_bias, interpolate,
};
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, func_t};

const CLASSES: usize = 21;

pub(super) fn deeplab(vb: VarBuilder) -> Result<FuncT<'static>> {
    let stem = Layer::new(3, 32, 3, 2, 1, 1, vb.pp("stem"))?;
    let low = Separable::new(32, 64, 2, 1, vb.pp("low"))?;
    let body = [(64, 128, 2, 1), (128, 256, 1, 2), (256, 256, 1, 2)];
    let body = body.into_iter().enumerate().map(|(index, (inputs, outputs, stride, dilation))| {
        Separable::new(inputs, outputs, stride, dilation, vb.pp(format!("body.{index}")))
    });
    let body = body.collect::<Result<Vec<_>>>()?;
    let pyramid = [(1, 1), (3, 2), (3, 4), (3, 6)].into_iter().enumerate().map(|(index, (kernel, dilation))| {
        Layer::new(256, 64, kernel, 1, dilation, 1, vb.pp(format!("pyramid.{index}")))
    });
    let pyramid = pyramid.collect::<Result<Vec<_>>>()?;
    let pooled = Layer::new(256, 64, 1, 1, 1, 1, vb.pp("pooled"))?;
    let joined = Layer::new(5 * 64, 64, 1, 1, 1, 1, vb.pp("joined"))?;
    let skip = Layer::new(64, 24, 1, 1, 1, 1, vb.pp("skip"))?;
    let decoder = Separable::new(64 + 24, 64, 1, 1, vb.pp("decoder"))?;
    let head = conv2d(64, CLASSES, 1, Conv2dConfig::default(), vb.pp("head"))?;
    Ok(func_t(move |images, train| {
        let upsample = |x: &Tensor, like: &Tensor| {
            interpolate(x, (like.dim(2)?, like.dim(3)?), InterpolateMode::Bilinear { align_corners: false })
        };
        let low = low.forward(&stem.forward(images, train)?, train)?;
        let x = body.iter().try_fold(low.clone(), |x, layer| layer.forward(&x, train))?;
        let mut branches = pyramid.iter().map(|layer| layer.forward(&x, train)).collect::<Result<Vec<_>>>()?;
        branches.push(upsample(&pooled.forward(&adaptive_avg_pool2d(&x, 1)?, train)?, &x)?);
        let x = upsample(&joined.forward(&cat(&branches.iter().collect::<Vec<_>>(), 1)?, train)?, &low)?;
        let x = decoder.forward(&cat(&[&x, &skip.forward(&low, train)?], 1)?, train)?;
        upsample(&head.forward(&x)?, images)
    }))
}

/// A convolution, batch normalisation and a ReLU.
struct Layer(Conv2d, BatchNorm);

impl Layer {
    fn new(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        stride: usize,
        dilation: usize,
        groups: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let padding = dilation * (kernel / 2);
        let config = Conv2dConfig { stride, padding, dilation, groups, ..Default::default() };
        Ok(Self(
            conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("conv"))?,
            batch_norm(outputs, 1e-5, vb.pp("bn"))?,
        ))
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.1.forward_relu_t(&self.0.forward(x)?, train)
    }
}

/// A depthwise layer and a pointwise one.
struct Separable(Layer, Layer);

impl Separable {
    fn new(inputs: usize, outputs: usize, stride: usize, dilation: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self(
            Layer::new(inputs, inputs, 3, stride, dilation, inputs, vb.pp("depthwise"))?,
            Layer::new(inputs, outputs, 1, 1, 1, 1, vb.pp("pointwise"))?,
        ))
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x, train)?, train)
    }
}
