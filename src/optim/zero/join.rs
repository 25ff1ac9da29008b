//! Steps while some ranks are out of inputs: these still own shards and must update them.
use super::ZeroRedundancyOptimizer;
use crate::backend::label;
use crate::ddp::{DistributedDataParallel, JoinOptions, Joined, scaled};
use crate::optim::clip::NormType;
use crate::optim::rule::UpdateRule;
use crate::process_group::{Active, Operation};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// [`DistributedDataParallel::join`] of the model that this optimizer trains. A rank without inputs also updates its
    /// part of the parameters in the steps of the others, with their learning rates. PyTorch's
    /// `with Join([model, optimizer]):`.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel, JoinOptions, Sharding};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let build = |vb| linear(4, 2, vb);
    /// # let options = DdpOptions { sharding: Sharding::Optimizer, ..Default::default() };
    /// # let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
    /// # let batches = vec![Tensor::ones((8, 4), DType::F32, pg.device())?; 3 + pg.rank()];
    /// let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
    /// optimizer.join(&ddp, JoinOptions::default(), |optimizer| {
    ///     for x in &batches {
    ///         let grads = ddp.backward(&ddp.forward(x)?.sqr()?.mean_all()?)?;
    ///         optimizer.step(&grads)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns those of `DistributedDataParallel::join`, and [`Error::InvalidArgument`] if `ddp` is not the optimizer's
    /// model.
    pub fn join<M, T>(
        &mut self,
        ddp: &DistributedDataParallel<M>,
        options: JoinOptions,
        body: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Joined<T>> {
        if !std::sync::Arc::ptr_eq(&self.reducer, &ddp.reducer()) {
            return Err(Error::invalid("ddp", "it must be the model that this optimizer trains"));
        }
        ddp.join_with(options, self, body, Self::shadow)
    }

    /// Takes part in an operation of the ranks that have inputs. Returns false for an operation of the model alone.
    fn shadow(&mut self, operation: Operation, active: &Active) -> Result<bool> {
        match operation {
            Operation::Backward { .. } => return Ok(false),
            Operation::Step => {
                let result = self
                    .take_over(active)
                    .and_then(|()| label::ZERO_STEP.during(|| self.update(&GradStore::default())));
                self.end_on_error(&result);
                result?;
            }
            Operation::ClipGradNorm => {
                let pending = self.reducer.pending()?;
                label::ZERO_NORM.during(|| self.norm(&pending))?;
            }
            Operation::Unscale => {
                let pending = self.reducer.pending()?;
                let overflow = !self.norm_here(&pending, NormType::Inf)?.is_finite();
                scaled::share_verdict(&self.process_group, [overflow, false])?;
            }
        }
        Ok(true)
    }

    /// Announces a step, inside of a join, and gives the ranks without inputs what they need for it.
    pub(super) fn lead_step(&self) -> Result<()> {
        match self.process_group.announce(Operation::Step)? {
            Some(active) => self.settings_of(active.root()).map(drop),
            None => Ok(()),
        }
    }

    /// Copies the settings of a rank with inputs: its learning rates, and the factor by which it scaled and clipped its
    /// gradients.
    fn take_over(&mut self, active: &Active) -> Result<()> {
        let settings = self.settings_of(active.root())?;
        self.reducer.scale_pending(settings[0] / self.reducer.pending()?.scale)?;
        for (options, learning_rate) in self.options.iter_mut().zip(&settings[1..]) {
            options.set_learning_rate(*learning_rate);
        }
        Ok(())
    }

    /// Returns rank `root`'s factor of the gradients, followed by its learning rates.
    fn settings_of(&self, root: usize) -> Result<Vec<f64>> {
        let mut own = vec![self.reducer.pending()?.scale];
        own.extend(self.options.iter().map(R::learning_rate));
        let settings = Tensor::new(own, self.process_group.device())?;
        label::ZERO_STEP.during(|| self.process_group.broadcast_async(&settings, root)?.synchronize())?;
        Ok(settings.to_vec1()?)
    }
}
