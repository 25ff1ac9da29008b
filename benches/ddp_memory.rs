//! The memory that DistributedDataParallel needs in addition to plain candle, as a formula and as measured.
//!
//! ```text
//! cargo bench --bench ddp_memory
//! ```
//!
//! For parameters of `P` bytes in `n` tensors:
//!
//! - between steps: a replica of every parameter, and the gradient buckets, each with one more element per parameter:
//!   `2·P + 2·4·n` bytes;
//! - at the peak of a step: at most this minus `P`, because plain candle then holds its gradients in separate
//!   memory, while DDP's gradients are views of the buckets. If the peak falls into the backward pass, before the
//!   optimizer step, it is less, because candle first adds each variable's gradient to zeros, which DDP's replicas
//!   avoid.
//!
//! With `ZeroRedundancyOptimizer` instead of AdamW on `W` ranks, each rank holds `2·P/W` bytes of state between steps
//! instead of `2·P`, and `P/W` for gradients instead of `P` (the formula), and up to two buckets.
//!
//! For a GPT of 100 million parameters it measures in addition what gradients take at the peak of a step, and with `-- --accumulation`
//! nothing but the peaks of one pass and of four that accumulate.
//!
//! Bytes are counted in the allocator, so they are exact, whatever memory the allocator retains.
use candle_core::{Device, Tensor};
use candle_ddp::optim;
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result, Sharding, spawn};
use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};
use gradients::Size;
use models::{DTYPE, MODELS, Model, SMOKE_MODELS, adamw, loss};
use peak_alloc::PeakAlloc;
use std::process::ExitCode;

#[path = "../examples/char_gpt/block.rs"]
mod char_gpt_block;
#[path = "ddp_memory/gradients.rs"]
mod gradients;
mod models;
mod start;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const STEPS: usize = 3;

/// The bytes in addition to those before the model was built.
#[derive(Clone, Copy)]
struct Usage {
    between_steps: usize,
    peak: usize,
}

fn main() -> ExitCode {
    let measure = start::is_bench();
    let models = if measure { MODELS } else { SMOKE_MODELS };
    let size = if measure { Size { layers: 8, width: 1024 } } else { Size { layers: 2, width: 32 } };
    let accumulation = || {
        println!("\n| MiB | one pass per step | four |\n|---|---|---|");
        let blocks = Sharding::Blocks { reshard_after_forward: true, ranks: None };
        [Sharding::Optimizer { ranks: None }, blocks]
            .into_iter()
            .try_for_each(|sharding| gradients::accumulation(4, size, sharding))
    };
    if std::env::args().any(|argument| argument == "--accumulation") {
        return start::exit_code(accumulation());
    }
    println!("| MiB | parameters | plain | DDP | difference | formula |\n|---|---|---|---|---|---|");
    let alone = spawn(1, |pg| models.iter().try_for_each(|model| bench(&pg, model)));
    let gradients = || {
        println!("\n| MiB | parameters | DDP | ZeRO-2 | its gradients | 1/world | 1/world and two buckets |");
        println!("|---|---|---|---|---|---|---|");
        [2, 4].into_iter().try_for_each(|ranks| gradients::row(ranks, size))
    };
    let spread = || models.iter().try_for_each(|model| [2, 4].into_iter().try_for_each(|ranks| zero(ranks, model)));
    start::exit_code(alone.and_then(|_| spread()).and_then(|()| gradients()).and_then(|()| accumulation()))
}

fn bench(pg: &ProcessGroup, model: &Model) -> Result<()> {
    let input = model.input()?;
    // candle's kernels keep work space for reuse.
    plain(model, &input)?;
    let (plain, _) = usage(|| plain(model, &input))?;
    let (ddp, (bytes, tensors)) = usage(|| ddp(pg, model, &input))?;
    let extra = 2 * bytes + 2 * DTYPE.size_in_bytes() * tensors;
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let row = |name: &str, plain: usize, ddp: usize, formula: usize| {
        let (difference, parameters) = (mib(ddp) - mib(plain), mib(bytes));
        let (plain, ddp, formula, name_of_model) = (mib(plain), mib(ddp), mib(formula), model.name);
        println!(
            "| {name_of_model}: {name} | {parameters:.2} | {plain:.2} | {ddp:.2} | {difference:.2} | {formula:.2} |"
        );
    };
    row("between steps", plain.between_steps, ddp.between_steps, extra);
    row("peak", plain.peak, ddp.peak, extra - bytes);
    Ok(())
}

/// Runs `train`, which returns the state that it keeps between steps, and a result.
fn usage<K, T>(train: impl FnOnce() -> Result<(K, T)>) -> Result<(Usage, T)> {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let (kept, result) = train()?;
    let usage = Usage {
        between_steps: ALLOCATOR.current_usage().saturating_sub(before),
        peak: ALLOCATOR.peak_usage().saturating_sub(before),
    };
    drop(kept);
    Ok((usage, result))
}

fn plain(model: &Model, input: &Tensor) -> Result<(impl Sized + use<>, ())> {
    let varmap = VarMap::new();
    let module = (model.build)(VarBuilder::from_varmap(&varmap, DTYPE, &Device::Cpu))?;
    let mut optimizer = AdamW::new(varmap.all_vars(), adamw())?;
    for _ in 0..STEPS {
        let loss = loss(&module.forward(input)?)?;
        let grads = loss.backward()?;
        optimizer.step(&grads)?;
    }
    Ok(((varmap, module, optimizer), ()))
}

fn ddp(pg: &ProcessGroup, model: &Model, input: &Tensor) -> Result<(impl Sized + use<>, (usize, usize))> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::with_options(
        pg,
        &varmap,
        model.build,
        DdpOptions { precision: Precision::Pure(DTYPE), ..Default::default() },
    )?;
    let mut optimizer = AdamW::new(ddp.parameters(), adamw())?;
    for _ in 0..STEPS {
        let loss = loss(&ddp.forward(input)?)?;
        let grads = ddp.backward(&loss)?;
        optimizer.step(&grads)?;
    }
    let parameters = ddp.parameters();
    let elements: usize = parameters.iter().map(|parameter| parameter.elem_count()).sum();
    Ok(((varmap, ddp, optimizer), (elements * DTYPE.size_in_bytes(), parameters.len())))
}

/// Measures the memory of one rank of several between steps, with AdamW and with sharded optimizer state.
fn zero(world_size: usize, model: &Model) -> Result<()> {
    let input = model.input()?;
    let train = |zero: bool| -> Result<(usize, usize)> {
        let before = ALLOCATOR.current_usage();
        let ranks = spawn(world_size, |pg| {
            let sharding = if zero { Sharding::Optimizer { ranks: None } } else { Sharding::Off };
            let ddp = DistributedDataParallel::with_options(
                &pg,
                &VarMap::new(),
                model.build,
                DdpOptions { precision: Precision::Pure(DTYPE), sharding, ..Default::default() },
            )?;
            let step = |ddp: &DistributedDataParallel<_>| ddp.backward(&loss(&ddp.forward(&input)?)?);
            let mut optimizer = optim::AdamW::new(&ddp, adamw())?;
            for _ in 0..STEPS {
                optim::Optimizer::step(&mut optimizer, &step(&ddp)?)?;
            }
            // The total of all ranks while all of them are idle.
            pg.barrier()?;
            let usage = ALLOCATOR.current_usage().saturating_sub(before);
            pg.barrier()?;
            let elements: usize = ddp.parameters().iter().map(|var| var.elem_count()).sum();
            Ok((usage / world_size, elements * DTYPE.size_in_bytes()))
        })?;
        Ok(ranks[0])
    };
    let (plain, bytes) = train(false)?;
    let (spread, _) = train(true)?;
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let (name, plain, spread) = (model.name, mib(plain), mib(spread));
    let formula = mib(bytes) * 3.0 * (1.0 / world_size as f64 - 1.0);
    println!(
        "| {name}: ZeRO-2, a rank of {world_size} | {:.2} | {plain:.2} (DDP) | {spread:.2} | {:.2} | {formula:.2} |",
        mib(bytes),
        spread - plain
    );
    Ok(())
}
