//! DeepLabv3+: a backbone with dilated convolutions, atrous spatial pyramid pooling (ASPP), and a decoder.
use super::backbone::{Backbone, BackboneKind};
use super::convolution::{Convolution, Separable};
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{Conv2d, InterpolateMode, adaptive_avg_pool2d, cat, conv2d, interpolate};
use candle_ddp::vision::models::NormLayer;
use candle_nn::{Conv2dConfig, VarBuilder};

/// Which DeepLabv3+.
#[derive(Clone, Copy)]
pub(crate) struct DeepLabOptions {
    pub(crate) backbone: BackboneKind,
    /// Of the backbone. With 64, ASPP and the decoder have 256 channels and the low-level features 48, as in the paper.
    pub(crate) width: usize,
    /// By how much the backbone reduces height and width: 8, 16 or 32.
    pub(crate) output_stride: usize,
    pub(crate) classes: usize,
}

pub(crate) struct DeepLab {
    backbone: Backbone,
    /// The branches of ASPP, without the one of the whole image.
    aspp: (Convolution, [Convolution3x3; 3]),
    pooled: Convolution,
    project: Convolution,
    low_level: Convolution,
    decoder: [Convolution3x3; 2],
    classifier: Conv2d,
}

/// A 3 × 3 convolution of ASPP or of the decoder, which is of the same kind as those of the backbone.
enum Convolution3x3 {
    Full(Convolution),
    Separable(Separable),
}

impl DeepLab {
    pub(crate) fn new(options: DeepLabOptions, norm: &NormLayer, vb: VarBuilder) -> Result<Self> {
        let DeepLabOptions { width, output_stride, .. } = options;
        let (channels, low_channels) = (4 * width, 3 * width / 4);
        let backbone = options.backbone.build(width, output_stride, norm, vb.pp("backbone"))?;
        let names = |name: &str| ["conv", "bn"].map(|part| vb.pp(name).pp(part));
        let conv1x1 = |inputs, outputs, name: &str| Convolution::new([inputs, outputs], 1, 1, 1, norm, names(name));
        let conv3x3 = |inputs, dilation, name: &str| {
            let channels = [inputs, channels];
            Ok::<_, candle_core::Error>(match backbone {
                Backbone::ResNet(_) => {
                    Convolution3x3::Full(Convolution::new(channels, 3, 1, dilation, norm, names(name))?)
                }
                Backbone::Xception(_) => {
                    Convolution3x3::Separable(Separable::new(channels, 1, dilation, norm, vb.pp(name))?)
                }
            })
        };
        let [low, high] = backbone.channels();
        // The rates are the paper's at an output stride of 16, and cover as much of the image at every other.
        let atrous = |branch: usize| conv3x3(high, branch * 6 * 16 / output_stride, &format!("aspp.{branch}"));
        Ok(Self {
            aspp: (conv1x1(high, channels, "aspp.0")?, [atrous(1)?, atrous(2)?, atrous(3)?]),
            pooled: conv1x1(high, channels, "pooled")?,
            project: conv1x1(5 * channels, channels, "project")?,
            low_level: conv1x1(low, low_channels, "low_level")?,
            decoder: [conv3x3(channels + low_channels, 1, "decoder.0")?, conv3x3(channels, 1, "decoder.1")?],
            classifier: conv2d(channels, options.classes, 1, Conv2dConfig::default(), vb.pp("classifier"))?,
            backbone,
        })
    }
}

impl ModuleT for DeepLab {
    /// From images [B, 3, H, W] to logits [B, classes, H, W].
    fn forward_t(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let [low, high] = self.backbone.features(images, train)?;
        let (conv1x1, atrous) = &self.aspp;
        let mut branches = vec![conv1x1.forward_relu_t(&high, train)?];
        for convolution in atrous {
            branches.push(convolution.forward_relu_t(&high, train)?);
        }
        let whole = self.pooled.forward_relu_t(&adaptive_avg_pool2d(&high, 1)?, train)?;
        branches.push(resize_like(&whole, &high)?);
        let x = self.project.forward_relu_t(&cat(&branches.iter().collect::<Vec<_>>(), 1)?, train)?;

        let x = Tensor::cat(&[resize_like(&x, &low)?, self.low_level.forward_relu_t(&low, train)?], 1)?;
        let x = self.decoder.iter().try_fold(x, |x, convolution| convolution.forward_relu_t(&x, train))?;
        resize_like(&self.classifier.forward(&x)?, images)
    }
}

impl Convolution3x3 {
    fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Full(convolution) => convolution.forward_relu_t(x, train),
            Self::Separable(convolution) => convolution.forward_relu_t(x, train),
        }
    }
}

/// Bilinear interpolation to the height and width of `like`.
fn resize_like(x: &Tensor, like: &Tensor) -> Result<Tensor> {
    let size = (like.dim(2)?, like.dim(3)?);
    interpolate(x, size, InterpolateMode::Bilinear { align_corners: false })
}
