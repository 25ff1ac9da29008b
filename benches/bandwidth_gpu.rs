//! How much of a GPU's memory bandwidth the fused optimizers, clipping, loss scaling and norms use.
//!
//! ```text
//! cargo bench --features nccl --bench bandwidth_gpu [-- --rounds 20 --millions 64]
//! python3 scripts/compare/bandwidth_pytorch.py --millions 64      # the same of PyTorch
//! ```
//!
//! Each must read and write a known number of bytes, such as 28 per parameter for AdamW in f32. These bytes per second are compared
//! with those of a copy within the GPU's memory, measured in the same run. Without a GPU, the bench says so and exits.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::nn::{LayerNorm, RmsNorm};
use candle_ddp::optim::{AdamW, ParamsSgd, Sgd, clip_grad_norm};
use candle_ddp::{ProcessGroup, Result};
use candle_nn::{Optimizer, ParamsAdamW};
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
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
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
    gpu::main(Options { bench: false, rounds: 1, steps: 1, millions: 0.01 }, bench)
}

const TENSORS: usize = 64;
/// The length of the rows of norms.
const WIDTH: usize = 1024;

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
    }
    Ok(())
}

fn optimizers(pg: &ProcessGroup, table: &Table, size: usize, dtype: DType) -> Result<()> {
    let (vars, mut grads) = parameters(size, dtype, pg.device())?;
    let bytes = dtype.size_in_bytes();
    // Learning rates at which nothing overflows, however many steps are measured.
    let mut adamw = AdamW::new(vars.clone(), ParamsAdamW { lr: 1e-5, ..Default::default() })?;
    // Parameters and two moments are read and written, gradients are read.
    table.row("AdamW", dtype, 7 * bytes, || Ok(adamw.step(&grads)?))?;
    drop(adamw);
    let mut sgd = Sgd::new(vars.clone(), ParamsSgd { lr: 1e-5, momentum: 0.9, ..Default::default() })?;
    table.row("SGD with momentum", dtype, 5 * bytes, || Ok(sgd.step(&grads)?))?;
    drop(sgd);
    // The norm reads all gradients; then they are read and written.
    table.row("clip_grad_norm", dtype, 3 * bytes, || clip_grad_norm(&mut grads, &vars, 1e-3).map(drop))?;
    let named = vars.iter().enumerate().map(|(index, var)| (index.to_string(), var.clone())).collect();
    let scaler_options = GradScalerOptions { init_scale: 1.0, ..Default::default() };
    let mut scaler = GradScaler::new(pg, named, scaler_options)?;
    table.row("GradScaler::unscale", dtype, 2 * bytes, || {
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
    let ones = |shape: &[usize]| Var::from_tensor(&Tensor::ones(shape, dtype, table.device)?);
    let (weight, bias) = (ones(&[WIDTH])?, ones(&[WIDTH])?);
    let x = Tensor::randn(0f32, 1f32, (TENSORS * size / WIDTH, WIDTH), table.device)?.to_dtype(dtype)?;
    let x = Var::from_tensor(&x)?;
    let layer = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
    let rms = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
    let bytes = dtype.size_in_bytes();
    let layers: [(&str, &dyn Module); 2] = [("LayerNorm", &layer), ("RmsNorm", &rms)];
    for (name, layer) in layers {
        table.row(&format!("{name}, forward"), dtype, 2 * bytes, || {
            layer.forward(&x)?;
            Ok(())
        })?;
        // The gradient of ones is written, then x and it are read, and the gradient of x is written.
        let both = format!("{name}, forward and backward");
        table.row(&both, dtype, 6 * bytes, || {
            layer.forward(&x)?.backward()?;
            Ok(())
        })?;
    }
    Ok(())
}

struct Table<'a> {
    device: &'a Device,
    options: &'a Options,
    elements: usize,
    /// The bandwidth of the copy in GB/s.
    copy: std::cell::Cell<Option<f64>>,
}

impl Table<'_> {
    /// Measures `step`, which must move this many bytes for each element.
    fn row(&self, what: &str, dtype: DType, bytes: usize, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        let mut time = |steps: usize| -> Result<f64> {
            self.device.synchronize()?;
            let start = Instant::now();
            for _ in 0..steps {
                step()?;
            }
            self.device.synchronize()?;
            Ok(start.elapsed().as_secs_f64() * 1e3 / steps as f64)
        };
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
