//! A step under virtual ranks while the last rank is throttled to half of its speed, with equal shares of the micro-batches, and with
//! shares by the measured speeds:
//!
//! ```text
//! RAYON_NUM_THREADS=1 cargo run --release --bin ddprun -- --nproc-per-node 2 --bench unequal_ranks
//! ```
//!
//! A shell stops the last rank for 10 ms and lets it go on for 10 ms, in turns, as a quota of a cgroup does. Prints a JSON object:
//! medians of the steps' times in milliseconds, the ideal time, which is the number of micro-batches by the sum of the ranks'
//! speeds, and the ranks' shares.
#[path = "../examples/common/median.rs"]
mod median;
mod start;

use candle_core::{DType, Tensor};
use candle_ddp::nn::{linear, relu};
use candle_ddp::{
    Backward, Context, DistributedDataParallel, Error, InitOptions, ProcessGroup, Result, backward_with,
    init_process_group,
};
use candle_nn::{FuncT, Module, VarBuilder, VarMap, func_t};
use clap::Parser;
use median::median;
use std::process::{Child, Command};
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measure steps of ranks of which one is slow.
#[derive(Parser)]
struct Options {
    /// The number of micro-batches in a step.
    #[arg(long, default_value_t = 16)]
    virtual_ranks: usize,
    /// Samples of a micro-batch.
    #[arg(long, default_value_t = 512)]
    batch_size: usize,
    /// The number of measured steps of each kind; the kinds alternate.
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

type Model = DistributedDataParallel<FuncT<'static>>;

const WIDTH: usize = 512;

fn main() -> Result<()> {
    let options: Options = start::options();
    let pg = init_process_group(InitOptions { virtual_ranks: Some(options.virtual_ranks), ..Default::default() })?;
    pg.abort_on_error(|| {
        let mut throttle = if pg.rank() + 1 == pg.world_size() { Some(throttled()?) } else { None };
        let result = measure(&pg, &options);
        if let Some(throttle) = &mut throttle {
            throttle.kill().context("ending the throttle")?;
            throttle.wait().context("ending the throttle")?;
        }
        result
    })
}

/// Halves the speed of this process until it is killed, or the process has ended.
fn throttled() -> Result<Child> {
    let own = std::process::id();
    let script = format!("while kill -STOP {own}; do sleep 0.01; kill -CONT {own} || break; sleep 0.01; done");
    Command::new("sh").args(["-c", &script]).spawn().context("starting a shell that throttles this process")
}

fn net(vb: VarBuilder) -> candle_core::Result<FuncT<'static>> {
    let layers = (0..4).map(|at| linear(WIDTH, WIDTH, vb.pp(at))).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(func_t(move |x, _| layers.iter().try_fold(x.clone(), |x, layer| relu(&layer.forward(&x)?))))
}

fn model(pg: &ProcessGroup) -> Result<Model> {
    DistributedDataParallel::new(pg, &VarMap::new(), net)
}

/// The milliseconds of a step of the slowest rank.
fn step(pg: &ProcessGroup, model: &Model, x: &Tensor) -> Result<f64> {
    pg.barrier()?;
    let begin = Instant::now();
    for number in model.micro_batches().into_iter().flatten() {
        let loss = model.forward_t(x, true)?.sqr()?.mean_all()?;
        backward_with(&loss, &[model], Backward { micro_batch: Some(number), ..Default::default() })?;
    }
    pg.barrier()?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

fn measure(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let x = Tensor::randn(0f32, 1., (options.batch_size, WIDTH), pg.device())?.to_dtype(DType::F32)?;
    let equal = model(pg)?;
    (0..20).try_for_each(|_| step(pg, &equal, &x).map(drop))?;
    let reason = "the ranks have measured no speed: run on CPUs".to_string();
    let own = equal.micro_batches_per_second().ok_or(Error::InvalidArgument { argument: "device", reason })?;
    pg.share_by_speed(own)?;
    let by_speed = model(pg)?;
    (0..2).try_for_each(|_| step(pg, &by_speed, &x).map(drop))?;
    let (mut of_equal, mut of_speed) = (Vec::new(), Vec::new());
    for _ in 0..options.steps {
        of_equal.push(step(pg, &equal, &x)?);
        of_speed.push(step(pg, &by_speed, &x)?);
    }
    let speeds = Tensor::zeros(pg.world_size(), DType::F64, pg.device())?;
    let own = by_speed.micro_batches_per_second().unwrap_or(own);
    pg.all_gather(&speeds, &Tensor::new(&[own], pg.device())?)?;
    let speeds = speeds.to_vec1::<f64>()?;
    let shares =
        by_speed.gather_micro_batches(&vec![pg.rank() as f64; by_speed.micro_batches().map_or(0, |own| own.len())])?;
    let shares: Vec<usize> =
        (0..pg.world_size()).map(|rank| shares.iter().filter(|of| **of == rank as f64).count()).collect();
    if pg.rank() == 0 {
        let ideal = 1e3 * options.virtual_ranks as f64 / speeds.iter().sum::<f64>();
        let (equal_ms, by_speed_ms) = (median(of_equal), median(of_speed));
        let line = serde_json::json!({
            "equal_ms": equal_ms, "by_speed_ms": by_speed_ms, "ideal_ms": ideal, "shares": shares,
            "micro_batches_per_second": speeds, "ratio": by_speed_ms / ideal,
        });
        println!("{line}");
    }
    Ok(())
}
