//! The data loader's time for a sample, the efficiency of its workers, and how far it reads ahead.
//!
//! ```text
//! cargo bench --bench loader [-- --workers 0 1 2 4 --prefetch-factor 2]
//! ```
//!
//! Each line of the output is a JSON object, for a number of workers:
//! - `ns_per_sample`: of samples that take no time, in batches of 256: the loader's own time.
//! - `efficiency`: of samples that wait 0 to 2 ms, in batches of 16: the sum of their waits, divided by the elapsed time and the
//!   number of threads that read. 1 is as fast as possible.
//! - `most_batches`: the largest number of batches that existed at once (begun, made or being delivered) with a slow program; and
//!   `bound`, the number that the loader promises: `workers * prefetch_factor`, and the one that each worker is making.
//!
//! Without `--bench` (as under `cargo test`), it reads a few samples as a smoke test.
mod start;

use candle_core::Tensor;
use candle_ddp::data::{Batch, DataLoader, Dataset, DistributedSampler, LoaderOptions, SamplerOptions};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result};
use clap::Parser;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// The numbers of threads that read.
    #[arg(long, num_args = 1.., default_values_t = [0, 1, 2, 4])]
    workers: Vec<usize>,
    #[arg(long, default_value_t = 2)]
    prefetch_factor: usize,
}

fn main() -> Result<()> {
    let options: Options = start::options_or(&["--workers", "2"]);
    let times = |samples: usize| if start::is_bench() { samples } else { samples / 100 };
    for workers in options.workers {
        let own = ns_per_sample(workers, options.prefetch_factor, times(1_000_000))?;
        let efficiency = efficiency(workers, options.prefetch_factor, times(4_000))?;
        let mut row = serde_json::json!({ "workers": workers, "ns_per_sample": own, "efficiency": efficiency });
        if workers > 0 {
            let (most, bound) = read_ahead(workers, options.prefetch_factor, times(4_000))?;
            (row["most_batches"], row["bound"]) = (most.into(), bound.into());
        }
        println!("{row}");
    }
    Ok(())
}

/// A dataset of a function.
struct Samples<F>(usize, F);

impl<T: Send, F: Fn(usize, &mut Generator) -> T + Send + Sync> Dataset for Samples<F> {
    type Sample = T;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<T> {
        Ok((self.1)(index, random))
    }
}

/// A loader of one rank; a batch is a list of samples.
fn loader<D: Dataset + 'static>(
    dataset: D,
    (num_workers, prefetch_factor, batch_size): (usize, usize, usize),
) -> Result<DataLoader<D, Vec<D::Sample>>>
where
    D::Sample: Batch + 'static,
{
    let sampler = DistributedSampler::new(dataset.len(), 0, 1, SamplerOptions::default())?;
    let options = LoaderOptions { batch_size, num_workers, prefetch_factor, ..Default::default() };
    DataLoader::from_sampler(dataset, sampler, options, Ok)
}

fn ns_per_sample(workers: usize, prefetch_factor: usize, count: usize) -> Result<f64> {
    let loader = loader(Samples(count, |index, _: &mut Generator| index), (workers, prefetch_factor, 256))?;
    // The permutation is drawn when the iterator is made.
    let batches = loader.iter();
    let (start, mut sum) = (Instant::now(), 0);
    for batch in batches {
        sum += batch?.into_iter().sum::<usize>();
    }
    let seconds = start.elapsed().as_secs_f64();
    if sum != count * (count - 1) / 2 {
        return Err(Error::InvalidArgument { argument: "samples", reason: "some are missing".to_string() });
    }
    Ok(seconds * 1e9 / count as f64)
}

fn efficiency(workers: usize, prefetch_factor: usize, count: usize) -> Result<f64> {
    let wait = |_, random: &mut Generator| {
        let start = Instant::now();
        std::thread::sleep(Duration::from_micros(random.below(2000)));
        // The system may wake a thread later than asked.
        start.elapsed().as_secs_f64()
    };
    let loader = loader(Samples(count, wait), (workers, prefetch_factor, 16))?;
    let (start, mut waited) = (Instant::now(), 0.);
    for batch in &loader {
        waited += batch?.into_iter().sum::<f64>();
    }
    Ok(waited / start.elapsed().as_secs_f64() / workers.max(1) as f64)
}

/// A sample that is counted as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Batch for Counted {
    fn map_tensors(self, _: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The largest number of batches that were alive, not counting the one that the program had, and its bound.
fn read_ahead(workers: usize, prefetch_factor: usize, count: usize) -> Result<(usize, usize)> {
    const BATCH: usize = 16;
    let alive = Arc::new(AtomicUsize::new(0));
    let read = {
        let alive = alive.clone();
        move |_, _: &mut Generator| {
            alive.fetch_add(1, Ordering::Relaxed);
            Counted(alive.clone())
        }
    };
    let loader = loader(Samples(count, read), (workers, prefetch_factor, BATCH))?;
    let mut most = 0;
    for batch in &loader {
        let batch = batch?;
        std::thread::sleep(Duration::from_millis(2));
        most = most.max(alive.load(Ordering::Relaxed) - batch.len());
    }
    Ok((most.div_ceil(BATCH), workers * prefetch_factor + workers))
}
