//! Several messages in one call.
use super::{ProcessGroup, graph};
use crate::Result;
use crate::backend::{CallSite, P2pOp, Work};
use std::panic::Location;

impl ProcessGroup {
    /// Starts several messages together, without waiting; the returned work is complete when all are. Only the ranks that
    /// take part call it. Two ranks may name their messages in any order, but those from one rank to another arrive in the
    /// order in which they are sent. What is sent in a batch must be received in a batch.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use candle_ddp::{P2pOp, ProcessGroup, Result};
    ///
    /// /// Receives the tensor of the rank before this one, in a ring.
    /// fn shift(pg: &ProcessGroup, own: &Tensor) -> Result<Tensor> {
    ///     let (rank, world_size) = (pg.rank(), pg.world_size());
    ///     let received = own.zeros_like()?;
    ///     let send = P2pOp::Send { tensor: own.clone(), peer: (rank + 1) % world_size };
    ///     let recv = P2pOp::Recv { tensor: received.clone(), peer: (rank + world_size - 1) % world_size };
    ///     pg.batch_isend_irecv(&[send, recv])?.wait()?;
    ///     Ok(received)
    /// }
    ///
    /// # fn main() -> Result<()> {
    /// candle_ddp::spawn(3, |pg| {
    ///     let received = shift(&pg, &Tensor::new(pg.rank() as u32, pg.device())?)?;
    ///     assert_eq!(received.to_scalar::<u32>()? as usize, (pg.rank() + 2) % 3);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// With NCCL, as in PyTorch, a batch is a single kernel, and runs on the communicator and the stream of the collectives:
    /// after the collectives and batches that its rank has started before, and before those that follow. So the ranks of a
    /// batch must have the same collectives before it. With the CPU engines, it is independent of the collectives.
    ///
    /// # Errors
    /// The errors of [`isend`](Self::isend) and [`irecv`](Self::irecv), and [`Error::InvalidTensor`](crate::Error::InvalidTensor)
    /// if a tensor that is received overlaps another one of the batch. If a message is refused, none is sent.
    #[track_caller]
    pub fn batch_isend_irecv(&self, batch: &[P2pOp]) -> Result<Work> {
        if batch.is_empty() {
            self.failed()?;
        }
        graph::check_batch(self.rank(), batch)?;
        P2pOp::check(batch, self.rank(), self.world_size(), self.device())?;
        let started = CallSite::during(Location::caller(), || self.0.communicator.start_batch(batch.to_vec()));
        Ok(self.0.place.noting(started.map_err(|error| self.note(error))?))
    }
}
