//! A backward pass with the optimizer's step, some buckets at a time.
use super::optimizer::Optimizer;
use crate::Result;
use crate::ddp::{DistributedDataParallel, backward_in_parts};
#[cfg(doc)]
use crate::{Backward, Error, OnNonFinite, backward_with};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

impl<M> DistributedDataParallel<M> {
    /// [`backward`](Self::backward) and the optimizer's step in one call, with the same bits: each bucket's parameters are updated
    /// as soon as its gradients are averaged, while later buckets are still being reduced. PyTorch's `_apply_optimizer_in_backward`
    /// and `_register_fused_optim`.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::DistributedDataParallel;
    /// # use candle_ddp::optim::{AdamW, ParamsAdamW};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 2, vb))?;
    /// # let batches = vec![Tensor::ones((8, 4), DType::F32, pg.device())?; 3];
    /// let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    /// for x in &batches {
    ///     let loss = ddp.forward(x)?.sqr()?.mean_all()?;
    ///     ddp.backward_and_step(&loss, &mut optimizer)?;
    /// }
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// This overlaps the step with the part of the reduction that outlasts the backward pass, which is long if the last gradients are
    /// large, as an embedding's are, or if the network is slow. The gradients end with the step. Two calls are needed for clipping
    /// and a [`GradScaler`](crate::amp::GradScaler), for [`Backward::count`], and for several models ([`backward_with`]).
    ///
    /// Returns true if it made the step in such parts. Some passes update all parameters at their end, since an earlier update could be
    /// wrong, and return false:
    /// - the first synchronised one, which shows whether all parameters are used, and those in which the ranks
    ///   [compare](crate::DdpOptions::replica_check) their models;
    /// - with an [`OnNonFinite`] other than `Ignore`;
    /// - with [LAMB](crate::optim::ParamsLamb)'s `max_grad_norm`, and with an optimizer that is not a
    ///   [`FusedOptimizer`](crate::optim::FusedOptimizer), or whose model is [sharded](crate::Sharding);
    /// - with a [communication hook](crate::comm_hook).
    ///
    /// Ranks send the same messages as with two calls, so some ranks may make one call and others two. In a [trace](crate::trace), the
    /// step is the phase "optimizer".
    ///
    /// # Errors
    /// Returns the errors of `backward` and of the optimizer's [`step`](Optimizer::step). Before anything is sent:
    /// [`Error::InvalidArgument`] under [`no_sync`](Self::no_sync), and [`Error::GradScaler`] for a loss that a scaler has scaled.
    ///
    /// **After an error in the middle, such as the death of a rank, some parameters have made the step and others have not.** The
    /// optimizer then refuses further steps, also after it was saved and loaded: go back to a checkpoint from before, of model and
    /// optimizer. [`elastic::run`](crate::elastic::run) does so by itself. An error of the optimizer ends the group, since the other
    /// ranks may have made the step. (After an error of `backward`, on the other hand, the parameters are as they were.)
    #[track_caller]
    pub fn backward_and_step(&self, loss: &Tensor, optimizer: &mut (impl Optimizer + ?Sized)) -> Result<bool> {
        let (takes_parts, mut is_begun) = (optimizer.takes_parts()?, false);
        let mut step = |grads: &GradStore| {
            is_begun = true;
            self.phase("optimizer", || optimizer.step_part(grads, false))
        };
        let rest = backward_in_parts(self, loss, takes_parts.then_some(&mut step))?;
        self.phase("optimizer", || if is_begun { optimizer.step_part(&rest, true) } else { optimizer.step(&rest) })?;
        Ok(is_begun)
    }
}
