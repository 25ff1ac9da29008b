//! A step under virtual ranks, as a program takes it: one backward pass for each micro-batch.
use super::{DistributedDataParallel, DistributedModel, backward, micro_batch};
use crate::Result;
use crate::panic::lock;
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use std::ops::Range;

/// [`DistributedDataParallel::backward_micro_batch`] for a loss that depends on several models of one group, with the same
/// [virtual ranks](crate::DdpOptions::virtual_ranks): [`backward`](crate::backward()) of their micro-batch `number`.
///
/// # Errors
/// Those of `DistributedDataParallel::backward_micro_batch` and of `backward`.
pub fn backward_micro_batch(loss: &Tensor, models: &[&DistributedModel], number: usize) -> Result<Option<GradStore>> {
    backward::run_micro_batch(loss, models, number, None)
}

/// Like [`backward_micro_batch`], for a loss that is a sum over `count` samples of the micro-batch: see
/// [`DistributedDataParallel::backward_micro_batch_weighted`].
///
/// # Errors
/// Those of `DistributedDataParallel::backward_micro_batch_weighted` and of `backward`.
pub fn backward_micro_batch_weighted(
    loss_sum: &Tensor,
    models: &[&DistributedModel],
    number: usize,
    count: f64,
) -> Result<Option<GradStore>> {
    backward::run_micro_batch(loss_sum, models, number, Some(count))
}

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
        backward::run_micro_batch(loss, &[&self.core], number, None)
    }

    /// Like [`backward_micro_batch`](Self::backward_micro_batch), for a loss that is a sum over `count` samples of the micro-batch:
    /// the gradients are those of the mean over all samples of the step, as in [`backward_weighted`](Self::backward_weighted).
    ///
    /// # Errors
    /// Those of `backward_micro_batch` and of `backward_weighted`.
    pub fn backward_micro_batch_weighted(
        &self,
        loss_sum: &Tensor,
        number: usize,
        count: f64,
    ) -> Result<Option<GradStore>> {
        backward::run_micro_batch(loss_sum, &[&self.core], number, Some(count))
    }

    /// The numbers of the micro-batches that this rank computes in each step, under
    /// [virtual ranks](crate::DdpOptions::virtual_ranks). None without.
    pub fn micro_batches(&self) -> Option<Range<usize>> {
        self.core.reducer.micro_batches()
    }

    /// How many micro-batches this rank computes per second, from forward to backward pass, on the average since the first step:
    /// for [`share_by_speed`](crate::ProcessGroup::share_by_speed). None before the second step, without
    /// [virtual ranks](crate::DdpOptions::virtual_ranks), and on a GPU, where passes end after their calls.
    pub fn micro_batches_per_second(&self) -> Option<f64> {
        let pace = lock(&self.core.pace);
        pace.per_second().filter(|_| self.core.group().device().is_cpu())
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
