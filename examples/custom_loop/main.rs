//! A training loop without a launcher: two processes that are started by hand find each other at an address.
//!
//! ```text
//! cargo run --release --example custom_loop -- --rank 0 --world-size 2 &
//! cargo run --release --example custom_loop -- --rank 1 --world-size 2
//! ```
//!
//! On two machines, both get `--address tcp://HOST:29511`, where HOST is that of rank 0. Under a launcher the rank and the
//! world size come from its environment.
//!
//! ci:
use candle_core::Tensor;
use candle_ddp::nn::linear;
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DistributedDataParallel, InitOptions, Result, init_process_group};
use candle_nn::{VarMap, loss};
use clap::Parser;

/// Fit a line to points of which each rank has its own.
#[derive(Parser)]
struct Options {
    /// Where the ranks meet.
    #[arg(long, default_value = "tcp://127.0.0.1:29511")]
    address: String,
    /// This process's rank, from 0.
    #[arg(long)]
    rank: Option<usize>,
    /// The number of processes.
    #[arg(long)]
    world_size: Option<usize>,
}

fn main() -> Result<()> {
    let Options { address, rank, world_size } = Options::parse();
    let pg = init_process_group(InitOptions { init_method: address, rank, world_size, ..Default::default() })?;

    let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(1, 1, vb.pp("line")))?;
    let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
    for step in 1..=200 {
        let x = Tensor::rand(-1f32, 1., (16, 1), pg.device())?;
        let y = ((&x * 3.)? + 1.)?;
        let loss = loss::mse(&ddp.forward(&x)?, &y)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        if step % 50 == 0 && pg.rank() == 0 {
            println!("step {step}: loss on rank 0 {:.6}", loss.to_scalar::<f32>()?);
        }
    }
    let [slope, intercept] = [0, 1].map(|index| ddp.parameters()[index].flatten_all()?.get(0)?.to_scalar::<f32>());
    println!("rank {} of {}: y = {:.3} x + {:.3}", pg.rank(), pg.world_size(), slope?, intercept?);
    Ok(())
}
