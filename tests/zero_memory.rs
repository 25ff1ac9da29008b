//! The memory of a GPT's training: under ZeRO, each rank has its part of states and gradients, and two buckets; under
//! sharding its part of everything, and two blocks. Then that of its checkpoints.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ddp::amp::Autocast;
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions, LoadOptions, Pretrained};
use candle_ddp::nn::{self, LoraConfig, matmul};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{
    Backward, Buckets, DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Sharding, SpawnOptions,
    backward_with, block, spawn, spawn_with,
};
use candle_nn::{Init, Linear, VarBuilder, VarMap, linear};
use char_gpt_block::Block;
use peak_alloc::PeakAlloc;

#[path = "../examples/char_gpt/block.rs"]
mod char_gpt_block;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 64;
const LAYERS: usize = 24;
/// The bytes at which a bucket is full. It may have one more parameter.
const CAP: usize = 256 << 10;
/// The bytes of the largest parameter.
const LARGEST: usize = 4 * WIDTH * 4 * WIDTH;

/// A GPT without an embedding.
struct Gpt {
    blocks: Vec<candle_ddp::Block<Block>>,
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        Self::of(LAYERS, vb)
    }

    fn of(layers: usize, vb: VarBuilder) -> Result<Self> {
        let block = |layer| block(vb.pp(format!("blocks.{layer}")), |vb| Block::new(WIDTH, 4, vb));
        Ok(Self { blocks: (0..layers).map(block).collect::<Result<_>>()?, head: linear(WIDTH, WIDTH, vb.pp("head"))? })
    }
}

impl Module for Gpt {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?)
    }
}

/// How a run trains.
#[derive(Clone, Copy, Debug)]
struct Run {
    world_size: usize,
    zero: bool,
    /// The dtype in which the model computes.
    param_dtype: DType,
    virtual_ranks: Option<usize>,
    sharding: Sharding,
    /// The backward passes of a step.
    passes: usize,
}

/// The bytes of a rank.
struct Found {
    peak: f64,
    parameters: f64,
    estimate: f64,
}

/// Trains on ranks that are threads.
fn train(Run { world_size, zero, param_dtype, virtual_ranks, sharding, passes }: Run) -> Found {
    let options = SpawnOptions { world_size, virtual_ranks, ..Default::default() };
    let ranks = spawn_with(options, |pg| {
        // So few positions that activations hardly count.
        let x = Tensor::ones((1, 2, WIDTH), DType::F32, pg.device())?;
        // Layers keep work space for each thread.
        let other = Gpt::of(1, VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device()))?;
        other.forward(&x)?.sum_all()?.backward()?;
        drop(other);
        pg.barrier()?;
        let before = ALLOCATOR.current_usage();
        pg.barrier()?;
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let (bucket_cap_mb, first_bucket_mb) = (mib(CAP), mib(CAP) / 4.);
        let precision = match param_dtype {
            DType::F32 => Precision::default(),
            _ => Precision::Half { param_dtype, buffer_dtype: None },
        };
        let options = DdpOptions {
            precision,
            sharding,
            buckets: Buckets { bucket_cap_mb, first_bucket_mb, ..Default::default() },
            ..Default::default()
        };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), Gpt::new, options)?;
        let mut optimizer: Box<dyn Optimizer> = match zero {
            true => Box::new(ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?),
            false => Box::new(AdamW::new(&ddp, ParamsAdamW::default())?),
        };
        let estimate = ddp.memory_estimate(&optimizer)?;
        let x = x.to_dtype(param_dtype)?;
        for step in 0..2 {
            if step == 1 {
                pg.barrier()?;
                ALLOCATOR.reset_peak_usage();
                pg.barrier()?;
            }
            let loss =
                || -> candle_ddp::Result<Tensor> { Ok(ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?) };
            let Some(numbers) = ddp.micro_batches() else {
                for _ in 1..passes {
                    let _guard = ddp.no_sync();
                    ddp.backward(&loss()?)?;
                }
                optimizer.step(&ddp.backward(&loss()?)?)?;
                continue;
            };
            let last = numbers.end - 1;
            for number in numbers {
                let options = Backward { micro_batch: Some(number), ..Default::default() };
                let grads = backward_with(&loss()?, &[&ddp], options)?;
                if number == last {
                    optimizer.step(&grads)?;
                }
            }
        }
        pg.barrier()?;
        let peak = ALLOCATOR.peak_usage();
        pg.barrier()?;
        assert_eq!(estimate.devices.len(), 1);
        let (table, total) = (estimate.to_string(), format!(" {:.1}", mib(estimate.devices[0].total())));
        assert!(table.lines().count() == 2 && table.contains("CPU") && table.ends_with(&total), "{table}");
        let parameters = ddp.parameters().iter().map(|var| 4 * var.elem_count()).sum::<usize>();
        assert_eq!(estimate.devices[0].parameters, parameters);
        Ok([peak.saturating_sub(before) / world_size, parameters, estimate.devices[0].total()])
    });
    let [peak, parameters, estimate] = ranks.unwrap()[0].map(|bytes| bytes as f64);
    Found { peak, parameters, estimate }
}

/// Trains, and compares what a rank takes with the estimate. Returns its bytes, and those of the parameters.
fn check(run: Run) -> (f64, f64) {
    let Found { peak, parameters, estimate } = train(run);
    println!("{run:?}: {peak:.0} bytes at the peak, {estimate:.0} estimated: {:.3}", estimate / peak);
    assert!((0.9..=1.1).contains(&(estimate / peak)), "{run:?}: {peak} bytes, not {estimate}");
    (peak, parameters)
}

// One test, since the allocator counts what the whole process has.
#[test]
fn gradients_take_their_part_and_two_buckets_as_estimated() {
    let (f32, bf16) = (DType::F32, DType::BF16);
    let whole =
        Run { world_size: 2, zero: false, param_dtype: f32, virtual_ranks: None, sharding: Sharding::Off, passes: 1 };
    for world_size in [2, 4] {
        let part = 1. / world_size as f64;
        let run = Run { world_size, ..whole };
        let (plain, bytes) = check(run);
        // Activations, and what the engine keeps, in addition to variables and replicas, two states, and gradients.
        let others = plain - bytes * (2. + 2. + 1.);
        let (peak, _) = check(Run { zero: true, sharding: Sharding::Optimizer { ranks: None }, ..run });
        let (buckets, slack) = (2. * (CAP + LARGEST) as f64, LARGEST as f64);
        let expected = bytes * (2. + 2. * part + part) + buckets + others + slack;
        assert!(peak <= expected, "{world_size} ranks: {peak} bytes, not {expected}");
        // However many passes accumulate.
        let (of_four, _) = check(Run { zero: true, sharding: Sharding::Optimizer { ranks: None }, passes: 4, ..run });
        assert!(of_four <= peak + buckets, "{world_size} ranks: {of_four} bytes of four passes, {peak} of one");
        // The test can tell it from whole gradients.
        assert!(expected < bytes * (2. + 2. * part + 1.) + others);
    }
    for zero in [false, true] {
        for (param_dtype, virtual_ranks) in [(bf16, None), (f32, Some(8))] {
            let sharding = if zero { Sharding::Optimizer { ranks: None } } else { Sharding::Off };
            check(Run { zero, param_dtype, virtual_ranks, sharding, ..whole });
        }
    }
    for world_size in [2, 4] {
        let run = Run { world_size, ..whole };
        let (plain, bytes) = check(run);
        let others = plain - bytes * (2. + 2. + 1.);
        let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: None };
        let Found { peak, estimate, .. } = train(Run { zero: true, sharding, ..run });
        println!(
            "{world_size} ranks: {peak:.0} bytes of a sharded model, {estimate:.0} estimated and {others:.0} others"
        );
        // So little that the others count.
        assert!(
            (0.9..=1.1).contains(&((estimate + others) / peak)),
            "{world_size} ranks: {peak} bytes, not {estimate}"
        );
        // Parameters, two states and gradients.
        let expected = 1.15 * (4. * bytes / world_size as f64 + 2. * bytes / LAYERS as f64) + others;
        assert!(peak <= expected, "{world_size} ranks: {peak} bytes of a sharded model, not {expected}");
        let of_four = train(Run { zero: true, sharding, passes: 4, ..run }).peak;
        println!("{world_size} ranks: {of_four:.0} bytes of four passes of a sharded model");
        // Ranks that compute at the same time have more blocks together.
        let bound = peak + 2. * bytes / LAYERS as f64;
        assert!(of_four <= bound, "{world_size} ranks: {of_four} bytes of four passes, {peak} of one");
    }
    casts_end_with_their_block();
    pretrained_weights_are_spread();
    checkpoints_take_the_pieces_and_a_part();
    models_leave_nothing_behind();
}

/// However many models a process has made, nothing of them is left when they are gone.
fn models_leave_nothing_behind() {
    const MODELS: usize = 4_000;
    spawn(2, |pg| {
        let x = Tensor::ones((1, 2), DType::F32, pg.device())?;
        let make = |count: usize| -> candle_ddp::Result<usize> {
            for index in 0..count {
                let sharding = if index % 2 == 1 {
                    Sharding::Blocks { reshard_after_forward: true, ranks: None }
                } else {
                    Sharding::Off
                };
                let (varmap, options) = (VarMap::new(), DdpOptions { sharding, ..Default::default() });
                let new = |vb: VarBuilder| block(vb.pp("block"), |vb| linear(2, 1, vb));
                let ddp = DistributedDataParallel::with_options(&pg, &varmap, new, options)?;
                // Of many, every tenth one is trained.
                if index % 20 < 2 || count < MODELS {
                    let mut optimizer: Box<dyn Optimizer> = match sharding {
                        Sharding::Blocks { .. } => {
                            Box::new(ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?)
                        }
                        _ => Box::new(AdamW::new(&ddp, ParamsAdamW::default())?),
                    };
                    let loss = ddp.call(|net| net.forward(&x))?.sum_all()?;
                    optimizer.step(&ddp.backward(&loss)?)?;
                }
            }
            pg.barrier()?;
            Ok(ALLOCATOR.current_usage())
        };
        // Groups remember their last calls.
        make(1_250)?;
        let (before, after) = (make(20)?, make(MODELS)?);
        // Less than what the shortest entry of a list would take.
        assert!(after < before + 8 * MODELS, "{before} bytes before, {after} after {MODELS} models");
        Ok(())
    })
    .unwrap();
}

/// A model of blocks that are one matrix each, with which they multiply.
struct Products(Vec<candle_ddp::Block<Tensor>>);

impl Module for Products {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, block| block.call(&[&x], |matrix, x| matmul(&x[0], matrix)))
    }
}

/// Under autocast, the casts of a block's parameters are freed with the block, not at the end of the pass.
fn casts_end_with_their_block() {
    const BLOCKS: usize = 24;
    const SIDE: usize = 256;
    let found = spawn(2, |pg| {
        let new = |vb: VarBuilder| {
            let one = |index: usize| block(vb.pp(index), |vb| vb.get((SIDE, SIDE), "matrix"));
            (0..BLOCKS).map(one).collect::<Result<_>>().map(Products)
        };
        let precision = Precision::Autocast(Autocast::Products(DType::BF16));
        let options = DdpOptions {
            sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None },
            precision,
            ..Default::default()
        };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), new, options)?;
        let x = Tensor::ones((2, SIDE), DType::F32, pg.device())?;
        ddp.forward(&x)?;
        peak(&pg, || ddp.forward(&x).map(drop))
    });
    let (found, casts) = (found.unwrap()[0], 2 * BLOCKS * SIDE * SIDE * DType::BF16.size_in_bytes());
    println!("{found} bytes of a forward pass under autocast, {casts} of all casts");
    assert!(2 * found < casts, "{found} bytes of a forward pass under autocast");
}

/// All ranks together have the pretrained weights of an adapted model once, and each has some blocks at a time.
fn pretrained_weights_are_spread() {
    const BLOCKS: usize = 24;
    const SIDE: usize = 256;
    const BLOCK: usize = 4 * SIDE * SIDE;
    let folder = tempfile::tempdir().unwrap();
    let tensor = |index| (format!("{index}.weight"), Tensor::ones((SIDE, SIDE), DType::F32, &Device::Cpu).unwrap());
    checkpoint::save_tensors(&(0..BLOCKS).map(tensor).collect(), folder.path().join("model.safetensors")).unwrap();
    let target_modules = (0..BLOCKS).map(|index| index.to_string()).collect();
    let lora = LoraConfig { r: 1, target_modules, ..Default::default() };
    for world_size in [1, 2, 4] {
        let found = spawn(world_size, |pg| {
            let (mut made, base) = (None, Pretrained::open(folder.path())?);
            let x = Tensor::ones((2, SIDE), DType::F32, pg.device())?;
            let built = peak(&pg, || {
                let new = |vb: VarBuilder| {
                    let one = |index: usize| block(vb.pp(index), |vb| nn::linear_no_bias(SIDE, SIDE, vb));
                    (0..BLOCKS).map(one).collect::<Result<Vec<_>>>()
                };
                let sharding = Sharding::Blocks { reshard_after_forward: true, ranks: None };
                let options = DdpOptions { sharding, ..Default::default() };
                let base = base.var_builder(DType::F32, pg.device());
                let build = |vb| lora.build(base, vb, new);
                let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
                let optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
                made = Some((ddp, optimizer));
                Ok(())
            })?;
            let (ddp, mut optimizer) = made.unwrap();
            let mut step = || {
                let y = ddp.call(|net| net.iter().try_fold(x.clone(), |x, block| block.forward(&x)))?;
                optimizer.step(&ddp.backward(&y.sqr()?.mean_all()?)?)
            };
            // Layers keep work space.
            step()?;
            Ok([built, peak(&pg, step)?])
        });
        let [built, trained] = found.unwrap()[0].map(|bytes| bytes as f64 / BLOCK as f64);
        println!("{world_size} ranks: {built:.1} and {trained:.1} blocks, of {BLOCKS}");
        let (blocks, ranks) = (BLOCKS as f64, world_size as f64);
        // The first rank has a block in one piece as well, and a tensor of the file. Adapters and their states are small.
        assert!(built < blocks + 4. + 2. * ranks, "{world_size} ranks: {built} blocks while the model is made");
        // In addition to the pieces: a block that computes, and two that are on their way.
        assert!(trained < 4. * ranks, "{world_size} ranks: {trained} blocks in a step");
    }
}

/// A model of matrices that are larger than what is sent at once.
struct Matrices(#[allow(dead_code)] Vec<candle_ddp::Block<Linear>>);

impl Module for Matrices {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}

const MATRICES: usize = 3;
/// The bytes of a matrix.
const MATRIX: usize = 12 << 20;

fn matrices(pg: &ProcessGroup, varmap: &VarMap, sharding: Sharding) -> candle_ddp::Result<impl Sized + use<>> {
    let new = |vb: VarBuilder| {
        let matrix = |vb: VarBuilder| vb.get_with_hints((3 << 10, 1 << 10), "weight", Init::Const(1.));
        let one = |index: usize| block(vb.pp(index), |vb| Ok(Linear::new(matrix(vb)?, None)));
        (0..MATRICES).map(one).collect::<Result<_>>().map(Matrices)
    };
    DistributedDataParallel::with_options(pg, varmap, new, DdpOptions { sharding, ..Default::default() })
}

/// What all ranks together have at the peak of `work`, in addition to what they had before.
fn peak(pg: &ProcessGroup, work: impl FnOnce() -> candle_ddp::Result<()>) -> candle_ddp::Result<usize> {
    pg.barrier()?;
    let before = ALLOCATOR.current_usage();
    pg.barrier()?;
    ALLOCATOR.reset_peak_usage();
    pg.barrier()?;
    work()?;
    pg.barrier()?;
    let peak = ALLOCATOR.peak_usage();
    pg.barrier()?;
    Ok(peak.saturating_sub(before))
}

/// A save of a sharded model to one file takes some parts of 8 MiB on rank 0. Loads take the pieces once more, of which all ranks
/// together have the model, until the last one is known to be right, and what a rank reads at once.
fn checkpoints_take_the_pieces_and_a_part() {
    let (model, bounded) = (MATRICES * MATRIX, 28 << 20);
    for world_size in [2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let (file, run) = (folder.path().join("model"), folder.path().join("run"));
        let found = spawn(world_size, |pg| {
            let mut varmap = VarMap::new();
            let _ddp = matrices(&pg, &varmap, Sharding::Blocks { reshard_after_forward: true, ranks: None })?;
            let saved = peak(&pg, || checkpoint::save_distributed(&pg, &varmap, &file))?;
            let load = || checkpoint::load_distributed(&pg, &varmap, &file, LoadOptions::default()).map(drop);
            let loaded = peak(&pg, load)?;
            if world_size == 2 {
                return Ok([saved, loaded, 0]);
            }
            let mut checkpointer = Checkpointer::new(&pg, &run, CheckpointerOptions::default())?;
            let checkpointed = peak(&pg, || checkpointer.save(1, ("model", &mut varmap))?.wait().map(drop))?;
            drop(checkpointer);
            Ok([saved, loaded, checkpointed])
        });
        let [saved, loaded, checkpointed] = found.unwrap()[0];
        // The ranks that saved, and others.
        let resumed = [4, 3].into_iter().filter(|_| world_size == 4).map(|ranks| {
            let found = spawn(ranks, |pg| {
                let mut varmap = VarMap::new();
                let _ddp = matrices(&pg, &varmap, Sharding::Blocks { reshard_after_forward: true, ranks: None })?;
                let options = CheckpointerOptions { resume: true, ..Default::default() };
                let mut checkpointer = Checkpointer::new(&pg, &run, options)?;
                peak(&pg, || checkpointer.load_latest(("model", &mut varmap)).map(|step| assert_eq!(step, Some(1))))
            });
            found.unwrap()[0]
        });
        let resumed: Vec<usize> = resumed.collect();
        println!(
            "{world_size} ranks, {model} bytes: {saved} to save, {loaded} to load, {checkpointed} to save a checkpoint, {resumed:?} to resume"
        );
        assert!(saved <= bounded, "{world_size} ranks: {saved} bytes to save");
        assert!(loaded <= model + bounded, "{world_size} ranks: {loaded} bytes to load");
        assert!(checkpointed <= model + bounded, "{world_size} ranks: {checkpointed} bytes to save a checkpoint");
        // Other ranks put their pieces together from several files.
        for (resumed, copies) in resumed.into_iter().zip([1, 2]) {
            assert!(resumed <= copies * model + bounded, "{world_size} ranks: {resumed} bytes to resume");
        }
    }
}
