//! Very many ranks on one host: how long they take to meet, what a rank's memory is, and how long a small all-reduce takes.
//!
//! ```text
//! time cargo run --release --bin ddprun -- --standalone --nproc-per-node 256 --bench many_ranks
//! ```
//!
//! Rank 0 prints one JSON object: times in milliseconds, and the most memory of a rank in MB, 0 where the system does not say.
#[path = "../examples/common/memory.rs"]
mod memory;
mod start;

use candle_core::{DType, Device, Tensor};
use candle_ddp::nn::linear;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{Backend, DistributedDataParallel, InitOptions, ReduceOp, Result, init_process_group};
use candle_nn::VarMap;
use clap::Parser;
use memory::peak_rss_bytes;
use std::time::{Duration, Instant};

/// Train a linear layer with many ranks.
#[derive(Parser)]
struct Options {
    /// The training steps.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// The all-reduces of 8 bytes, of which the time is the mean.
    #[arg(long, default_value_t = 100)]
    calls: u32,
    /// Seconds to wait for all ranks.
    #[arg(long, default_value_t = 600.)]
    timeout: f64,
}

fn main() -> Result<()> {
    let options: Options = start::options();
    let timeout = Duration::from_secs_f64(options.timeout);
    let begun = Instant::now();
    let pg = init_process_group(InitOptions { backend: Backend::Cpu, timeout, ..Default::default() })?;
    let met = begun.elapsed();

    let begun = Instant::now();
    let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(10, 10, vb))?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    let x = Tensor::full(pg.rank() as f32 / 100., (4, 10), &Device::Cpu)?;
    for _ in 0..options.steps {
        let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    let trained = begun.elapsed();

    let value = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    pg.barrier()?;
    let begun = Instant::now();
    for _ in 0..options.calls {
        pg.all_reduce(&value, ReduceOp::Sum)?;
    }
    let call = begun.elapsed() / options.calls.max(1);

    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let megabytes = peak_rss_bytes().unwrap_or(0) as f64 / 1e6;
    let own = [ms(met), ms(trained), ms(call), megabytes];
    let [met, trained, call, resident] = pg.all_reduce_scalars(own, ReduceOp::Max)?;
    if pg.rank() == 0 {
        println!(
            r#"{{"ranks": {}, "meet": {met:.0}, "train": {trained:.0}, "all_reduce": {call:.3}, "resident": {resident:.1}}}"#,
            pg.world_size()
        );
    }
    Ok(())
}
