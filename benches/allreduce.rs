//! All-reduce of gradient buckets between two ranks, with the sizes of DistributedDataParallel's first bucket (1 MiB)
//! and its other buckets (25 MiB), and one in between.
//!
//! ```text
//! cargo bench --bench allreduce
//! ```
//!
//! The ranks are threads of one process; the example `allreduce` measures processes, other collectives and all sizes.
//! Without `--bench` (as under `cargo test`), each size is all-reduced once as a smoke test.
use candle_core::{DType, Tensor};
use candle_ddp::{ProcessGroup, ReduceOp, Result, spawn};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::time::{Duration, Instant};

const MIB: [usize; 3] = [1, 4, 25];
const RANKS: usize = 2;

fn all_reduce(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("all_reduce f32, 2 ranks");
    for mib in MIB {
        let bytes = mib << 20;
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{mib} MiB")), |bencher| {
            bencher.iter_custom(|iterations| match spawn(RANKS, |pg| time(&pg, bytes, iterations)) {
                Ok(times) => times.into_iter().max().unwrap_or_default(),
                Err(error) => panic!("the ranks failed: {error}"),
            });
        });
    }
    group.finish();
}

/// Returns the duration of `iterations` all-reduces of `bytes` bytes on this rank.
fn time(pg: &ProcessGroup, bytes: usize, iterations: u64) -> Result<Duration> {
    let bucket = Tensor::ones(bytes / DType::F32.size_in_bytes(), DType::F32, pg.device())?;
    // The first call touches the memory for the first time.
    pg.all_reduce(&bucket, ReduceOp::Sum)?;
    pg.barrier()?;
    let start = Instant::now();
    for _ in 0..iterations {
        pg.all_reduce(&bucket, ReduceOp::Sum)?;
    }
    Ok(start.elapsed())
}

criterion_group!(benches, all_reduce);
criterion_main!(benches);
