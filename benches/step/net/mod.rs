//! The models, with the layers of this crate.
#[path = "../../../examples/char_gpt/block.rs"]
pub(crate) mod block;
mod deeplab;
mod encoder;
mod gnn;
mod gpt;
mod mobilenet;
mod unet;
#[path = "../../../examples/word_lm/model.rs"]
mod word_lm;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{linear, relu, to_dtype};
use candle_ddp::vision::models::{self, ResNet, ResNetOptions, ResNetStem};
use candle_nn::{FuncT, VarBuilder, func_t};
use clap::ValueEnum;
use word_lm::{Config, Kind, WordLm};

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Model {
    /// Six layers of 1024 × 1024, each followed by a ReLU.
    Mlp,
    /// ResNet-18 for images of 32 × 32.
    Resnet18,
    /// torchvision's ResNet-50, for images of any size.
    Resnet50,
    /// A small DeepLabv3+ for images of 64 × 64: depthwise and dilated convolutions, bilinear upsampling.
    Deeplab,
    /// MobileNetV2 in miniature for images of 64 × 64: inverted residuals.
    Mobilenet,
    /// The U-Net of DDPM for images of 32 × 32, with half of its channels.
    Unet,
    /// A GPT of six layers of width 384, for 256 tokens.
    Gpt,
    /// The same with the sizes of GPT-2 small: twelve layers of width 768, for 1024 of 50,257 tokens.
    Gpt2,
    /// With those of GPT-2 medium: 24 layers of width 1024.
    Gpt2Medium,
    /// 24 layers of width 2048.
    Gpt2Xl,
    /// A GPT of three such layers, with 4096 tokens and capped logits, whose matrices Muon updates.
    Muon,
    /// The example `word_lm`: two LSTM layers of 650, for 35 of 10,000 words.
    Lstm,
    /// A graph network of four layers of width 128, for graphs of 256 nodes and 2048 edges.
    Gnn,
    /// A vision transformer of the size of ViT-S/16.
    Vit,
    /// An encoder of the size of BERT-base, for 512 of 30,522 tokens.
    Bert,
}

impl Model {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Resnet18 => "resnet18",
            Self::Resnet50 => "resnet50",
            Self::Deeplab => "deeplab",
            Self::Mobilenet => "mobilenet",
            Self::Unet => "unet",
            Self::Gpt => "gpt",
            Self::Gpt2 => "gpt2",
            Self::Gpt2Medium => "gpt2-medium",
            Self::Gpt2Xl => "gpt2-xl",
            Self::Muon => "muon",
            Self::Lstm => "lstm",
            Self::Gnn => "gnn",
            Self::Vit => "vit",
            Self::Bert => "bert",
        }
    }

    pub(crate) fn batch_size(self) -> usize {
        match self {
            Self::Mlp => 256,
            Self::Lstm => 20,
            Self::Resnet18 | Self::Resnet50 | Self::Mobilenet | Self::Vit => 32,
            Self::Deeplab
            | Self::Unet
            | Self::Gpt
            | Self::Gpt2
            | Self::Gpt2Medium
            | Self::Gpt2Xl
            | Self::Muon
            | Self::Gnn
            | Self::Bert => 8,
        }
    }

    /// Whether Muon updates the matrices, and not AdamW.
    pub(crate) fn is_muons(self) -> bool {
        matches!(self, Self::Muon)
    }

    pub(crate) fn batch(self, size: usize, image_size: usize, dtype: DType, device: &Device) -> Result<Batch> {
        let noise = |sample: &[usize]| Tensor::randn(0f32, 1., [&[size], sample].concat(), device)?.to_dtype(dtype);
        let tokens = |vocabulary: usize, tokens: usize| {
            Tensor::rand(0f32, vocabulary as f32, (size, tokens), device)?.to_dtype(DType::U32)
        };
        let input = match self {
            Self::Mlp => noise(&[1024]),
            Self::Resnet18 | Self::Unet => noise(&[3, 32, 32]),
            Self::Resnet50 | Self::Vit => noise(&[3, image_size, image_size]),
            Self::Deeplab | Self::Mobilenet => noise(&[3, 64, 64]),
            Self::Gnn => noise(&[gnn::NODES, gnn::WIDTH]),
            Self::Gpt => tokens(gpt::SMALL.vocabulary, gpt::SMALL.tokens),
            Self::Gpt2 | Self::Gpt2Medium | Self::Gpt2Xl => tokens(gpt::GPT2.vocabulary, gpt::GPT2.tokens),
            Self::Muon => tokens(gpt::CAPPED.vocabulary, gpt::CAPPED.tokens),
            Self::Bert => tokens(encoder::VOCABULARY, encoder::TOKENS),
            Self::Lstm => tokens(WORDS.vocabulary, 35)?.t()?.contiguous(),
        }?;
        let targets = match self {
            Self::Gpt | Self::Gpt2 | Self::Gpt2Medium | Self::Gpt2Xl | Self::Muon | Self::Bert => input.roll(-1, 1)?,
            Self::Lstm => input.roll(-1, 0)?,
            _ => Tensor::zeros(0, DType::U32, &Device::Cpu)?,
        };
        Ok(Batch { input, targets })
    }

    /// Only the GPTs can be checkpointed, and have other numbers of `layers`.
    pub(crate) fn build(
        self,
        image_size: usize,
        is_checkpointed: bool,
        layers: Option<usize>,
        vb: VarBuilder,
    ) -> Result<LossNet> {
        let gpt = |sizes: gpt::Sizes, vb| {
            let layers = layers.unwrap_or(sizes.layers);
            gpt::gpt(&gpt::Sizes { layers, ..sizes }, is_checkpointed, vb)
        };
        match self {
            Self::Mlp => mlp(vb).map(with_loss),
            Self::Resnet18 => resnet18(vb).map(with_loss),
            Self::Resnet50 => resnet50(vb).map(with_loss),
            Self::Deeplab => deeplab::deeplab(vb).map(with_loss),
            Self::Mobilenet => mobilenet::mobilenet(vb).map(with_loss),
            Self::Gnn => gnn::gnn(vb).map(with_loss),
            Self::Unet => unet::unet(vb).map(with_loss),
            Self::Gpt => gpt(gpt::SMALL, vb),
            Self::Gpt2 => gpt(gpt::GPT2, vb),
            Self::Gpt2Medium => gpt(gpt::MEDIUM, vb),
            Self::Gpt2Xl => gpt(gpt::XL, vb),
            Self::Muon => gpt::capped(&gpt::CAPPED, vb),
            Self::Lstm => {
                let net = WordLm::new(WORDS, vb)?;
                Ok(Box::new(move |words, next| Ok(net.loss(words, next, None, true)?.0)))
            }
            Self::Vit => encoder::vit(image_size, vb).map(with_loss),
            Self::Bert => encoder::bert(vb),
        }
    }
}

const WORDS: Config =
    Config { kind: Kind::Lstm, vocabulary: 10_000, emsize: 650, nhid: 650, nlayers: 2, dropout: 0.2, tied: false };

/// A model with its loss, of the tensors of a [`Batch`].
pub(crate) type LossNet = Box<dyn Fn(&Tensor, &Tensor) -> Result<Tensor>>;

/// The input of a step, and for models of tokens the token that follows each of them.
pub(crate) struct Batch {
    pub(crate) input: Tensor,
    pub(crate) targets: Tensor,
}

/// A cheap loss: the mean square of the output.
fn with_loss(net: FuncT<'static>) -> LossNet {
    Box::new(move |input, _| to_dtype(&net.forward_t(input, true)?, DType::F32)?.sqr()?.mean_all())
}

fn mlp(vb: VarBuilder) -> Result<FuncT<'static>> {
    let layers = (0..6).map(|layer| linear(1024, 1024, vb.pp(layer))).collect::<Result<Vec<_>>>()?;
    Ok(func_t(move |x, _| layers.iter().try_fold(x.clone(), |x, layer| relu(&layer.forward(&x)?))))
}

fn resnet18(vb: VarBuilder) -> Result<FuncT<'static>> {
    let options = ResNetOptions { num_classes: Some(10), stem: ResNetStem::Cifar, ..Default::default() };
    Ok(resnet(models::resnet18(options, vb)?))
}

fn resnet50(vb: VarBuilder) -> Result<FuncT<'static>> {
    Ok(resnet(models::resnet50(ResNetOptions::default(), vb)?))
}

fn resnet(net: ResNet) -> FuncT<'static> {
    func_t(move |x, train| net.forward_t(x, train))
}
