//! Contrastive learning: each sample is told from all samples of all ranks. SimCLR compares two distorted views of a picture, CLIP
//! a picture with its caption. The program makes both.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example contrastive
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example contrastive -- --objective clip
//! ```
//!
//! Each rank calculates the mean loss of its own samples against the features of all ranks. `with_grad().all_gather` gathers these, and
//! returns their gradients. The backward pass adds up what the losses of all ranks contribute to a rank's features, and
//! DistributedDataParallel averages the parameters' gradients. Together, that is the gradient of the mean loss of the whole batch,
//! without a factor: any number of ranks trains as one.
//!
//! ci: --steps 40
//! ci: --objective clip --steps 40
mod model;
mod pictures;

use candle_core::{DType, Result, Tensor};
use candle_ddp::nn::{cat, cross_entropy, matmul, no_grad, transpose};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, ReduceOp, WithGrad};
use candle_nn::VarMap;
use clap::{Parser, ValueEnum};
use model::Net;
use pictures::Pictures;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Objective {
    Simclr,
    Clip,
}

/// Learn features of pictures without labels.
#[derive(Parser)]
struct Options {
    /// Compare a picture with another view of it, or with its caption.
    #[arg(long, value_enum, default_value = "simclr")]
    objective: Objective,
    /// The number of steps.
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Pictures per step, of all ranks together: a multiple of their number.
    #[arg(long, default_value_t = 48)]
    batch_size: usize,
    /// f32 or f64.
    #[arg(long, default_value = "f32")]
    dtype: DType,
}

/// The softmax's temperature in SimCLR. CLIP learns its own.
const TEMPERATURE: f64 = 0.2;

/// Of two views of this rank's pictures, (own, width) each: the other view is to be found among all views of all ranks.
fn simclr(all: &WithGrad, rank: usize, [first, second]: [&Tensor; 2]) -> Result<Tensor> {
    let count = first.dim(0)?;
    let own = cat(&[first, second], 0)?;
    let scores = (matmul(&own, &transpose(&all.all_gather(&own)?, 0, 1)?)? / TEMPERATURE)?;
    // In the gathered rows, those of a rank are neighbours. A view is not compared with itself.
    let start = (rank * 2 * count) as u32;
    let itself = Tensor::arange(start, start + 2 * count as u32, own.device())?;
    let columns = Tensor::arange(0, scores.dim(1)? as u32, own.device())?;
    let is_itself = columns.broadcast_as(scores.shape())?.broadcast_eq(&itself.unsqueeze(1)?)?;
    let scores = (scores - (is_itself.to_dtype(own.dtype())? * 1e9)?)?;
    let other = cat(&[&itself.narrow(0, count, count)?, &itself.narrow(0, 0, count)?], 0)?;
    cross_entropy(&scores, &other)
}

/// Each of this rank's pictures is to be found by its caption among those of all ranks, and the other way round.
fn clip(all: &WithGrad, rank: usize, [pictures, captions]: [&Tensor; 2], scale: &Tensor) -> Result<Tensor> {
    let start = (rank * pictures.dim(0)?) as u32;
    let targets = Tensor::arange(start, start + pictures.dim(0)? as u32, pictures.device())?;
    let loss = |own: &Tensor, others: &Tensor| {
        let scores = matmul(own, &transpose(&all.all_gather(others)?, 0, 1)?)?.broadcast_mul(&scale.exp()?)?;
        cross_entropy(&scores, &targets)
    };
    (loss(pictures, captions)? + loss(captions, pictures)?)? / 2.0
}

/// The share of pictures whose counterpart is the most similar one.
fn accuracy(pictures: &Tensor, others: &Tensor) -> Result<f64> {
    let found = pictures.matmul(&others.t()?)?.argmax(1)?;
    let right = found.eq(&Tensor::arange(0, pictures.dim(0)? as u32, pictures.device())?)?;
    right.to_dtype(DType::F64)?.mean_all()?.to_scalar()
}

fn train(pg: &ProcessGroup, options: &Options) -> candle_ddp::Result<()> {
    let (rank, count) = (pg.rank(), options.batch_size / pg.world_size());
    let data = Pictures { dtype: options.dtype, device: pg.device().clone() };
    let ddp_options =
        DdpOptions { init_seed: Some(0), precision: Precision::Pure(options.dtype), ..Default::default() };
    let build = |vb| Net::new(options.objective == Objective::Clip, vb);
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, ddp_options)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 3e-3, ..Default::default() })?;
    let all = pg.with_grad()?;
    // The counterparts of `count` pictures from number `first` on.
    let features = |net: &Net, first: usize, count: usize| {
        let pictures = net.picture(&data.views(first, count, 0)?)?;
        let others = match options.objective {
            Objective::Simclr => net.picture(&data.views(first, count, 1)?)?,
            Objective::Clip => net.caption(&data.captions(first, count)?)?,
        };
        candle_core::Result::Ok((pictures, others))
    };
    for step in 1..=options.steps {
        let first = step as usize * options.batch_size + rank * count;
        let loss = ddp.call(|net| {
            let (pictures, others) = features(net, first, count)?;
            match &net.scale {
                None => simclr(&all, rank, [&pictures, &others]),
                Some(scale) => clip(&all, rank, [&pictures, &others], scale),
            }
        })?;
        optimizer.step(&ddp.backward(&loss)?)?;
        if step % 20 == 0 || step == options.steps {
            let [sum] = pg.all_reduce_scalars([loss.to_dtype(DType::F64)?.to_scalar()?], ReduceOp::Avg)?;
            if rank == 0 {
                println!("step {step}: loss {sum:.13}");
            }
        }
    }
    // Pictures that no step has seen.
    let (pictures, others) = no_grad(|| ddp.call(|net| features(net, 0, options.batch_size)))?;
    if rank == 0 {
        println!("{:.1} % of {} new pictures are found", 100.0 * accuracy(&pictures, &others)?, options.batch_size);
    }
    Ok(())
}

fn main() -> candle_ddp::Result<()> {
    let options = Options::parse();
    candle_ddp::run(|pg| {
        let (size, world_size) = (options.batch_size, pg.world_size());
        if size == 0 || size % world_size > 0 {
            let reason = format!("it must be a multiple of the number of ranks, {world_size}, not {size}");
            return Err(Error::InvalidArgument { argument: "--batch-size", reason });
        }
        train(pg, &options)
    })
}
