//! ResNet-18, -34 and -50.
use crate::Error;
use candle_core::{D, Module, ModuleT, Result, Tensor};
use candle_ddp_base::debug_fields;
use candle_ddp_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use candle_ddp_nn::{
    BatchNorm, Conv2d, Conv2dConfig, Init, Linear, MaxPool2dOptions, VarBuilder, adaptive_avg_pool2d, batch_norm,
    flatten, max_pool2d,
};
use std::sync::Arc;

/// A function that makes the batch norm of so many channels: torchvision's `norm_layer`.
pub type NormLayer = Arc<dyn Fn(usize, VarBuilder) -> Result<BatchNorm> + Send + Sync>;

/// The options of [`resnet18`], [`resnet34`] and [`resnet50`]. The defaults are torchvision's.
#[derive(Clone)]
pub struct ResNetOptions {
    /// The number of classes. Without it (None), the model has no last layer (`fc`), and returns the pooled features.
    /// Default: 1000.
    pub num_classes: Option<usize>,
    /// Makes each batch norm. Default: [`batch_norm()`] with an `eps` of 1e-5. In candle-ddp, `sync_batch_norm` makes batch
    /// norms that compute the statistics of all ranks' batches together.
    pub norm_layer: NormLayer,
    /// Whether `layer2`, `layer3` and `layer4` dilate their convolutions instead of reducing height and width. Default:
    /// false for all three. Unlike torchvision, ResNet-18 and -34 can do this too.
    pub replace_stride_with_dilation: [bool; 3],
    /// The layers before `layer1`. Default: [`ResNetStem::ImageNet`].
    pub stem: ResNetStem,
    /// The channels of the 3 × 3 convolutions in `layer1`. Each following layer has twice as many. Default: 64; torchvision's
    /// files need it.
    pub width: usize,
}

/// The layers of a ResNet before `layer1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResNetStem {
    /// A 7 × 7 convolution with stride 2, and max pooling with stride 2: torchvision's.
    #[default]
    ImageNet,
    /// A 3 × 3 convolution, for small images such as CIFAR's.
    Cifar,
}

/// ResNet-18, torchvision's `resnet18`.
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument), in candle's error, if `width` or `num_classes` is 0 or more than a million; the errors of `vb`
/// and of `norm_layer`.
pub fn resnet18(options: ResNetOptions, vb: VarBuilder) -> Result<ResNet> {
    ResNet::new(BlockKind::Basic, [2, 2, 2, 2], options, vb)
}

/// ResNet-34, torchvision's `resnet34`.
///
/// # Errors
/// As [`resnet18`].
pub fn resnet34(options: ResNetOptions, vb: VarBuilder) -> Result<ResNet> {
    ResNet::new(BlockKind::Basic, [3, 4, 6, 3], options, vb)
}

/// ResNet-50, torchvision's `resnet50`: in each block, the 3 × 3 convolution has the stride.
///
/// # Errors
/// As [`resnet18`].
pub fn resnet50(options: ResNetOptions, vb: VarBuilder) -> Result<ResNet> {
    ResNet::new(BlockKind::Bottleneck, [3, 4, 6, 3], options, vb)
}

/// A ResNet, made by [`resnet18`], [`resnet34`] or [`resnet50`]. `forward_t` takes a batch of images and the mode: `true`
/// computes the batch norms' statistics from the batch, as in training.
#[derive(Clone, Debug)]
pub struct ResNet {
    stem: Layer,
    pool: bool,
    layers: [Vec<Block>; 4],
    fc: Option<Linear>,
    channels: [usize; 4],
}

/// A convolution without a bias, and its batch norm.
type Layer = (Conv2d, BatchNorm);

#[derive(Clone, Copy, PartialEq)]
enum BlockKind {
    Basic,
    Bottleneck,
}

/// Two 3 × 3 convolutions, or one between two 1 × 1 convolutions (a bottleneck), with a residual connection.
#[derive(Clone, Debug)]
struct Block {
    first: Vec<Layer>,
    last: Layer,
    downsample: Option<Layer>,
}

/// A number of channels beyond this is a mistake.
const MOST: usize = 1_000_000;

impl Default for ResNetOptions {
    fn default() -> Self {
        Self {
            num_classes: Some(1000),
            norm_layer: Arc::new(|channels, vb| batch_norm(channels, 1e-5, vb)),
            replace_stride_with_dilation: [false; 3],
            stem: ResNetStem::default(),
            width: 64,
        }
    }
}

debug_fields!(ResNetOptions: num_classes, replace_stride_with_dilation, stem, width);

impl ResNet {
    fn new(kind: BlockKind, blocks: [usize; 4], options: ResNetOptions, vb: VarBuilder) -> Result<Self> {
        let ResNetOptions { num_classes, norm_layer, replace_stride_with_dilation, stem, width } = options;
        for (argument, number) in [("width", width), ("num_classes", num_classes.unwrap_or(1))] {
            if !(1..=MOST).contains(&number) {
                return Err(Error::invalid(argument, format!("{number} must be from 1 to {MOST}")).into());
            }
        }
        let pool = stem == ResNetStem::ImageNet;
        let (kernel, stride) = if pool { (7, 2) } else { (3, 1) };
        let stem = layer([3, width], kernel, stride, 1, &norm_layer, [vb.pp("conv1"), vb.pp("bn1")])?;
        let channels = [1, 2, 4, 8].map(|factor| factor * width * kind.expansion());
        let (mut layers, mut inputs, mut dilation) = ([const { Vec::new() }; 4], width, 1);
        for (index, layer) in layers.iter_mut().enumerate() {
            let dilated = index > 0 && replace_stride_with_dilation[index - 1];
            let mut stride = if index == 0 || dilated { 1 } else { 2 };
            // As in torchvision, the first block has the dilation of the previous layer.
            let mut block_dilation = dilation;
            dilation *= if dilated { 2 } else { 1 };
            for block in 0..blocks[index] {
                let vb = vb.pp(format!("layer{}.{block}", index + 1));
                layer.push(Block::new(kind, [inputs, width << index], stride, block_dilation, &norm_layer, vb)?);
                (inputs, stride, block_dilation) = (channels[index], 1, dilation);
            }
        }
        let fc = num_classes.map(|classes| fully_connected(inputs, classes, vb.pp("fc"))).transpose()?;
        Ok(Self { stem, pool, layers, fc, channels })
    }

    /// Returns the outputs of `layer1` to `layer4` for images (N, 3, H, W): features for segmentation or detection. Each has
    /// the shape (N, [`channels`](Self::channels), H / s, W / s), rounded up, where s is 4, 8, 16 and 32, or with
    /// [`ResNetStem::Cifar`] 1, 2, 4 and 8. A layer with dilation has the s of the previous layer, and the next layer doubles
    /// that.
    ///
    /// # Errors
    /// Images of another shape, dtype or device than the parameters need; in training the batch norms' errors.
    pub fn features(&self, images: &Tensor, train: bool) -> Result<[Tensor; 4]> {
        let (conv, norm) = &self.stem;
        let mut x = norm.forward_relu_t(&conv.forward(images)?, train)?;
        if self.pool {
            let options = MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ..Default::default() };
            x = max_pool2d(&x, 3, options)?;
        }
        let mut next = |layer: &Vec<Block>| {
            x = layer.iter().try_fold(x.clone(), |x, block| block.forward_t(&x, train))?;
            Result::Ok(x.clone())
        };
        let [first, second, third, fourth] = &self.layers;
        Ok([next(first)?, next(second)?, next(third)?, next(fourth)?])
    }

    /// The numbers of channels of [`features`](Self::features).
    pub fn channels(&self) -> [usize; 4] {
        self.channels
    }
}

impl ModuleT for ResNet {
    /// Takes images (N, 3, H, W) and returns logits (N, classes), or without classes the pooled features (N, channels of
    /// `layer4`).
    ///
    /// # Errors
    /// As [`ResNet::features`].
    fn forward_t(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let [.., x] = self.features(images, train)?;
        let pooled = flatten(&adaptive_avg_pool2d(&x, 1)?, 1, D::Minus1)?;
        match &self.fc {
            Some(fc) => fc.forward(&pooled),
            None => Ok(pooled),
        }
    }
}

impl BlockKind {
    /// The output channels of a block, as a multiple of its 3 × 3 convolutions' channels.
    fn expansion(self) -> usize {
        match self {
            Self::Basic => 1,
            Self::Bottleneck => 4,
        }
    }
}

impl Block {
    fn new(
        kind: BlockKind,
        [inputs, width]: [usize; 2],
        stride: usize,
        dilation: usize,
        norm_layer: &NormLayer,
        vb: VarBuilder,
    ) -> Result<Self> {
        let outputs = width * kind.expansion();
        let names = |number: usize| [vb.pp(format!("conv{number}")), vb.pp(format!("bn{number}"))];
        let (first, last) = match kind {
            BlockKind::Basic => {
                let first = layer([inputs, width], 3, stride, dilation, norm_layer, names(1))?;
                (vec![first], layer([width, outputs], 3, 1, dilation, norm_layer, names(2))?)
            }
            BlockKind::Bottleneck => {
                let first = layer([inputs, width], 1, 1, 1, norm_layer, names(1))?;
                let second = layer([width, width], 3, stride, dilation, norm_layer, names(2))?;
                (vec![first, second], layer([width, outputs], 1, 1, 1, norm_layer, names(3))?)
            }
        };
        let downsample = if inputs == outputs && stride == 1 {
            None
        } else {
            let names = [vb.pp("downsample.0"), vb.pp("downsample.1")];
            Some(layer([inputs, outputs], 1, stride, 1, norm_layer, names)?)
        };
        Ok(Self { first, last, downsample })
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let z = match &self.downsample {
            Some((conv, norm)) => norm.forward_t(&conv.forward(x)?, train)?,
            None => x.clone(),
        };
        let relu = |y: Tensor, (conv, norm): &Layer| norm.forward_relu_t(&conv.forward(&y)?, train);
        let y = self.first.iter().try_fold(x.clone(), relu)?;
        let (conv, norm) = &self.last;
        norm.forward_add_relu_t(&conv.forward(&y)?, &z, train)
    }
}

/// A convolution that reduces height and width by its stride alone, initialised as torchvision does it, and its batch norm.
fn layer(
    [inputs, outputs]: [usize; 2],
    kernel: usize,
    stride: usize,
    dilation: usize,
    norm_layer: &NormLayer,
    [conv, norm]: [VarBuilder; 2],
) -> Result<Layer> {
    const KAIMING: Init =
        Init::Kaiming { dist: NormalOrUniform::Normal, fan: FanInOut::FanOut, non_linearity: NonLinearity::ReLU };
    let weight = conv.get_with_hints((outputs, inputs, kernel, kernel), "weight", KAIMING)?;
    let config = Conv2dConfig { padding: dilation * (kernel / 2), stride, dilation, ..Default::default() };
    Ok((Conv2d::new(weight, None, config), norm_layer(outputs, norm)?))
}

/// A linear layer, initialised as PyTorch does it.
fn fully_connected(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Linear> {
    let bound = 1. / (inputs as f64).sqrt();
    let uniform = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((outputs, inputs), "weight", uniform)?;
    Ok(Linear::new(weight, Some(vb.get_with_hints(outputs, "bias", uniform)?)))
}
