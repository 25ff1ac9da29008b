//! The time for which `Checkpointer::save` blocks the training, compared with a memcpy of the state.
//!
//! ```text
//! cargo bench --bench checkpoint [-- --rounds 20 --ranks 1 --parameters 25000000 --folder FOLDER]
//! cargo bench --bench checkpoint -- --resume 2000 --ranks 2 --rounds 5
//! ```
//!
//! The state belongs to AdamW: a model of f32 and two moments of each parameter, in tensors of 512 × 1024 elements. Each
//! round measures, one after the other, a copy of the whole state into memory that is there already (one thread,
//! `copy_from_slice`), and a save, which then is waited for, so that nothing is written while the next round copies. With
//! several ranks, which are threads, rank 0 saves, and the save is measured there. The first save, which has to get its
//! memory from the system, is listed separately.
//!
//! With `--resume` it measures instead in which time the ranks load so many megabytes: the pieces of a sharded model and its
//! optimizer that a `Checkpointer` has saved, and a whole file of weights. This is compared with the time in which they read the same
//! files, each rank its part, from the system's cache and from the disk.
//!
//! Without `--bench` (as under `cargo test`), it runs two rounds with a small state
//! as a smoke test.
#[path = "../examples/common/median.rs"]
mod median;
#[path = "checkpoint/resume.rs"]
mod resume;
mod start;

use candle_core::{DType, Device, Storage, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::{Context, ProcessGroup, Result};
use clap::Parser;
use median::median;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// The number of ranks, which are threads.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// The number of the model's parameters.
    #[arg(long, default_value_t = 25_000_000)]
    parameters: usize,
    /// Measure the time to load so many megabytes instead.
    #[arg(long, value_name = "MEGABYTES")]
    resume: Option<usize>,
    /// Where checkpoints are written (default: a folder in the system's folder for temporary files).
    #[arg(long)]
    folder: Option<PathBuf>,
}

const TENSOR: usize = 512 * 1024;

#[derive(Clone)]
struct State(HashMap<String, Tensor>);

impl State {
    fn new(parameters: usize) -> candle_core::Result<Self> {
        let tensor = |number: usize| Tensor::full(number as f32, (512, 1024), &Device::Cpu);
        let names = (0..parameters.div_ceil(TENSOR)).map(|number| Ok((number.to_string(), tensor(number)?)));
        Ok(Self(names.collect::<candle_core::Result<_>>()?))
    }
}

impl StateDict for State {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(self.0.clone())
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.0 = state.clone();
        Ok(())
    }
}

/// In milliseconds.
fn memcpy(states: &[State], copies: &mut [Vec<f32>]) -> f64 {
    let start = Instant::now();
    for (tensor, copy) in states.iter().flat_map(|state| state.0.values()).zip(copies.iter_mut()) {
        let (storage, layout) = tensor.storage_and_layout();
        if let (Storage::Cpu(storage), Some((from, to))) = (&*storage, layout.contiguous_offsets())
            && let Ok(values) = storage.as_slice::<f32>()
        {
            copy.copy_from_slice(&values[from..to]);
        }
    }
    std::hint::black_box(copies);
    start.elapsed().as_secs_f64() * 1e3
}

fn rank(pg: &ProcessGroup, rounds: usize, parameters: usize, folder: &Path) -> Result<String> {
    let states: Vec<State> = (0..3).map(|_| State::new(parameters)).collect::<candle_core::Result<_>>()?;
    let tensors: usize = states.iter().map(|state| state.0.len()).sum();
    let mut copies = vec![vec![0f32; TENSOR]; if pg.rank() == 0 { tensors } else { 0 }];
    let mut checkpointer = Checkpointer::new(pg, folder, CheckpointerOptions { keep: 1, ..Default::default() })?;
    // Of the same tensors.
    let mut saved = states.clone();
    let mut save = |step: usize| -> Result<(f64, f64)> {
        pg.barrier()?;
        let start = Instant::now();
        let [model, first, second] = &mut saved[..] else { unreachable!() };
        let handle = checkpointer.save(step as u64, (("model", model), ("exp_avg", first), ("exp_avg_sq", second)))?;
        let stall = start.elapsed().as_secs_f64() * 1e3;
        handle.wait()?;
        Ok((stall, start.elapsed().as_secs_f64() * 1e3))
    };
    let (first, _) = save(0)?;
    let mut results: [Vec<f64>; 3] = Default::default();
    for step in 1..=rounds {
        let copied = if pg.rank() == 0 { memcpy(&states, &mut copies) } else { 0. };
        let (stall, durable) = save(step)?;
        for (list, value) in results.iter_mut().zip([copied, stall, durable]) {
            list.push(value);
        }
    }
    let ratios = results[1].iter().zip(&results[0]).map(|(stall, copied)| stall / copied);
    let ratio = median(ratios);
    let [copied, stall, durable] = results.map(median);
    let mebibytes = (tensors * TENSOR * DType::F32.size_in_bytes()) as f64 / f64::from(1 << 20);
    Ok(format!(
        "| {} | {mebibytes:.0} | {copied:.1} | {stall:.1} | {:.2} | {first:.1} | {durable:.0} |",
        pg.world_size(),
        ratio
    ))
}

fn bench(options: &Options) -> Result<()> {
    let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
    let folder = folder.join(format!("candle-ddp-checkpoint-bench-{}", std::process::id()));
    let remove = || {
        if let Err(error) = std::fs::remove_dir_all(&folder) {
            eprintln!("{} stays: {error}", folder.display());
        }
    };
    if let Some(megabytes) = options.resume {
        std::fs::create_dir_all(&folder).context("making a folder")?;
        let measured = resume::bench(options.ranks, options.rounds, megabytes, &folder);
        remove();
        return measured;
    }
    let lines = candle_ddp::spawn(options.ranks, |pg| rank(&pg, options.rounds, options.parameters, &folder));
    remove();
    println!("| ranks | state, MiB | memcpy, ms | save, ms | save / memcpy | first save, ms | durable after, ms |");
    println!("|---|---|---|---|---|---|---|\n{}", lines?[0]);
    Ok(())
}

fn main() -> ExitCode {
    let options = || Options { rounds: 2, ranks: 2, parameters: 2 * TENSOR, resume: None, folder: None };
    let smoke = || bench(&options()).and_then(|()| bench(&Options { resume: Some(20), ..options() }));
    start::exit_code(if start::is_bench() { bench(&start::options()) } else { smoke() })
}
