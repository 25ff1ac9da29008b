//! The models, built as in any candle program from operations that have a backward pass in candle.
use candle_core::{D, DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{BatchNorm, Conv2d, Conv2dConfig, Init, VarBuilder, batch_norm, conv2d_no_bias, linear, ops};

/// A model as a function from its input to its output.
pub(crate) type Net = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

pub(crate) struct Model {
    /// The name in the results.
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    /// The function that builds it.
    pub(crate) build: fn(VarBuilder) -> Result<Net>,
    /// The shape of one example.
    shape: &'static [usize],
    /// The number of examples in a batch that fills a large card.
    pub(crate) batch: usize,
}

pub(crate) const MODELS: [Model; 4] = [
    Model { name: "MLP 6×1024, f32", dtype: DType::F32, build: mlp, shape: &[1024], batch: 16_384 },
    Model { name: "transformer, f32", dtype: DType::F32, build: transformer, shape: &[SEQUENCE, WIDTH], batch: 16 },
    Model { name: "transformer, bf16", dtype: DType::BF16, build: transformer, shape: &[SEQUENCE, WIDTH], batch: 32 },
    Model { name: "ResNet-18 (CIFAR), f32", dtype: DType::F32, build: resnet18, shape: &[3, 32, 32], batch: 256 },
];

impl Model {
    /// Returns a normally distributed input.
    pub(crate) fn input(&self, batch: usize, device: &Device) -> Result<Tensor> {
        let shape = [&[batch], self.shape].concat();
        Tensor::randn(0f32, 1., shape, device)?.to_dtype(self.dtype)
    }
}

/// Returns a cheap loss: the mean square of the outputs.
pub(crate) fn loss(outputs: &Tensor) -> Result<Tensor> {
    outputs.to_dtype(DType::F32)?.sqr()?.mean_all()
}

fn mlp(vb: VarBuilder) -> Result<Net> {
    let layers = (0..6).map(|layer| linear(1024, 1024, vb.pp(layer))).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move |x| layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())))
}

const WIDTH: usize = 1024;
const SEQUENCE: usize = 512;
const LAYERS: usize = 8;
const HEADS: usize = 16;

/// Blocks of attention and a feed-forward network, each with a preceding norm and a residual connection.
fn transformer(vb: VarBuilder) -> Result<Net> {
    let blocks = (0..LAYERS).map(|layer| block(vb.pp(layer))).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move |x| blocks.iter().try_fold(x.clone(), |x, block| block(&x))))
}

fn block(vb: VarBuilder) -> Result<Net> {
    let (norm1, norm2) = (layer_norm(vb.pp("norm1"))?, layer_norm(vb.pp("norm2"))?);
    let qkv = linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?;
    let projection = linear(WIDTH, WIDTH, vb.pp("projection"))?;
    let (up, down) = (linear(WIDTH, 4 * WIDTH, vb.pp("up"))?, linear(4 * WIDTH, WIDTH, vb.pp("down"))?);
    Ok(Box::new(move |x| {
        let (batch, sequence, _) = x.dims3()?;
        let qkv = qkv.forward(&norm1(x)?)?.reshape((batch, sequence, 3, HEADS, WIDTH / HEADS))?;
        let part = |index| qkv.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let scale = ((WIDTH / HEADS) as f64).sqrt().recip();
        // `softmax_last_dim` is faster but has no backward pass.
        let weights = ops::softmax(&(q.matmul(&k.t()?)? * scale)?, D::Minus1)?;
        let mixed = weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, sequence, WIDTH))?;
        let x = (x + projection.forward(&mixed)?)?;
        let inner = up.forward(&norm2(&x)?)?.gelu()?;
        x + down.forward(&inner)?
    }))
}

/// candle's own layer norm has no backward pass.
fn layer_norm(vb: VarBuilder) -> Result<Net> {
    let weight = vb.get_with_hints(WIDTH, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(WIDTH, "bias", Init::Const(0.))?;
    Ok(Box::new(move |x| {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?.broadcast_mul(&weight)?.broadcast_add(&bias)
    }))
}

/// The variant for small images: starts with a 3×3 convolution, and pools only at the end.
fn resnet18(vb: VarBuilder) -> Result<Net> {
    let stem = convolution(3, 64, 3, 1, vb.pp("stem"))?;
    let mut blocks = Vec::new();
    let mut inputs = 64;
    for (stage, outputs) in [64, 128, 256, 512].into_iter().enumerate() {
        for index in 0..2 {
            let stride = if stage > 0 && index == 0 { 2 } else { 1 };
            blocks.push(residual(inputs, outputs, stride, vb.pp(format!("layer{stage}.{index}")))?);
            inputs = outputs;
        }
    }
    let classes = linear(512, 10, vb.pp("fc"))?;
    Ok(Box::new(move |x| {
        let x = blocks.iter().try_fold(stem(x)?.relu()?, |x, block| block(&x))?;
        classes.forward(&x.mean((2, 3))?)
    }))
}

fn residual(inputs: usize, outputs: usize, stride: usize, vb: VarBuilder) -> Result<Net> {
    let first = convolution(inputs, outputs, 3, stride, vb.pp("1"))?;
    let second = convolution(outputs, outputs, 3, 1, vb.pp("2"))?;
    let shortcut = match stride {
        1 => None,
        _ => Some(convolution(inputs, outputs, 1, stride, vb.pp("shortcut"))?),
    };
    Ok(Box::new(move |x| {
        let beside = shortcut.as_ref().map_or_else(|| Ok(x.clone()), |shortcut| shortcut(x))?;
        (second(&first(x)?.relu()?)? + beside)?.relu()
    }))
}

/// A convolution followed by a batch norm in training mode.
fn convolution(inputs: usize, outputs: usize, kernel: usize, stride: usize, vb: VarBuilder) -> Result<Net> {
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let convolution: Conv2d = conv2d_no_bias(inputs, outputs, kernel, config, vb.pp("conv"))?;
    let norm: BatchNorm = batch_norm(outputs, 1e-5, vb.pp("bn"))?;
    Ok(Box::new(move |x| norm.forward_t(&convolution.forward(x)?, true)))
}
