use candle_core::Tensor;
use candle_ddp::optim::Optimizer;
use candle_ddp::{DistributedDataParallel, ProcessGroup, ReduceOp, Result};

/// Whether something is `bad` on any rank. Every rank calls it, and all get the same answer.
fn on_any_rank(pg: &ProcessGroup, bad: bool) -> Result<bool> {
    Ok(pg.all_reduce_scalars([f64::from(bad)], ReduceOp::Max)?[0] > 0.0)
}

/// Makes a step with each of this rank's batches, unless one of the ranks has an error in place of its batch, or a loss that is not
/// finite. Returns the number of steps that all ranks have skipped.
fn train<M>(
    ddp: &DistributedDataParallel<M>,
    optimizer: &mut impl Optimizer,
    batches: impl IntoIterator<Item = Result<Tensor>>,
    loss: impl Fn(&M, &Tensor) -> Result<Tensor>,
) -> Result<usize> {
    let pg = ddp.process_group();
    let mut skipped = 0;
    for batch in batches {
        // Before the forward pass: a SyncBatchNorm would wait in it for a rank that has no batch.
        if on_any_rank(pg, batch.is_err())? {
            skipped += 1;
            continue;
        }
        let batch = batch?;
        let copy = |(_, buffer): (String, candle_core::Var)| Ok((buffer.copy()?, buffer));
        let before = ddp.named_buffers().into_iter().map(copy).collect::<Result<Vec<_>>>()?;
        let loss = ddp.call(|model| loss(model, &batch))?;
        let is_finite = loss.to_scalar::<f32>()?.is_finite();
        if on_any_rank(pg, !is_finite)? {
            // Batch norms have added this batch to their running statistics.
            before.iter().try_for_each(|(value, buffer)| buffer.set(value))?;
            skipped += 1;
            continue;
        }
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    Ok(skipped)
}
