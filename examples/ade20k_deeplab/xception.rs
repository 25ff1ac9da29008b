//! The aligned Xception of DeepLabv3+ (Chen et al. 2018, figure 4), as its authors trained it: batch norms also after the
//! depthwise convolutions, strides in place of max pooling, ReLUs between depthwise and pointwise convolutions only in the
//! last block. The variables are named as timm's.
use super::convolution::{Convolution, Separable};
use candle_core::{ModuleT, Result, Tensor};
use candle_ddp::nn::{add, relu};
use candle_ddp::vision::models::NormLayer;
use candle_nn::VarBuilder;

/// Which Xception.
#[derive(Clone, Copy)]
pub(crate) struct XceptionOptions {
    /// The blocks between entry and exit flow: 16 in Xception 65, 8 in Xception 41.
    pub(crate) middle_blocks: usize,
    /// The channels that go into the first block; the paper has 64. All others are in proportion.
    pub(crate) width: usize,
    /// By how much height and width are reduced at most: 8, 16 or 32. Where the strides would reduce them further,
    /// convolutions are dilated.
    pub(crate) output_stride: usize,
}

/// The layers before the classifier.
pub(crate) struct Xception {
    stem: [Convolution; 2],
    blocks: Vec<Block>,
    /// Of the result of [`features`](Self::features).
    pub(crate) channels: [usize; 2],
}

/// The block from whose middle the low-level features come.
const LOW_LEVEL: usize = 1;

impl Xception {
    pub(crate) fn new(options: XceptionOptions, norm: &NormLayer, vb: VarBuilder) -> Result<Self> {
        let channels = |of_paper: usize| (of_paper * options.width / 64).max(1);
        let names = |layer: usize| {
            let vb = vb.pp(format!("stem.{layer}"));
            [vb.pp("conv"), vb.pp("bn")]
        };
        let stem = [
            Convolution::new([3, channels(32)], 3, 2, 1, norm, names(0))?,
            Convolution::new([channels(32), channels(64)], 3, 1, 1, norm, names(1))?,
        ];
        let entry = [([128; 3], 2, true), ([256; 3], 2, true), ([728; 3], 2, true)];
        let middle = vec![([728; 3], 1, true); options.middle_blocks];
        let exit = [([728, 1024, 1024], 2, true), ([1536, 1536, 2048], 1, false)];
        let (mut blocks, mut inputs, mut reduced, mut dilation) = (Vec::new(), channels(64), 2, 1);
        for (outputs, stride, residual) in entry.into_iter().chain(middle).chain(exit) {
            let outputs = outputs.map(channels);
            let strided = reduced * stride <= options.output_stride;
            let vb = vb.pp(format!("blocks.{}", blocks.len()));
            let stride_here = if strided { stride } else { 1 };
            blocks.push(Block::new(inputs, outputs, stride_here, dilation, residual, norm, vb)?);
            // The block itself still has the dilation of those before it.
            if strided {
                reduced *= stride
            } else {
                dilation *= stride
            }
            [.., inputs] = outputs;
        }
        Ok(Self { stem, blocks, channels: [channels(256), channels(2048)] })
    }

    /// From images [B, 3, H, W] to low-level features [B, `channels[0]`, H / 4, W / 4] and the last ones
    /// [B, `channels[1]`, H / `output_stride`, W / `output_stride`], rounded up.
    pub(crate) fn features(&self, images: &Tensor, train: bool) -> Result<[Tensor; 2]> {
        let mut x = images.clone();
        for convolution in &self.stem {
            x = convolution.forward_relu_t(&x, train)?;
        }
        let mut low = x.clone();
        for (index, block) in self.blocks.iter().enumerate() {
            let inner = block.inner(&x, train)?;
            x = block.outer(&x, &inner, train)?;
            if index == LOW_LEVEL {
                low = inner;
            }
        }
        Ok([low, x])
    }
}

/// Three separable convolutions, of which the last has the stride.
struct Block {
    convolutions: [Separable; 3],
    skip: Skip,
}

enum Skip {
    /// There is no residual connection, and the ReLUs follow the convolutions. Otherwise they precede them.
    None,
    Identity,
    Convolution(Convolution),
}

impl Block {
    fn new(
        inputs: usize,
        outputs: [usize; 3],
        stride: usize,
        dilation: usize,
        residual: bool,
        norm: &NormLayer,
        vb: VarBuilder,
    ) -> Result<Self> {
        let [first, second, last] = outputs;
        let separable = |number: usize, channels: [usize; 2], stride: usize| {
            Separable::new(channels, stride, dilation, norm, vb.pp(format!("stack.conv{number}")))
        };
        let skip = if !residual {
            Skip::None
        } else if inputs == last && stride == 1 {
            Skip::Identity
        } else {
            let names = [vb.pp("shortcut.conv"), vb.pp("shortcut.bn")];
            Skip::Convolution(Convolution::new([inputs, last], 1, stride, 1, norm, names)?)
        };
        let convolutions = [
            separable(1, [inputs, first], 1)?,
            separable(2, [first, second], 1)?,
            separable(3, [second, last], stride)?,
        ];
        Ok(Self { convolutions, skip })
    }

    fn convolve(&self, number: usize, x: &Tensor, train: bool) -> Result<Tensor> {
        match self.skip {
            Skip::None => self.convolutions[number].forward_relu_t(x, train),
            _ => self.convolutions[number].forward_t(&relu(x)?, train),
        }
    }

    /// The first two convolutions.
    fn inner(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.convolve(1, &self.convolve(0, x, train)?, train)
    }

    /// The last convolution, of the output of [`inner`](Self::inner) for the input `x`, and the residual connection.
    fn outer(&self, x: &Tensor, inner: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.convolve(2, inner, train)?;
        match &self.skip {
            Skip::None => Ok(y),
            Skip::Identity => add(&y, x),
            Skip::Convolution(skip) => add(&y, &skip.forward_t(x, train)?),
        }
    }
}
