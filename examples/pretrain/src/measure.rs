//! How fast the data is read, and how fast it is consumed.
use crate::data::{TokenBatch, Tokens};
use candle_ddp::data::DataLoader;
use candle_ddp::{ProcessGroup, ReduceOp, Result};
use std::time::Instant;

/// Reads `batches` batches on each rank, and returns the tokens of all ranks per second. Every rank calls it.
///
/// # Errors
/// The errors of the batches and of the group.
pub(crate) fn measure(pg: &ProcessGroup, loader: &DataLoader<Tokens, TokenBatch>, batches: usize) -> Result<f64> {
    // All ranks begin together.
    pg.all_reduce_scalars([0.], ReduceOp::Sum)?;
    let (mut read, mut tokens, began) = (0, 0, Instant::now());
    for epoch in 0.. {
        for batch in loader.epoch(epoch).take(batches - read) {
            (read, tokens) = (read + 1, tokens + batch?.count());
        }
        if read >= batches {
            break;
        }
    }
    let [tokens] = pg.all_reduce_scalars([tokens as f64], ReduceOp::Sum)?;
    let [seconds] = pg.all_reduce_scalars([began.elapsed().as_secs_f64()], ReduceOp::Max)?;
    Ok(tokens / seconds)
}

/// Compares that rate with the one of training.
pub(crate) fn compare(reading: f64, training: f64) -> String {
    format!(
        "data: {reading:.0} tokens/s are read, {:.1} times as fast as the {training:.0} tokens/s that the steps consume",
        reading / training
    )
}
