//! How much of a GPU's memory bandwidth the fused optimizers, clipping, loss scaling and layers use; and the host's time for what every
//! operation consists of.
//!
//! ```text
//! cargo bench --features nccl --bench bandwidth_gpu [-- --rounds 20 --millions 64]
//! python3 scripts/compare/bandwidth_pytorch.py --millions 64      # the same of PyTorch
//! ```
//!
//! Each must read and write a known number of bytes, such as 28 per parameter for AdamW in f32. These bytes per second are compared
//! with those of a copy within the GPU's memory, measured in the same run. Convolutions and attention are bound by products, so only their
//! times say something. A backward pass starts with a gradient that is there already, and its results go where those of a model under DDP
//! go, so that no time of candle's own operations is in it. Without a GPU, the bench says so and exits.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::nn::{self, AttentionOptions, BatchNorm, Conv2d, Embedding, LayerNorm, MaxPool2dOptions, RmsNorm};
use candle_ddp::optim::{AdamW, ParamsSgd, Sgd, clip_grad_norm};
use candle_ddp::{ProcessGroup, Result};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::function::{Function, apply, leaf};
use candle_nn::{Conv2dConfig, Optimizer, ParamsAdamW};
use clap::Parser;
use median::median;
use std::process::ExitCode;
use std::time::Instant;

#[path = "gpu/mod.rs"]
mod gpu;
#[path = "../examples/common/median.rs"]
mod median;

#[derive(Parser)]
struct Options {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The number of steps in a measurement.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Millions of parameters, in 64 tensors of one size; as many elements for the copy and the norms.
    #[arg(long, default_value_t = 64.0)]
    millions: f64,
}

fn main() -> ExitCode {
    gpu::main(Options { rounds: 1, steps: 1, millions: 0.01 }, bench)
}

const TENSORS: usize = 64;
/// The length of the rows of norms.
const WIDTH: usize = 1024;
/// The channels, height and width of images.
const IMAGE: [usize; 3] = [64, 56, 56];
/// The number of classes, GPT-2's.
const CLASSES: usize = 50_257;
/// GPT-2's heads, and the elements of each.
const HEADS: [usize; 2] = [12, 64];

fn bench(options: &Options) -> Result<()> {
    let pg = gpu::world_of_one()?;
    let device = pg.device();
    let size = ((options.millions * 1e6) as usize / TENSORS).div_ceil(WIDTH) * WIDTH;
    println!("{} × {} steps, {TENSORS} tensors of {size} elements\n", options.rounds, options.steps);
    println!("| what | dtype | bytes / element | ms | GB/s | share of the copy's |\n|---|---|---|---|---|---|");
    let table = Table { device, options, elements: TENSORS * size, copy: std::cell::Cell::new(None) };
    let whole = Tensor::zeros(TENSORS * size, DType::F32, device)?;
    table.row("copy", DType::F32, 8, || {
        whole.copy()?;
        Ok(())
    })?;
    drop(whole);
    for dtype in [DType::F32, DType::BF16] {
        optimizers(&pg, &table, size, dtype)?;
        norms(&table, size, dtype)?;
        layers(&table, dtype)?;
        images(&table, dtype)?;
        transformer(&table, dtype)?;
    }
    host(device, options)
}

fn optimizers(pg: &ProcessGroup, table: &Table, size: usize, dtype: DType) -> Result<()> {
    let (vars, mut grads) = parameters(size, dtype, pg.device())?;
    let bytes = dtype.size_in_bytes();
    // Learning rates at which nothing overflows, however many steps are measured.
    let mut adamw = AdamW::new(vars.clone(), ParamsAdamW { lr: 1e-5, ..Default::default() })?;
    // Parameters and two moments, which are f32, are read and written, gradients are read.
    table.row("AdamW", dtype, 3 * bytes + 16, || Ok(adamw.step(&grads)?))?;
    drop(adamw);
    let mut sgd = Sgd::new(vars.clone(), ParamsSgd { lr: 1e-5, momentum: 0.9, ..Default::default() })?;
    table.row("SGD with momentum", dtype, 3 * bytes + 8, || Ok(sgd.step(&grads)?))?;
    drop(sgd);
    // The norm reads all gradients; then they are read and written.
    table.row("clip_grad_norm", dtype, 3 * bytes, || clip_grad_norm(&mut grads, vars.clone(), 1e-3).map(drop))?;
    let scaler_options = GradScalerOptions { init_scale: 1.0, ..Default::default() };
    let mut scaler = GradScaler::new(pg, vars.clone(), scaler_options)?;
    table.row("GradScaler::unscale", dtype, 2 * bytes, || {
        scaler.scale(&Tensor::zeros((), DType::F32, &Device::Cpu)?)?; // as before a backward pass
        scaler.unscale(&mut grads)?;
        scaler.update()
    })
}

fn parameters(size: usize, dtype: DType, device: &Device) -> Result<(Vec<Var>, GradStore)> {
    let mut grads = Tensor::zeros(1, DType::F32, device)?.backward()?;
    let mut vars = Vec::new();
    for _ in 0..TENSORS {
        let values = |scale| Tensor::randn(0f32, scale, size, device)?.to_dtype(dtype);
        let var = Var::from_tensor(&values(0.03)?)?;
        grads.insert(&var, values(1e-3)?);
        vars.push(var);
    }
    Ok((vars, grads))
}

fn norms(table: &Table, size: usize, dtype: DType) -> Result<()> {
    let ones = || replica(&Tensor::ones(WIDTH, dtype, table.device)?);
    let (weight, bias) = (ones()?, ones()?);
    let random = || Tensor::randn(0f32, 1f32, (TENSORS * size / WIDTH, WIDTH), table.device)?.to_dtype(dtype);
    let (x, residual) = (replica(&random()?)?, replica(&random()?)?);
    let layer = LayerNorm::new(weight.clone(), bias, 1e-5);
    let rms = RmsNorm::new(weight, 1e-5);
    let bytes = dtype.size_in_bytes();
    let layers: [(&str, &dyn Module); 2] = [("LayerNorm", &layer), ("RmsNorm", &rms)];
    for (name, layer) in layers {
        // The gradient and x are read, and the gradient of x is written.
        table.both(name, dtype, [2 * bytes, 5 * bytes], || layer.forward(&x))?;
    }
    // Only the norm passes a gradient to the sum.
    table.both("Add & Norm", dtype, [4 * bytes, 7 * bytes], || Ok(layer.add_norm(&x, &residual)?.1))
}

/// Layers of a Transformer.
fn layers(table: &Table, dtype: DType) -> Result<()> {
    let bytes = dtype.size_in_bytes();
    let x = |rows: usize, columns: usize| {
        replica(&Tensor::randn(0f32, 1f32, (rows, columns), table.device)?.to_dtype(dtype)?)
    };
    let rows = x(table.elements / WIDTH, WIDTH)?;
    table.both("GELU", dtype, [2 * bytes, 5 * bytes], || nn::gelu(&rows))?;
    table.both("softmax", dtype, [2 * bytes, 5 * bytes], || nn::softmax_last_dim(&rows))?;
    // The mask is computed again.
    let dropout = nn::Dropout::new(0.1);
    table.both("dropout", dtype, [2 * bytes, 4 * bytes], || dropout.forward(&rows, true))?;
    drop(rows);
    // 8192 tokens, which have far more logits than 64 million.
    let count = ((128.0 * table.options.millions) as usize).max(1);
    let (logits, targets) = (x(count, CLASSES)?, Tensor::arange(0, count as u32, table.device)?);
    let table = Table { elements: count * CLASSES, copy: table.copy.clone(), ..*table };
    table.both("cross entropy", dtype, [bytes, 3 * bytes], || nn::cross_entropy(&logits, &targets))
}

/// Layers of a convolutional network.
fn images(table: &Table, dtype: DType) -> Result<()> {
    let (bytes, [channels, height, width]) = (dtype.size_in_bytes(), IMAGE);
    let count = (table.elements / (channels * height * width)).max(1);
    let x = Tensor::randn(0f32, 1f32, (count, channels, height, width), table.device)?.to_dtype(dtype)?;
    let (x, table) = (replica(&x)?, Table { elements: x.elem_count(), copy: table.copy.clone(), ..*table });
    let all = |value: f32| Tensor::full(value, channels, table.device)?.to_dtype(dtype);
    let norm = BatchNorm::new(channels, all(0.)?, all(1.)?, replica(&all(1.)?)?, replica(&all(0.)?)?, 1e-5)?;
    // The input is read for the statistics and again to be normalised; in the backward pass it is read twice with the gradient.
    table.both("BatchNorm", dtype, [3 * bytes, 8 * bytes], || norm.forward_train(&x))?;
    let options = MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ..Default::default() };
    // The output has a quarter of the size. It need not read the input again for the gradient.
    table.both("max pooling", dtype, [5 * bytes / 4, 10 * bytes / 4], || nn::max_pool2d(&x, 3, options))?;
    let weight = Tensor::randn(0f32, 0.05, (channels, channels, 3, 3), table.device)?.to_dtype(dtype)?;
    let conv = Conv2d::new(replica(&weight)?, None, Conv2dConfig { padding: 1, ..Default::default() });
    table.both("convolution 3 × 3", dtype, [2 * bytes, 7 * bytes], || conv.forward(&x))
}

/// Attention, rotations and embeddings of GPT-2's sizes.
fn transformer(table: &Table, dtype: DType) -> Result<()> {
    let (bytes, [heads, size]) = (dtype.size_in_bytes(), HEADS);
    let width = heads * size;
    for tokens in [1024, 4096] {
        // Queries, keys and values have the elements together.
        let tokens = tokens.min((table.elements / (3 * width)).max(8));
        let shape = ((table.elements / (3 * width * tokens)).max(1), heads, tokens, size);
        let part = || replica(&Tensor::randn(0f32, 1f32, shape, table.device)?.to_dtype(dtype)?);
        let (q, k, v) = (part()?, part()?, part()?);
        let table = Table { elements: q.elem_count(), copy: table.copy.clone(), ..*table };
        let name = format!("causal attention over {tokens} tokens");
        table.both(&name, dtype, [4 * bytes, 12 * bytes], || {
            nn::scaled_dot_product_attention(&q, &k, &v, AttentionOptions { is_causal: true, ..Default::default() })
        })?;
        if tokens < 4096 {
            let angles = Tensor::randn(0f32, 1f32, (tokens, size / 2), table.device)?.to_dtype(dtype)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            table.both("rope", dtype, [2 * bytes, 4 * bytes], || nn::rope(&q, &cos, &sin))?;
        }
    }
    let vectors = Tensor::randn(0f32, 1f32, (CLASSES, width), table.device)?.to_dtype(dtype)?;
    let embedding = Embedding::new(replica(&vectors)?, width);
    let count = (table.elements / width).max(1);
    let indices = Tensor::rand(0f32, CLASSES as f32, count, table.device)?.to_dtype(DType::U32)?;
    let table = Table { elements: count * width, copy: table.copy.clone(), ..*table };
    table.both("embedding", dtype, [2 * bytes, 3 * bytes], || embedding.forward(&indices))
}

/// A copy of a tensor as the parameters of a model under DDP are: its gradient goes to a hook.
fn replica(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let copy = snapshot_tensor(tensor, tensor.dtype())?;
    Ok(leaf(&Var::from_tensor(tensor)?, copy, |_| Ok(()))?.0)
}

/// A function whose argument's gradient is given.
struct Given(Tensor);

impl Function for Given {
    fn name(&self) -> &'static str {
        "given"
    }

    fn backward(&self, _: &Tensor, _: &[bool]) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.0.clone())])
    }
}

/// Milliseconds per step: until the host has enqueued it, and until the GPU has done it.
fn milliseconds(device: &Device, steps: usize, step: &mut dyn FnMut() -> Result<()>) -> Result<[f64; 2]> {
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..steps {
        step()?;
    }
    let enqueued = start.elapsed();
    device.synchronize()?;
    Ok([enqueued, start.elapsed()].map(|time| time.as_secs_f64() * 1e3 / steps as f64))
}

/// What the host needs for each operation, whatever its size.
fn host(device: &Device, options: &Options) -> Result<()> {
    let steps = 100 * options.steps;
    let x = Tensor::ones(8, DType::F32, device)?;
    let var = Var::from_tensor(&x)?;
    println!("\n| the host's time for | µs |\n|---|---|");
    let row = |what: &str, step: &dyn Fn() -> candle_core::Result<()>| -> Result<()> {
        let time = || Ok(1e3 * milliseconds(device, steps, &mut || Ok(step()?))?[0]);
        time()?;
        let times = (0..options.rounds).map(|_| time()).collect::<Result<Vec<_>>>()?;
        println!("| {what} | {:.2} |", median(times));
        Ok(())
    };
    row("an allocation with zeros, and its release", &|| Tensor::zeros(8, DType::F32, device).map(drop))?;
    row("waiting for an idle GPU", &|| device.synchronize())?;
    row("an operation of candle", &|| x.affine(2.0, 1.0).map(drop))?;
    row("a layer without a gradient", &|| nn::relu(&x).map(drop))?;
    row("a layer with a gradient", &|| nn::relu(&var).map(drop))
}

struct Table<'a> {
    device: &'a Device,
    options: &'a Options,
    elements: usize,
    /// The bandwidth of the copy in GB/s.
    copy: std::cell::Cell<Option<f64>>,
}

impl Table<'_> {
    /// Measures a layer's forward pass, and both passes, which must move so many bytes for each element.
    fn both(
        &self,
        layer: &str,
        dtype: DType,
        bytes: [usize; 2],
        forward: impl Fn() -> candle_core::Result<Tensor>,
    ) -> Result<()> {
        self.row(&format!("{layer}, forward"), dtype, bytes[0], || {
            forward()?;
            Ok(())
        })?;
        let (dy, end) = (forward()?.detach().ones_like()?, Tensor::zeros((), DType::F32, self.device)?);
        self.row(&format!("{layer}, forward and backward"), dtype, bytes[1], || {
            apply(&[&forward()?], snapshot_tensor(&end, DType::F32)?, Given(dy.clone()))?.backward()?;
            Ok(())
        })
    }

    /// Measures `step`, which must move this many bytes for each element.
    fn row(&self, what: &str, dtype: DType, bytes: usize, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        let mut time = |steps| Ok(milliseconds(self.device, steps, &mut step)?[1]);
        // The first steps compile kernels and allocate.
        time(2)?;
        let times = (0..self.options.rounds).map(|_| time(self.options.steps)).collect::<Result<Vec<_>>>()?;
        let milliseconds = median(times);
        let speed = (self.elements * bytes) as f64 / (milliseconds * 1e6);
        let copy = self.copy.get().unwrap_or(speed);
        self.copy.set(Some(copy));
        let share = 100.0 * speed / copy;
        println!("| {what} | {} | {bytes} | {milliseconds:.3} | {speed:.1} | {share:.0} % |", dtype.as_str());
        Ok(())
    }
}
