//! A step under virtual ranks, as a program takes it: one backward pass for each micro-batch.
use super::{DistributedDataParallel, backward, micro_batch};
use crate::Result;
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use std::ops::Range;

impl<M> DistributedDataParallel<M> {
    /// Computes the gradients of the micro-batch `number` under [virtual ranks](crate::DdpOptions::virtual_ranks). In each step,
    /// a rank calls it for its [`micro_batches`](Self::micro_batches), in their order. The last one returns the mean
    /// gradients over all micro-batches of all ranks, for the optimizer's step, and the others None. The mean has the same
    /// bits on any number of ranks.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
    /// # use candle_ddp::data::{DataLoader, LoaderOptions, TensorDataset};
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(3, |pg| {
    /// # let data = TensorDataset::new(Tensor::ones((64, 4), DType::F32, pg.device())?)?;
    /// let options = DdpOptions { virtual_ranks: Some(8), ..Default::default() };
    /// let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
    /// let mut optimizer = Sgd::new(&ddp, ParamsSgd::default())?;
    /// let options = LoaderOptions { batch_size: 4, virtual_ranks: Some(8), ..Default::default() };
    /// let loader = DataLoader::new(data, &pg, options)?;
    /// for micro_batch in loader.micro_batches()? {
    ///     let micro_batch = micro_batch?;
    ///     let loss = ddp.forward(&micro_batch.batch)?.sqr()?.mean_all()?;
    ///     if let Some(grads) = ddp.backward_micro_batch(&loss, micro_batch.number)? {
    ///         optimizer.step(&grads)?;
    ///     }
    /// }
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The store has gradients of the model's parameters only. While the last micro-batch's backward pass runs, the buckets
    /// are sent.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward). [`Error::InvalidArgument`](crate::Error::InvalidArgument) for another number than
    /// the next one, without virtual ranks, and under [`no_sync`](Self::no_sync); the group then ends on all ranks.
    pub fn backward_micro_batch(&self, loss: &Tensor, number: usize) -> Result<Option<GradStore>> {
        backward::run_micro_batch(loss, &self.core, number)
    }

    /// The numbers of the micro-batches that this rank computes in each step, under
    /// [virtual ranks](crate::DdpOptions::virtual_ranks). None without.
    pub fn micro_batches(&self) -> Option<Range<usize>> {
        self.core.reducer.micro_batches()
    }

    /// Returns a number of every micro-batch of a step, such as its loss, in the order of the micro-batches, under
    /// [virtual ranks](crate::DdpOptions::virtual_ranks). `own` are those of this rank's
    /// [`micro_batches`](Self::micro_batches). A sum or a mean of the result has the same bits on any number of ranks, while the
    /// order in which
    /// [`all_reduce_scalars`](crate::ProcessGroup::all_reduce_scalars) adds depends on the ranks. Every rank must call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank if one gives another number of values than it has
    /// micro-batches; without virtual ranks; errors of the group.
    pub fn gather_micro_batches(&self, own: &[f64]) -> Result<Vec<f64>> {
        micro_batch::gather(&self.core, own)
    }
}
