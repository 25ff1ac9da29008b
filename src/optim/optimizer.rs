//! What all optimizers can do.
use super::rule::not_negative;
use crate::amp::GradScaler;
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::state::file::{WriteJob, read_safetensors};
use crate::state::{Dict, StateDict};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use std::path::Path;

/// An optimizer: [`FusedOptimizer`](super::FusedOptimizer) (AdamW, Adam, SGD, LAMB) and
/// [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer). A program that chooses one at run time keeps it in a
/// `Box<dyn Optimizer>`:
///
/// ```
/// # use candle_core::{DType, Tensor};
/// # use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
/// # use candle_ddp::{DdpOptions, DistributedDataParallel, Result};
/// # use candle_nn::{VarMap, linear};
/// # fn main() -> Result<()> {
/// # let zero = true;
/// # candle_ddp::spawn(2, |pg| {
/// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, |vb| linear(4, 2, vb), DdpOptions::default())?;
/// let params = ParamsAdamW::default();
/// let mut optimizer: Box<dyn Optimizer> = match zero {
///     true => Box::new(ZeroRedundancyOptimizer::new(&ddp, params)?),
///     false => Box::new(AdamW::from_named(ddp.named_parameters(), params)?),
/// };
/// # let x = Tensor::randn(0f32, 1.0, (8, 4), pg.device())?;
/// # let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
/// let mut grads = ddp.backward(&loss)?;
/// optimizer.clip_grad_norm(&mut grads, 1.0)?;
/// optimizer.step(&grads)?;
/// # Ok(())
/// # })?;
/// # Ok(())
/// # }
/// ```
///
/// Schedules and [`GradScaler::step`] take it as well. All of its calls may communicate: every rank makes them.
///
/// candle's trait of this name is another one, which fused optimizers also implement; where both are in scope, import one of
/// them `as _` or not at all. candle's own optimizers do not implement this trait, since they keep their states and
/// parameters to themselves.
pub trait Optimizer: StateDict {
    /// Updates every parameter that has a gradient in `grads`, which is what `backward` returned.
    ///
    /// # Errors
    /// A gradient that does not fit its parameter ([`Error::Parameter`]); the device's; with
    /// [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer) also those that are listed there.
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// The learning rate of each group of parameters.
    fn learning_rates(&self) -> Vec<f64>;

    /// Changes the learning rate of each group of parameters.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are not as many as groups, or one is negative or not finite.
    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()>;

    /// The learning rate of the first group; 0 without any.
    fn learning_rate(&self) -> f64 {
        self.learning_rates().first().copied().unwrap_or(0.)
    }

    /// Gives all groups the same learning rate.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it is negative or not finite.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.set_learning_rates(&vec![learning_rate; self.learning_rates().len()])
    }

    /// Scales the gradients of all parameters of the optimizer down if their L2 norm, over all of them together, is above
    /// `max_norm`; returns the norm that they had: PyTorch's `clip_grad_norm_`. For between `backward` and
    /// [`step`](Self::step); after [`unscale`](Self::unscale), if there is a [`GradScaler`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a negative or NaN `max_norm`, and where no parameter has a gradient.
    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<f64>;

    /// Divides the gradients by the scale of `scaler`, and returns whether all are finite, on all ranks: PyTorch's
    /// `unscale_`. For a look at the gradients, or clipping, before [`GradScaler::step`], which otherwise does it itself.
    ///
    /// # Errors
    /// As with [`GradScaler::unscale`].
    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<bool> {
        scaler.unscale(grads)
    }

    /// Writes the state to one safetensors file. Every rank of `group` calls it, rank 0 writes. As with
    /// [`save_distributed`](crate::checkpoint::save_distributed), what was there before is replaced only once all ranks
    /// have confirmed that everything went well, and writing may take longer than the group's time-out. The file depends
    /// neither on the number of ranks nor on whether the states were spread over them.
    ///
    /// # Errors
    /// On every rank: rank 0 gets its own error, the others [`Error::RankFailed`] with its text; or the failure of the
    /// group.
    fn save_distributed(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let write = || WriteJob::new(path, &self.state_dict()?);
        let job = (group.rank() == 0).then(write).transpose();
        Label::OPTIMIZER_SAVE.during(|| group.write_together(job))
    }

    /// Every rank reads what [`save_distributed`](Self::save_distributed) wrote, or [`StateDict::save`].
    ///
    /// # Errors
    /// On every rank, if the file of one cannot be read or does not fit: that rank gets its own error, the others
    /// [`Error::RankFailed`].
    fn load_distributed(&mut self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let dict = Label::OPTIMIZER_LOAD.during(|| group.agree(read_safetensors(path)))?;
        let loaded = self.load_state_dict(&dict);
        Label::OPTIMIZER_LOAD.during(|| group.agree(loaded))
    }
}

/// There must be one for each of the `groups`.
pub(super) fn check_learning_rates(learning_rates: &[f64], groups: usize) -> Result<()> {
    learning_rates.iter().try_for_each(|learning_rate| not_negative("learning_rates", *learning_rate))?;
    if learning_rates.len() == groups {
        return Ok(());
    }
    Err(Error::invalid("learning_rates", format!("{} were given for {groups} groups", learning_rates.len())))
}

impl<O: StateDict + ?Sized> StateDict for Box<O> {
    fn state_dict(&self) -> Result<Dict> {
        (**self).state_dict()
    }

    fn load_state_dict(&mut self, state: &Dict) -> Result<()> {
        (**self).load_state_dict(state)
    }
}

/// So that `&mut optimizer` can be given to schedules and scalers, whether it is boxed or not.
impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        (**self).step(grads)
    }

    fn learning_rates(&self) -> Vec<f64> {
        (**self).learning_rates()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        (**self).set_learning_rates(learning_rates)
    }

    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        (**self).clip_grad_norm(grads, max_norm)
    }

    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<bool> {
        (**self).unscale(scaler, grads)
    }

    fn save_distributed(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        (**self).save_distributed(group, path)
    }

    fn load_distributed(&mut self, group: &ProcessGroup, path: &Path) -> Result<()> {
        (**self).load_distributed(group, path)
    }
}

impl GradScaler {
    /// Has `optimizer` divide the gradients, unless [`unscale`](Self::unscale) or [`Optimizer::unscale`] has, and step with
    /// them if all are finite on all ranks. Returns whether it did.
    ///
    /// # Errors
    /// A second call in the same step ([`Error::GradScaler`]), and those of `unscale` and of the optimizer's step.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized), grads: &mut GradStore) -> Result<bool> {
        if self.is_scaled() {
            optimizer.unscale(self, grads)?;
        }
        self.step_with(grads, |grads| optimizer.step(grads))
    }
}
