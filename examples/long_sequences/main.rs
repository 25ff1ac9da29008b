//! Sequences that are too long for one rank: each is spread over several ranks, such as those of a host. DeepSpeed's Ulysses: attention
//! needs all positions, but of one head at a time. An exchange before it gives each rank all positions of some heads, and another one
//! after it gives each rank all heads of its positions.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example long_sequences -- --sequence-ranks 2
//! ```
//!
//! Each rank's loss is the mean over its positions. DistributedDataParallel averages over all ranks, those of a sequence included: the
//! gradients are those of the mean over all positions of all sequences, as on one rank.
//!
//! ci: --steps 40
//! ci: --steps 4 --shard
mod model;

use candle_core::{DType, Tensor};
use candle_ddp::nn::cross_entropy;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, ReduceOp, Sharding};
use candle_nn::VarMap;
use clap::Parser;
use model::{LENGTH, Ranks, Transformer, VOCABULARY};

/// The sequences of a step, of all ranks together.
const BATCH: usize = 12;

/// Learn to repeat what came half a sequence before.
#[derive(Parser)]
struct Options {
    /// The number of steps.
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// The number of consecutive ranks over which a sequence is spread, a divisor of the number of ranks. The default is all.
    #[arg(long)]
    sequence_ranks: Option<usize>,
    /// f32 or f64.
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Spreads the parameters of the layers over all ranks as well.
    #[arg(long)]
    shard: bool,
}

/// Sequences from number `first` on, u32[count, LENGTH], and what is to be learned at each of their positions: the token there, and in the
/// second half the one of the first half.
fn batch(first: usize, count: usize, pg: &ProcessGroup) -> candle_ddp::Result<(Tensor, Tensor)> {
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for number in first..first + count {
        let mut generator = Generator::with_sequence(3, number as u64);
        let sequence: Vec<u32> = (0..LENGTH).map(|_| generator.uniform(0., VOCABULARY as f64) as u32).collect();
        targets.extend((0..LENGTH).map(|at| sequence[at % (LENGTH / 2)]));
        tokens.extend(sequence);
    }
    let tensor = |values| Tensor::from_vec(values, (count, LENGTH), pg.device());
    Ok((tensor(tokens)?, tensor(targets)?))
}

fn main() -> candle_ddp::Result<()> {
    let options = Options::parse();
    candle_ddp::run(|pg| {
        let (rank, world_size) = (pg.rank(), pg.world_size());
        let sequence_ranks = options.sequence_ranks.unwrap_or(world_size);
        let divides =
            sequence_ranks > 0 && world_size.is_multiple_of(sequence_ranks) && BATCH.is_multiple_of(world_size);
        if !divides {
            let reason = format!("must divide the number of ranks, {world_size}, which must divide {BATCH}");
            return Err(Error::InvalidArgument { argument: "--sequence-ranks", reason });
        }
        let mesh = pg.mesh(&[world_size / sequence_ranks, sequence_ranks], &["data", "sequence"])?;
        let ranks = Ranks::new(mesh.get_group("sequence")?)?;
        let sharding = match options.shard {
            true => Sharding::Blocks { reshard_after_forward: true, ranks: None },
            false => Sharding::Off,
        };
        let precision = Precision::Pure(options.dtype);
        let ddp_options = DdpOptions { init_seed: Some(0), precision, sharding, ..Default::default() };
        let build = |vb| Transformer::new(&ranks, vb);
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, ddp_options)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 1e-2, ..Default::default() })?;
        let count = BATCH * sequence_ranks / world_size;
        for step in 1..=options.steps {
            let (x, y) = batch(step as usize * BATCH + rank / sequence_ranks * count, count, pg)?;
            let (x, y) = (ranks.part(&x, 1)?, ranks.part(&y, 1)?);
            let loss = cross_entropy(&ddp.forward(&x)?.flatten(0, 1)?, &y.flatten_all()?)?;
            optimizer.step(&ddp.backward(&loss)?)?;
            if step % 10 == 0 || step == options.steps {
                let [mean] = pg.all_reduce_scalars([loss.to_dtype(DType::F64)?.to_scalar()?], ReduceOp::Avg)?;
                if rank == 0 {
                    println!("step {step}: loss {mean:.13}");
                }
            }
        }
        Ok(())
    })
}
