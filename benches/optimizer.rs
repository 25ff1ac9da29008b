//! An AdamW step on 6.3 million parameters, with this crate and with candle_nn; and the other optimizers.
//!
//! ```text
//! cargo bench --bench optimizer [-- --rounds 30]
//! ```
//!
//! The optimizers alternate in one process, on one thread. candle_nn's AdamW creates new tensors in every step, so its
//! speed depends on the allocator: with mimalloc, used here, it is about six times as fast as with glibc's allocator
//! (20 against 117 ms, see `benches/results/optimizer_cpu.md`). Without `--bench` (as under `cargo test`), it runs a
//! few steps of a small model as a smoke test.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp::optim::{self, Adam, Lamb, ParamsAdam, ParamsLamb, ParamsSgd, Sgd};
use candle_nn::{Optimizer, ParamsAdamW};
use clap::Parser;
use median::median;
use std::process::ExitCode;
use std::time::Instant;

#[path = "../examples/common/median.rs"]
mod median;
mod start;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
}

fn main() -> ExitCode {
    let Options { rounds } = start::options_or(&["--rounds=2"]);
    start::exit_code(bench(if start::is_bench() { 1024 } else { 8 }, rounds))
}

/// The parameters of six linear layers, and their gradients.
struct Parameters {
    vars: Vec<Var>,
    grads: GradStore,
}

impl Parameters {
    fn new(width: usize) -> Result<Self> {
        let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
        let mut vars = Vec::new();
        for _ in 0..6 {
            for shape in [vec![width, width], vec![width]] {
                let var = Var::from_tensor(&Tensor::randn(0f32, 0.03, shape.clone(), &Device::Cpu)?)?;
                grads.insert(&var, Tensor::randn(0f32, 1e-3, shape, &Device::Cpu)?);
                vars.push(var);
            }
        }
        Ok(Self { vars, grads })
    }
}

fn bench(width: usize, rounds: usize) -> Result<()> {
    // A learning rate at which nothing overflows, however many steps are measured.
    let adamw = || ParamsAdamW { lr: 1e-5, ..Default::default() };
    let mut candidates = vec![
        candidate::<optim::AdamW>("AdamW, fused", width, adamw())?,
        candidate::<candle_nn::AdamW>("AdamW, candle_nn", width, adamw())?,
        candidate::<Adam>("Adam, fused", width, ParamsAdam { lr: 1e-5, ..Default::default() })?,
        candidate::<Sgd>(
            "SGD with momentum, fused",
            width,
            ParamsSgd { lr: 1e-5, momentum: 0.9, ..Default::default() },
        )?,
        candidate::<Lamb>("LAMB, fused", width, ParamsLamb { lr: 1e-5, ..Default::default() })?,
    ];
    for (_, step, _) in &mut candidates {
        step()?;
    }
    for _ in 0..rounds {
        for (_, step, times) in &mut candidates {
            let start = Instant::now();
            step()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    for (name, _, times) in candidates {
        println!("{name}: {:.2} ms", median(times));
    }
    Ok(())
}

type Candidate = (&'static str, Box<dyn FnMut() -> Result<()>>, Vec<f64>);

fn candidate<O: Optimizer + 'static>(name: &'static str, width: usize, config: O::Config) -> Result<Candidate> {
    let Parameters { vars, grads } = Parameters::new(width)?;
    let mut optimizer = O::new(vars, config)?;
    Ok((name, Box::new(move || optimizer.step(&grads)), Vec::new()))
}
