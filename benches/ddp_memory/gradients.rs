//! The gradients of a GPT at the peak of a step, with AdamW and with `ZeroRedundancyOptimizer`.
use super::ALLOCATOR;
use super::char_gpt_block::Block;
use candle_core::{DType, Module, Tensor};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Result, Sharding, block, spawn};
use candle_nn::{VarBuilder, VarMap};

/// The blocks of a GPT without an embedding.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) layers: usize,
    pub(crate) width: usize,
}

struct Gpt(Vec<candle_ddp::Block<Block>>);

impl Gpt {
    fn new(Size { layers, width }: Size, vb: VarBuilder) -> candle_core::Result<Self> {
        let block = |layer| block(vb.pp(layer), |vb| Block::new(width, 4, vb));
        (0..layers).map(block).collect::<candle_core::Result<_>>().map(Self)
    }
}

impl Module for Gpt {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, block| block.forward(&x))
    }
}

/// The bytes of a rank, and of all parameters and the largest one.
struct Found {
    peak: usize,
    parameters: usize,
    largest: usize,
}

/// Trains with so many passes per step on so few positions that activations hardly count. The peak is measured in the second step.
fn train(world_size: usize, size: Size, sharding: Sharding, passes: usize) -> Result<Found> {
    let ranks = spawn(world_size, |pg| {
        let x = Tensor::ones((1, 2, size.width), DType::F32, pg.device())?;
        // Layers keep work space for each thread.
        let other =
            Gpt::new(Size { layers: 1, ..size }, VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device()))?;
        other.forward(&x)?.sum_all()?.backward()?;
        drop(other);
        pg.barrier()?;
        let before = ALLOCATOR.current_usage();
        pg.barrier()?;
        let build = |vb| Gpt::new(size, vb);
        let options = DdpOptions { sharding, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        for step in 0..2 {
            if step == 1 {
                pg.barrier()?;
                ALLOCATOR.reset_peak_usage();
                pg.barrier()?;
            }
            for pass in 1..=passes {
                let _guard = ddp.sync_if(pass == passes);
                let grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
                if pass == passes {
                    optimizer.step(&grads)?;
                }
            }
        }
        pg.barrier()?;
        let peak = ALLOCATOR.peak_usage().saturating_sub(before) / world_size;
        pg.barrier()?;
        let bytes: Vec<usize> = ddp.parameters().iter().map(|var| 4 * var.elem_count()).collect();
        Ok([peak, bytes.iter().sum(), bytes.into_iter().max().unwrap_or(0)])
    })?;
    let [peak, parameters, largest] = ranks[0];
    Ok(Found { peak, parameters, largest })
}

/// Prints a row: a rank's peak with AdamW and with ZeRO-2, and ZeRO-2's gradients next to their part and two buckets.
pub(crate) fn row(world_size: usize, size: Size) -> Result<()> {
    let Found { peak: plain, parameters, largest } = train(world_size, size, Sharding::Off, 1)?;
    let spread = train(world_size, size, Sharding::Optimizer { ranks: None }, 1)?.peak;
    // With AdamW: variables and the copies with which the model computes, two states, and gradients. ZeRO-2 shards the states.
    let others = plain.saturating_sub(5 * parameters);
    let gradients = spread.saturating_sub(others + 2 * parameters + 2 * parameters / world_size);
    let cap = (DdpOptions::default().buckets.bucket_cap_mb * f64::from(1 << 20)) as usize;
    let bound = parameters / world_size + 2 * (cap + largest);
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "| {:.1} M parameters, a rank of {world_size} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} |",
        parameters as f64 / 4e6,
        mib(parameters),
        mib(plain),
        mib(spread),
        mib(gradients),
        mib(parameters / world_size),
        mib(bound)
    );
    Ok(())
}

/// Prints a row: a rank's peak with one pass per step, and with four whose gradients accumulate.
pub(crate) fn accumulation(world_size: usize, size: Size, sharding: Sharding) -> Result<()> {
    let peak = |passes| train(world_size, size, sharding, passes).map(|found| found.peak as f64 / f64::from(1 << 20));
    let (one, four) = (peak(1)?, peak(4)?);
    let name = match sharding {
        Sharding::Blocks { .. } => "sharded blocks",
        _ => "ZeRO-2",
    };
    println!("| {name}, a rank of {world_size} | {one:.0} | {four:.0} |");
    Ok(())
}
