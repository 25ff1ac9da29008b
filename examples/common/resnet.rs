//! ResNet-18, -34 and -50 with the names of torchvision's variables, so that its weights can be loaded.
use super::convolution::{Convolution, NormLayer};
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{Linear, MaxPool2dOptions, adaptive_avg_pool2d, linear, max_pool2d};
use candle_nn::VarBuilder;
use clap::ValueEnum;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Arch {
    Resnet18,
    Resnet34,
    Resnet50,
}

/// What precedes the four stages.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Stem {
    /// A 7 × 7 convolution with stride 2, and max pooling with stride 2.
    ImageNet,
    /// A 3 × 3 convolution, for images of 32 × 32.
    Cifar,
}

/// Which ResNet.
#[derive(Clone, Copy)]
pub(crate) struct ResNetOptions {
    pub(crate) arch: Arch,
    pub(crate) stem: Stem,
    /// The channels of the first stage's 3 × 3 convolutions; torchvision has 64.
    pub(crate) width: usize,
    /// How many stages, at most the last three, have dilation in place of their stride.
    pub(crate) dilated_stages: usize,
}

impl Arch {
    fn blocks(self) -> [usize; 4] {
        match self {
            Self::Resnet18 => [2, 2, 2, 2],
            Self::Resnet34 | Self::Resnet50 => [3, 4, 6, 3],
        }
    }

    /// The channels that come out of a block, for each of its 3 × 3 convolution.
    fn expansion(self) -> usize {
        if self == Self::Resnet50 { 4 } else { 1 }
    }
}

/// The classifier.
pub(crate) struct ResNet {
    backbone: Backbone,
    fc: Linear,
}

impl ResNet {
    pub(crate) fn new(options: ResNetOptions, classes: usize, norm: NormLayer, vb: VarBuilder) -> Result<Self> {
        let backbone = Backbone::new(options, norm, vb.clone())?;
        Ok(Self { fc: linear(backbone.channels[3], classes, vb.pp("fc"))?, backbone })
    }
}

impl ModuleT for ResNet {
    /// From images [B, 3, H, W] to logits [B, classes].
    fn forward_t(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let [.., x] = self.backbone.stages(images, train)?;
        self.fc.forward(&adaptive_avg_pool2d(&x, 1)?.flatten_from(1)?)
    }
}

/// What precedes the classifier.
pub(crate) struct Backbone {
    stem: Convolution,
    pool: bool,
    stages: [Vec<Block>; 4],
    /// Of the four stages' outputs.
    pub(crate) channels: [usize; 4],
}

impl Backbone {
    pub(crate) fn new(options: ResNetOptions, norm: NormLayer, vb: VarBuilder) -> Result<Self> {
        let ResNetOptions { arch, width, .. } = options;
        let (kernel, stride) = if options.stem == Stem::ImageNet { (7, 2) } else { (3, 1) };
        let stem = Convolution::new([3, width], kernel, stride, 1, norm, [vb.pp("conv1"), vb.pp("bn1")])?;
        let channels = [1, 2, 4, 8].map(|factor| factor * width * arch.expansion());
        let (mut stages, mut inputs, mut dilation) = ([const { Vec::new() }; 4], width, 1);
        for (stage, blocks) in stages.iter_mut().enumerate() {
            // As in torchvision, a stage's first block has the dilation of the stage before it.
            let dilated = stage > 0 && stage + options.dilated_stages >= 4;
            let mut stride = if stage == 0 || dilated { 1 } else { 2 };
            let mut first_dilation = dilation;
            dilation *= if dilated { 2 } else { 1 };
            for block in 0..arch.blocks()[stage] {
                let vb = vb.pp(format!("layer{}.{block}", stage + 1));
                blocks.push(Block::new(arch, [inputs, width << stage], stride, first_dilation, norm, vb)?);
                (inputs, stride, first_dilation) = (channels[stage], 1, dilation);
            }
        }
        Ok(Self { stem, pool: options.stem == Stem::ImageNet, stages, channels })
    }

    /// Returns the outputs of the four stages.
    pub(crate) fn stages(&self, images: &Tensor, train: bool) -> Result<[Tensor; 4]> {
        let mut x = self.stem.forward_relu_t(images, train)?;
        if self.pool {
            let options = MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ..Default::default() };
            x = max_pool2d(&x, 3, options)?;
        }
        let mut next = |blocks: &Vec<Block>| {
            x = blocks.iter().try_fold(x.clone(), |x, block| block.forward_t(&x, train))?;
            Result::Ok(x.clone())
        };
        let [first, second, third, fourth] = &self.stages;
        Ok([next(first)?, next(second)?, next(third)?, next(fourth)?])
    }
}

/// Two 3 × 3 convolutions, or in ResNet-50 one between two of 1 × 1, with a residual connection.
struct Block {
    first: Vec<Convolution>,
    last: Convolution,
    downsample: Option<Convolution>,
}

impl Block {
    fn new(
        arch: Arch,
        [inputs, width]: [usize; 2],
        stride: usize,
        dilation: usize,
        norm: NormLayer,
        vb: VarBuilder,
    ) -> Result<Self> {
        let outputs = width * arch.expansion();
        let names = |number: usize| [vb.pp(format!("conv{number}")), vb.pp(format!("bn{number}"))];
        let (first, last) = if arch == Arch::Resnet50 {
            let first = Convolution::new([inputs, width], 1, 1, 1, norm, names(1))?;
            let second = Convolution::new([width, width], 3, stride, dilation, norm, names(2))?;
            (vec![first, second], Convolution::new([width, outputs], 1, 1, 1, norm, names(3))?)
        } else {
            let first = Convolution::new([inputs, width], 3, stride, dilation, norm, names(1))?;
            (vec![first], Convolution::new([width, outputs], 3, 1, dilation, norm, names(2))?)
        };
        let downsample = if inputs == outputs && stride == 1 {
            None
        } else {
            let names = [vb.pp("downsample.0"), vb.pp("downsample.1")];
            Some(Convolution::new([inputs, outputs], 1, stride, 1, norm, names)?)
        };
        Ok(Self { first, last, downsample })
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let z = match &self.downsample {
            Some(downsample) => downsample.forward_t(x, train)?,
            None => x.clone(),
        };
        let y = self.first.iter().try_fold(x.clone(), |y, convolution| convolution.forward_relu_t(&y, train))?;
        self.last.forward_add_relu_t(&y, &z, train)
    }
}
