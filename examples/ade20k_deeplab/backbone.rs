//! The networks that find the features of an image: a ResNet or an Xception.
use super::xception::{Xception, XceptionOptions};
use candle_core::{Result, Tensor};
use candle_ddp::vision::models::{NormLayer, ResNet, ResNetOptions, resnet18, resnet34, resnet50};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum BackboneKind {
    Resnet18,
    Resnet34,
    Resnet50,
    /// The aligned Xception with 8 blocks in the middle.
    Xception41,
    /// The one of the DeepLabv3+ paper, with 16 blocks in the middle.
    Xception65,
}

pub(crate) enum Backbone {
    ResNet(ResNet),
    Xception(Xception),
}

impl BackboneKind {
    /// Builds the backbone, which reduces height and width by `output_stride`: 8, 16 or 32. `width` is 64 for the models of
    /// the papers.
    pub(crate) fn build(
        self,
        width: usize,
        output_stride: usize,
        norm: &NormLayer,
        vb: VarBuilder,
    ) -> Result<Backbone> {
        let resnet = |build: fn(ResNetOptions, VarBuilder) -> Result<ResNet>| {
            let options = ResNetOptions {
                num_classes: None,
                norm_layer: Arc::clone(norm),
                replace_stride_with_dilation: [false, output_stride < 16, output_stride < 32],
                width,
                ..Default::default()
            };
            build(options, vb.clone()).map(Backbone::ResNet)
        };
        let xception = |middle_blocks| {
            let options = XceptionOptions { middle_blocks, width, output_stride };
            Xception::new(options, norm, vb.clone()).map(Backbone::Xception)
        };
        match self {
            Self::Resnet18 => resnet(resnet18),
            Self::Resnet34 => resnet(resnet34),
            Self::Resnet50 => resnet(resnet50),
            Self::Xception41 => xception(8),
            Self::Xception65 => xception(16),
        }
    }
}

impl Backbone {
    /// Returns the channels of the low-level features and those of the last ones.
    pub(crate) fn channels(&self) -> [usize; 2] {
        match self {
            Self::ResNet(resnet) => [resnet.channels()[0], resnet.channels()[3]],
            Self::Xception(xception) => xception.channels,
        }
    }

    /// From images [B, 3, H, W] to low-level features, of a quarter of their height and width, and the last ones.
    pub(crate) fn features(&self, images: &Tensor, train: bool) -> Result<[Tensor; 2]> {
        match self {
            Self::ResNet(resnet) => {
                let [low, .., high] = resnet.features(images, train)?;
                Ok([low, high])
            }
            Self::Xception(xception) => xception.features(images, train),
        }
    }
}
