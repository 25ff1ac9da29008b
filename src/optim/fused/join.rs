//! Steps while some ranks are out of inputs: these still own shards and must update them.
use super::sharded::Sharded;
use super::{FusedOptimizer, OPTIMIZER_NORM, OPTIMIZER_STEP};
use crate::ddp::{DistributedDataParallel, JoinOptions, Joined, gradients::scaled};
use crate::optim::clip::NormType;
use crate::optim::rule::UpdateRule;
use crate::process_group::{Active, Operation};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

impl<R: UpdateRule> FusedOptimizer<R> {
    /// [`DistributedDataParallel::join`] of the model that this optimizer trains. Under sharding, a rank without inputs also updates its
    /// part of the parameters in the steps of the others, with their learning rates. PyTorch's
    /// `with Join([model, optimizer]):`.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel, JoinOptions, Sharding};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # candle_ddp::spawn(2, |pg| {
    /// # let build = |vb| linear(4, 2, vb);
    /// # let options = DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..Default::default() };
    /// # let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
    /// # let batches = vec![Tensor::ones((8, 4), DType::F32, pg.device())?; 3 + pg.rank()];
    /// let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
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
    /// The errors of `DistributedDataParallel::join`, and under sharding [`Error::InvalidArgument`] if `ddp` is not the optimizer's
    /// model.
    pub fn join<M, T>(
        &mut self,
        ddp: &DistributedDataParallel<M>,
        options: JoinOptions,
        body: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Joined<T>> {
        let Some(sharded) = &self.sharded else { return ddp.join(options, || body(self)) };
        if !std::sync::Arc::ptr_eq(&sharded.reducer, &ddp.reducer()) {
            return Err(Error::invalid("ddp", "it must be the model that this optimizer trains"));
        }
        ddp.join_with(options, self, body, Self::shadow)
    }

    /// Takes part in an operation of the ranks that have inputs. Returns false for an operation of the model alone.
    fn shadow(&mut self, operation: Operation, active: &Active) -> Result<bool> {
        let Some(sharded) = &self.sharded else { return Ok(false) };
        match operation {
            Operation::Backward { .. } => return Ok(false),
            Operation::Step => {
                let result = self
                    .take_over(active)
                    .and_then(|()| OPTIMIZER_STEP.during(|| self.apply(&GradStore::default(), None)));
                self.sharded.iter().for_each(|sharded| sharded.end_on_error(&result));
                result?;
            }
            Operation::ClipGradNorm => {
                let pending = sharded.reducer.pending()?;
                OPTIMIZER_NORM.during(|| sharded.norm(&pending))?;
            }
            Operation::Unscale => {
                let pending = sharded.reducer.pending()?;
                let overflow = !sharded.norm_here(&pending, NormType::Inf)?.is_finite();
                scaled::share_verdict(sharded.process_group(), [overflow, false])?;
            }
        }
        Ok(true)
    }

    /// Announces a step, inside of a join, and gives the ranks without inputs what they need for it.
    pub(super) fn lead_step(&self, sharded: &Sharded) -> Result<()> {
        match sharded.process_group().announce(Operation::Step)? {
            Some(active) => self.settings_of(sharded, active.root()).map(drop),
            None => Ok(()),
        }
    }

    /// Copies the settings of a rank with inputs: its learning rates, and the factor by which it scaled and clipped its
    /// gradients.
    fn take_over(&mut self, active: &Active) -> Result<()> {
        let Some(sharded) = &self.sharded else { return Ok(()) };
        let settings = self.settings_of(sharded, active.root())?;
        sharded.reducer.scale_pending(settings[0] / sharded.reducer.pending()?.scale)?;
        for (options, learning_rate) in self.options.iter_mut().zip(&settings[1..]) {
            options.set_learning_rate(*learning_rate);
        }
        Ok(())
    }

    /// Returns rank `root`'s factor of the gradients, followed by its learning rates.
    fn settings_of(&self, sharded: &Sharded, root: usize) -> Result<Vec<f64>> {
        let mut own = vec![sharded.reducer.pending()?.scale];
        own.extend(self.options.iter().map(R::learning_rate));
        let settings = Tensor::new(own, sharded.process_group().device())?;
        OPTIMIZER_STEP.during(|| sharded.process_group().broadcast_async(&settings, root)?.synchronize())?;
        Ok(settings.to_vec1()?)
    }
}
