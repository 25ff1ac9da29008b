//! LayerNorm and RMSNorm in training: the fused layers compared with candle's operations.
//!
//! ```text
//! cargo bench --bench norms [-- --rounds 30 --threads 1]
//! ```
//!
//! candle's own fused layers have no backward pass; only `candle_nn::ops::layer_norm_slow` and `rms_norm_slow` can be
//! trained. Both alternate in one process, so that other load on the machine affects both equally. Without `--bench`
//! (as under `cargo test`), it runs two rounds with small tensors as a smoke test.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp::nn::{LayerNorm, RmsNorm};
use candle_nn::ops::{layer_norm_slow, rms_norm_slow};
use clap::Parser;
use std::process::{Command, ExitCode};
use std::time::Instant;

#[path = "../examples/common/median.rs"]
mod median;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
    /// The number of measurements of each.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// The number of threads of the kernels (RAYON_NUM_THREADS).
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

const EPS: f32 = 1e-5;

fn main() -> ExitCode {
    // Other arguments are for cargo test's own harness.
    let measure = std::env::args().any(|argument| argument == "--bench");
    let Options { rounds, threads, .. } =
        if measure { Options::parse() } else { Options { bench: false, rounds: 2, threads: 1 } };
    // The number of threads is read from the environment, which a program can only set for its children.
    let result = if std::env::var("RAYON_NUM_THREADS").as_deref() == Ok(threads.to_string().as_str()) {
        bench(measure, rounds).map_err(|error| error.to_string())
    } else {
        restart(threads).map_err(|error| error.to_string())
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn restart(threads: usize) -> std::io::Result<()> {
    let status = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env("RAYON_NUM_THREADS", threads.to_string())
        .status()?;
    if status.success() { Ok(()) } else { Err(std::io::Error::other("the bench failed")) }
}

fn bench(measure: bool, rounds: usize) -> Result<()> {
    let shapes: &[(usize, usize)] = if measure { &[(8192, 256), (4096, 1024), (1024, 4096)] } else { &[(4, 16)] };
    println!("medians of {rounds}, forward and backward, ms\n");
    println!(
        "| layer | rows × size | dtype | candle: forward | backward | fused: forward | backward | candle / fused |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for &(rows, size) in shapes {
        for dtype in [DType::F32, DType::BF16] {
            let var =
                |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?);
            let (x, weight, bias) = (var(&[rows, size])?, var(&[size])?, var(&[size])?);
            let layer = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), f64::from(EPS));
            let rms = RmsNorm::new(weight.as_tensor().clone(), f64::from(EPS));
            let what = format!("{rows} × {size} | {}", dtype.as_str());
            let candles = || layer_norm_slow(&x, &weight, &bias, EPS);
            compare(&format!("LayerNorm | {what}"), rounds, candles, || layer.forward(&x))?;
            compare(&format!("RMSNorm | {what}"), rounds, || rms_norm_slow(&x, &weight, EPS), || rms.forward(&x))?;
        }
    }
    Ok(())
}

fn compare(
    what: &str,
    rounds: usize,
    candles: impl Fn() -> Result<Tensor>,
    fused: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    time(&candles)?;
    time(&fused)?;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        times.push((time(&candles)?, time(&fused)?));
    }
    let median = |value: fn(&([f64; 2], [f64; 2])) -> f64| median::median(times.iter().map(value));
    // The median of the ratios of neighbouring measurements.
    let ratio = median(|(candle, fused)| (candle[0] + candle[1]) / (fused[0] + fused[1]));
    println!(
        "| {what} | {:.2} | {:.2} | {:.2} | {:.2} | **{ratio:.1}** |",
        median(|times| times.0[0]),
        median(|times| times.0[1]),
        median(|times| times.1[0]),
        median(|times| times.1[1]),
    );
    Ok(())
}

/// Returns the milliseconds of a forward and of a backward pass.
fn time(forward: impl Fn() -> Result<Tensor>) -> Result<[f64; 2]> {
    let start = Instant::now();
    let y = forward()?;
    let middle = Instant::now();
    let grads = y.backward()?;
    let times = [(middle - start).as_secs_f64() * 1e3, middle.elapsed().as_secs_f64() * 1e3];
    drop(grads);
    Ok(times)
}
