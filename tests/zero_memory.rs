//! The memory of a GPT's training: under ZeRO, each rank has its part of states and gradients, and two buckets.
#![allow(clippy::unwrap_used)]

use block::Block;
use candle_core::{DType, Module, Result, Tensor};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, spawn};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use peak_alloc::PeakAlloc;

#[path = "../examples/char_gpt/block.rs"]
mod block;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 64;
const LAYERS: usize = 20;
/// The bytes at which a bucket is full. It may have one more parameter.
const CAP: usize = 256 << 10;
/// The bytes of the largest parameter.
const LARGEST: usize = 4 * WIDTH * 4 * WIDTH;

/// A GPT without an embedding.
struct Gpt {
    blocks: Vec<Block>,
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        let block = |layer| Block::new(WIDTH, 4, vb.pp(format!("blocks.{layer}")));
        Ok(Self { blocks: (0..LAYERS).map(block).collect::<Result<_>>()?, head: linear(WIDTH, WIDTH, vb.pp("head"))? })
    }
}

impl Module for Gpt {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

/// Trains on `world_size` ranks, which are threads. Returns the peak of a rank, and the bytes of the parameters.
fn train(world_size: usize, zero: bool) -> (f64, f64) {
    let before = ALLOCATOR.current_usage();
    let ranks = spawn(world_size, |pg| {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let caps = DdpOptions { bucket_cap_mb: mib(CAP), first_bucket_mb: mib(CAP) / 4., ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), Gpt::new, caps)?;
        let mut optimizer: Box<dyn Optimizer> = match zero {
            true => Box::new(ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?),
            false => Box::new(AdamW::new(&ddp, ParamsAdamW::default())?),
        };
        // So few that activations hardly count.
        let x = Tensor::ones((1, 4, WIDTH), DType::F32, pg.device())?;
        for step in 0..4 {
            if step == 1 {
                pg.barrier()?;
                ALLOCATOR.reset_peak_usage();
                pg.barrier()?;
            }
            optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        }
        pg.barrier()?;
        let peak = ALLOCATOR.peak_usage();
        pg.barrier()?;
        let bytes = ddp.parameters().iter().map(|var| 4 * var.elem_count()).sum::<usize>();
        Ok((peak.saturating_sub(before) / world_size, bytes))
    });
    let (peak, bytes) = ranks.unwrap()[0];
    (peak as f64, bytes as f64)
}

#[test]
fn gradients_take_their_part_and_two_buckets() {
    // Tables and threads are made once.
    train(4, false);
    for world_size in [2, 4] {
        let part = 1. / world_size as f64;
        let (plain, bytes) = train(world_size, false);
        // Activations, and what layers and the engine keep, in addition to variables and replicas, two states, and gradients.
        let others = plain - bytes * (2. + 2. + 1.);
        let (zero, _) = train(world_size, true);
        let (buckets, slack) = (2. * (CAP + LARGEST) as f64, LARGEST as f64);
        let expected = bytes * (2. + 2. * part + part) + buckets + others + slack;
        println!("{world_size} ranks: {zero:.0} bytes at the peak, expected {expected:.0}, without ZeRO {plain:.0}");
        assert!(zero <= expected, "{world_size} ranks: {zero} bytes, not {expected}");
        // The test can tell it from whole gradients.
        assert!(expected < bytes * (2. + 2. * part + 1.) + others);
    }
}
