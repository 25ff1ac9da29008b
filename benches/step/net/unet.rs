//! The U-Net of DDPM ("Denoising diffusion probabilistic models", Ho et al. 2020) for images of 32 × 32, with half of its channels.
use candle_core::{D, DType, Module, ModuleT, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, Conv2d, Dropout, GroupNorm, InterpolateMode, Linear, add, cat, conv2d, group_norm, interpolate,
    linear, reshape, scaled_dot_product_attention, silu, transpose,
};
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, func_t};

const WIDTH: usize = 64;
/// The channels of each resolution, as multiples of the width.
const LEVELS: [usize; 4] = [1, 2, 2, 2];
/// The level with attention: 16 × 16.
const ATTENTION: usize = 1;
const BLOCKS: usize = 2;
const GROUPS: usize = 32;

/// The noise of noisy images (N, 3, 32, 32), whose times are spread over the thousand steps.
pub(super) fn unet(vb: VarBuilder) -> Result<FuncT<'static>> {
    let time = [linear(WIDTH, 4 * WIDTH, vb.pp("time.0"))?, linear(4 * WIDTH, 4 * WIDTH, vb.pp("time.1"))?];
    let first = conv2d(3, WIDTH, 3, PADDED, vb.pp("first"))?;
    let (mut channels, mut down, mut skips) = (WIDTH, Vec::new(), vec![WIDTH]);
    for (level, multiple) in LEVELS.into_iter().enumerate() {
        for block in 0..BLOCKS {
            down.push(Part::block(
                channels,
                multiple * WIDTH,
                level == ATTENTION,
                vb.pp(format!("down.{level}.{block}")),
            )?);
            channels = multiple * WIDTH;
            skips.push(channels);
        }
        if level + 1 < LEVELS.len() {
            let halved = Conv2dConfig { stride: 2, ..PADDED };
            down.push(Part::Down(conv2d(channels, channels, 3, halved, vb.pp(format!("down.{level}.half")))?));
            skips.push(channels);
        }
    }
    let middle = [true, false]
        .into_iter()
        .enumerate()
        .map(|(index, attention)| Part::block(channels, channels, attention, vb.pp(format!("middle.{index}"))));
    let middle = middle.collect::<Result<Vec<_>>>()?;
    let mut up = Vec::new();
    for (level, multiple) in LEVELS.into_iter().enumerate().rev() {
        for block in 0..=BLOCKS {
            let inputs = channels + skips.pop().unwrap_or_default();
            up.push(Part::block(inputs, multiple * WIDTH, level == ATTENTION, vb.pp(format!("up.{level}.{block}")))?);
            channels = multiple * WIDTH;
        }
        if level > 0 {
            up.push(Part::Up(conv2d(channels, channels, 3, PADDED, vb.pp(format!("up.{level}.double")))?));
        }
    }
    let (norm, last) =
        (group_norm(GROUPS, channels, 1e-5, vb.pp("norm"))?, conv2d(channels, 3, 3, PADDED, vb.pp("last"))?);
    Ok(func_t(move |images, train| {
        let [inner, outer] = &time;
        let time = silu(&outer.forward(&silu(&inner.forward(&times(images)?)?)?)?)?;
        let mut x = first.forward(images)?;
        let mut skips = vec![x.clone()];
        for part in &down {
            x = part.forward(&x, &time, train)?;
            skips.push(x.clone());
        }
        x = middle.iter().try_fold(x, |x, part| part.forward(&x, &time, train))?;
        for part in &up {
            let skip = if let Part::Block(..) = part { skips.pop() } else { None };
            x = match skip {
                Some(skip) => part.forward(&cat(&[&x, &skip], 1)?, &time, train)?,
                None => part.forward(&x, &time, train)?,
            };
        }
        last.forward(&silu(&norm.forward(&x)?)?)
    }))
}

const PADDED: Conv2dConfig = Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };

/// The sines and cosines (N, `WIDTH`) of the images' times.
fn times(images: &Tensor) -> Result<Tensor> {
    let (samples, half, device) = (images.dim(0)?, WIDTH / 2, images.device());
    let times = (Tensor::arange(0u32, samples as u32, device)?.to_dtype(DType::F32)? * (1000. / samples as f64))?;
    let rates =
        (Tensor::arange(0u32, half as u32, device)?.to_dtype(DType::F32)? * (-1e4f64.ln() / half as f64))?.exp()?;
    let angles = times.unsqueeze(1)?.broadcast_mul(&rates)?;
    Tensor::cat(&[angles.sin()?, angles.cos()?], 1)?.to_dtype(images.dtype())
}

enum Part {
    Block(Box<Residual>, Option<Box<Attention>>),
    Down(Conv2d),
    Up(Conv2d),
}

impl Part {
    fn block(inputs: usize, outputs: usize, attention: bool, vb: VarBuilder) -> Result<Self> {
        let attention = attention.then(|| Attention::new(outputs, vb.pp("attention")).map(Box::new)).transpose()?;
        Ok(Self::Block(Box::new(Residual::new(inputs, outputs, vb)?), attention))
    }

    fn forward(&self, x: &Tensor, time: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Block(residual, attention) => {
                let x = residual.forward(x, time, train)?;
                attention.as_ref().map_or(Ok(x.clone()), |attention| attention.forward(&x))
            }
            Self::Down(convolution) => convolution.forward(x),
            Self::Up(convolution) => {
                let (height, width) = (x.dim(2)?, x.dim(3)?);
                convolution.forward(&interpolate(x, (2 * height, 2 * width), InterpolateMode::Nearest)?)
            }
        }
    }
}

/// Two convolutions, between which the time is added, and a connection around them.
struct Residual {
    norms: [GroupNorm; 2],
    convolutions: [Conv2d; 2],
    time: Linear,
    dropout: Dropout,
    shortcut: Option<Conv2d>,
}

impl Residual {
    fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let shortcut = || conv2d(inputs, outputs, 1, Conv2dConfig::default(), vb.pp("shortcut"));
        Ok(Self {
            norms: [
                group_norm(GROUPS, inputs, 1e-5, vb.pp("norm1"))?,
                group_norm(GROUPS, outputs, 1e-5, vb.pp("norm2"))?,
            ],
            convolutions: [
                conv2d(inputs, outputs, 3, PADDED, vb.pp("conv1"))?,
                conv2d(outputs, outputs, 3, PADDED, vb.pp("conv2"))?,
            ],
            time: linear(4 * WIDTH, outputs, vb.pp("time"))?,
            dropout: Dropout::new(0.1),
            shortcut: (inputs != outputs).then(shortcut).transpose()?,
        })
    }

    fn forward(&self, x: &Tensor, time: &Tensor, train: bool) -> Result<Tensor> {
        let hidden = self.convolutions[0].forward(&silu(&self.norms[0].forward(x)?)?)?;
        let time = reshape(&self.time.forward(time)?, ((), hidden.dim(1)?, 1, 1))?;
        let hidden = silu(&self.norms[1].forward(&add(&hidden, &time)?)?)?;
        let hidden = self.convolutions[1].forward(&self.dropout.forward_t(&hidden, train)?)?;
        match &self.shortcut {
            Some(shortcut) => add(&shortcut.forward(x)?, &hidden),
            None => add(x, &hidden),
        }
    }
}

/// Attention of one head between the pixels, with a connection around it.
struct Attention {
    norm: GroupNorm,
    /// Queries, keys, values and the output.
    products: [Conv2d; 4],
}

impl Attention {
    fn new(channels: usize, vb: VarBuilder) -> Result<Self> {
        let product = |name| conv2d(channels, channels, 1, Conv2dConfig::default(), vb.pp(name));
        Ok(Self {
            norm: group_norm(GROUPS, channels, 1e-5, vb.pp("norm"))?,
            products: [product("q")?, product("k")?, product("v")?, product("out")?],
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (samples, channels, height, width) = x.dims4()?;
        let (normalised, [q, k, v, out]) = (self.norm.forward(x)?, &self.products);
        let rows = |product: &Conv2d| {
            let x = reshape(&product.forward(&normalised)?, (samples, 1, channels, height * width))?;
            transpose(&x, D::Minus2, D::Minus1)
        };
        let y = scaled_dot_product_attention(&rows(q)?, &rows(k)?, &rows(v)?, AttentionOptions::default())?;
        let y = reshape(&transpose(&y, D::Minus2, D::Minus1)?, (samples, channels, height, width))?;
        add(x, &out.forward(&y)?)
    }
}
