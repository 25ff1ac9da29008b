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
use std::time::Instant;

const MIB: [usize; 3] = [1, 4, 25];
const RANKS: usize = 2;

fn main() -> Result<()> {
    // Other arguments are meant for cargo test's own harness.
    let measure = std::env::args().any(|argument| argument == "--bench");
    println!("all_reduce f32, {RANKS} ranks: median, and the middle half of the calls");
    for mib in MIB {
        let bytes = mib << 20;
        let calls = if measure { 2000 / mib } else { 1 };
        let ranks = spawn(RANKS, |pg| seconds(&pg, bytes, calls))?;
        // A call is over when it is on all ranks.
        let mut slowest: Vec<f64> =
            (0..calls).map(|call| ranks.iter().map(|rank| rank[call]).fold(0.0, f64::max)).collect();
        slowest.sort_by(f64::total_cmp);
        let [quarter, half, rest] = [1, 2, 3].map(|part| slowest[part * (calls - 1) / 4]);
        let rate = bytes as f64 / half / 1e9;
        println!("{mib:>3} MiB: {:.0} us ({:.0} to {:.0}), {rate:.1} GB/s", half * 1e6, quarter * 1e6, rest * 1e6);
    }
    Ok(())
}

/// Returns the durations, in seconds, of `calls` all-reduces of `bytes` bytes on this rank.
fn seconds(pg: &ProcessGroup, bytes: usize, calls: usize) -> Result<Vec<f64>> {
    let bucket = Tensor::zeros(bytes / DType::F32.size_in_bytes(), DType::F32, pg.device())?;
    // The first call touches the memory for the first time.
    pg.all_reduce(&bucket, ReduceOp::Sum)?;
    let mut seconds = Vec::with_capacity(calls);
    for _ in 0..calls {
        pg.barrier()?;
        let start = Instant::now();
        pg.all_reduce(&bucket, ReduceOp::Sum)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(seconds)
}
