//! The interface of all optimizers.
use super::rule::not_negative;
use super::shards;
use crate::amp::GradScaler;
use crate::backend::Purpose;
use crate::placement::Placement;
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use crate::state::{self, Dict, KIND, Loader, PART_OF, Saved, StateDict};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_ddp_state::weights::LoadReport;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

pub(super) static OPTIMIZER_SAVE: Purpose = Purpose::of("Optimizer::save_distributed");
static OPTIMIZER_LOAD: Purpose = Purpose::of("Optimizer::load_distributed");

/// An optimizer: [`FusedOptimizer`](super::FusedOptimizer) (AdamW, Adam, SGD, LAMB, Muon) or one of your own. A program that chooses one
/// at run time can use a `Box<dyn Optimizer>`:
///
/// ```
/// # use candle_core::{DType, Tensor};
/// # use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsSgd, Sgd};
/// # use candle_ddp::{DistributedDataParallel, Result};
/// # use candle_nn::{VarMap, linear};
/// # fn main() -> Result<()> {
/// # let name = "adamw";
/// # candle_ddp::spawn(2, |pg| {
/// # let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 2, vb))?;
/// let mut optimizer: Box<dyn Optimizer> = match name {
///     "adamw" => Box::new(AdamW::new(&ddp, ParamsAdamW::default())?),
///     _ => Box::new(Sgd::new(&ddp, ParamsSgd::default())?),
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
/// Schedules and [`GradScaler::step`] accept it too. All of its methods may communicate, so every rank must call them.
///
/// candle has another trait of this name, which fused optimizers also implement; if both are in scope, import one of
/// them `as _` or not at all. candle's own optimizers cannot implement this trait, since their state and parameters are
/// private.
pub trait Optimizer: StateDict {
    /// Updates every parameter that has a gradient in `grads`, the result of `backward`.
    ///
    /// # Errors
    /// Returns [`Error::Parameter`] for a gradient that does not fit its parameter, or is this rank's sum of passes under
    /// [`no_sync`](crate::DistributedDataParallel::no_sync); an error of the device; and for a sharded model also those of
    /// [`FusedOptimizer`](super::FusedOptimizer).
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// The learning rate of each group of parameters.
    fn learning_rates(&self) -> Vec<f64>;

    /// Changes the learning rate of each group of parameters.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if their number differs from the number of groups, or if one is negative or not
    /// finite.
    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()>;

    /// The learning rate of the first group; 0 without groups.
    fn learning_rate(&self) -> f64 {
        self.learning_rates().first().copied().unwrap_or(0.)
    }

    /// Gives all groups the same learning rate.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is negative or not finite.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        self.set_learning_rates(&vec![learning_rate; self.learning_rates().len()])
    }

    /// Scales down the gradients of all parameters of the optimizer if their common L2 norm is above `max_norm`, and
    /// returns the norm that they had, a scalar in f64: PyTorch's `clip_grad_norm_`. A GPU need not wait for the program, nor the program
    /// for it, unless it reads the norm, by `norm.to_scalar::<f64>()?`. [Ignored](crate::Role::Ignored) parameters are scaled too, and
    /// do not count in the norm. Call it between `backward` and
    /// [`step`](Self::step), and with a [`GradScaler`] after [`unscale`](Self::unscale).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a negative or NaN `max_norm`, or if no parameter has a gradient.
    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<Tensor>;

    /// Divides the gradients by the scale of `scaler`: PyTorch's `unscale_`. Use it to inspect or clip gradients before
    /// [`GradScaler::step`], which otherwise does this itself.
    ///
    /// # Errors
    /// Returns the errors of [`GradScaler::unscale`].
    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        scaler.unscale(grads)
    }

    /// The step of [`GradScaler::step`]. An optimizer whose kernels can leave out a step by themselves does not wait for the verdict.
    #[doc(hidden)]
    fn step_scaled(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        scaler.step_on_host(self, grads)
    }

    /// Whether it may step some parameters before the gradients of the others are known, by [`step_part`](Self::step_part).
    ///
    /// # Errors
    /// Returns the error of an optimizer that can make no step.
    #[doc(hidden)]
    fn takes_parts(&self) -> Result<bool> {
        Ok(false)
    }

    /// Makes a part of a step, which ends with the last part: each parameter has its gradient in one of them.
    #[doc(hidden)]
    fn step_part(&mut self, grads: &GradStore, _is_last: bool) -> Result<()> {
        self.step(grads)
    }

    /// Loads what a state has of this optimizer's parameters, by name, and reports which were loaded, are missing from the state, or are
    /// unexpected, since the optimizer does not train them: for a state that was saved
    /// with fewer or more trained parameters, before layers were thawed or frozen. Parameters that the state does not know
    /// keep the state that they have, which is none in a new optimizer. The learning rates stay as they are, since the groups
    /// may be others. [`load_state_dict`](StateDict::load_state_dict) takes only a state of the same parameters. Gradients end
    /// here, as there. The parts that ranks have saved under [sharding](crate::Sharding) may be
    /// together in one map.
    ///
    /// # Errors
    /// The errors of `load_state_dict` for a state of another kind of optimizer, or of a parameter of another shape.
    /// Nothing is changed then.
    fn load_known(&mut self, state: &HashMap<String, Tensor>) -> Result<LoadReport> {
        let mut own = self.state_dict()?;
        let state = &*joined(state, &own)?;
        let names = |dict: &HashMap<String, Tensor>| dict.keys().filter_map(|key| parameter(key)).collect();
        let (mine, theirs): (BTreeSet<String>, BTreeSet<String>) = (names(&own), names(state));
        let is_known = |key: &String| parameter(key).is_some_and(|name| mine.contains(&name) && theirs.contains(&name));
        own.retain(|key, _| !is_known(key) && key != KIND);
        let known = state.iter().filter(|(key, _)| is_known(key) || *key == KIND);
        own.extend(known.map(|(key, tensor)| (key.clone(), tensor.clone())));
        self.load_state_dict(&own)?;
        Ok(LoadReport {
            loaded: mine.intersection(&theirs).cloned().collect(),
            missing: mine.difference(&theirs).cloned().collect(),
            unexpected: theirs.difference(&mine).cloned().collect(),
            ..Default::default()
        })
    }

    /// Writes the state to one safetensors file. Every rank of `group` must call it; rank 0 writes. As with
    /// [`save_distributed`](crate::checkpoint::save_distributed), an existing file is replaced only once all ranks have
    /// confirmed success, and writing may take longer than the group's time-out. The file depends neither on the number
    /// of ranks nor on whether the state was sharded.
    ///
    /// # Errors
    /// Returns an error on every rank if writing fails: rank 0 gets its own error, the others get [`Error::RankFailed`]
    /// with its text. Also returns a failure of the group.
    fn save_distributed(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let write = || WriteJob::new(path, &self.state_dict()?);
        let job = (group.rank() == 0).then(write).transpose();
        OPTIMIZER_SAVE.during(|| group.write_together(job)).map(drop)
    }

    /// Loads a file of [`save_distributed`](Self::save_distributed) or [`StateDict::save`] on every rank, or a folder to which an earlier
    /// version's `save_shards` has written the shards of a sharded optimizer.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them cannot read its file or the state does not fit: that rank gets its
    /// own error, the others get [`Error::RankFailed`].
    fn load_distributed(&mut self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let prepared = shards::read(path).and_then(|saved| self.prepare(saved, group.rank(), group.world_size()));
        let loaded = OPTIMIZER_LOAD.during(|| group.agree(prepared))?();
        OPTIMIZER_LOAD.during(|| group.agree(loaded))
    }
}

/// The whole state, if `state` has the parts of all ranks. `own` has the shapes.
fn joined<'a>(state: &'a Dict, own: &Dict) -> Result<Cow<'a, Dict>> {
    let kind = |dict: &Dict| dict.get(KIND).and_then(|kind| String::from_utf8(kind.to_vec1().ok()?).ok());
    let (Some(kind), true) = (kind(own), kind(state).is_some_and(|kind| kind.starts_with(PART_OF))) else {
        return Ok(Cow::Borrowed(state));
    };
    let saved = Saved::Shards(vec![state.clone()]);
    let (mut whole, mut loader) = (state::begin(&kind)?, Loader::of(&saved, &kind, 0)?);
    let keys: Vec<_> = loader.keys().cloned().collect();
    for key in keys {
        let tensor = match own.get(&key) {
            _ if loader.has(&key) => loader.tensor(&key)?,
            Some(own) => loader.part(&key, &Placement::whole(own.shape()), own.dtype())?.reshape(own.shape())?,
            None => continue,
        };
        whole.insert(key, tensor);
    }
    Ok(Cow::Owned(whole))
}

/// The parameter to which the entry `key` of an optimizer's state belongs.
fn parameter(key: &str) -> Option<String> {
    let (name, _) = key.strip_prefix("state.")?.rsplit_once('.')?;
    Some(name.to_string())
}

/// Checks that there is one for each of the `groups`.
pub(super) fn check_learning_rates(learning_rates: &[f64], groups: usize) -> Result<()> {
    learning_rates.iter().try_for_each(|learning_rate| not_negative("learning_rates", *learning_rate))?;
    if learning_rates.len() == groups {
        return Ok(());
    }
    Err(Error::invalid("learning_rates", format!("{} were given for {groups} groups", learning_rates.len())))
}

/// Allows schedules and scalers to take `&mut optimizer`, boxed or not.
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

    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<Tensor> {
        (**self).clip_grad_norm(grads, max_norm)
    }

    fn unscale(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        (**self).unscale(scaler, grads)
    }

    fn step_scaled(&mut self, scaler: &mut GradScaler, grads: &mut GradStore) -> Result<()> {
        (**self).step_scaled(scaler, grads)
    }

    fn takes_parts(&self) -> Result<bool> {
        (**self).takes_parts()
    }

    fn step_part(&mut self, grads: &GradStore, is_last: bool) -> Result<()> {
        (**self).step_part(grads, is_last)
    }

    fn load_known(&mut self, state: &HashMap<String, Tensor>) -> Result<LoadReport> {
        (**self).load_known(state)
    }

    fn save_distributed(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        (**self).save_distributed(group, path)
    }

    fn load_distributed(&mut self, group: &ProcessGroup, path: &Path) -> Result<()> {
        (**self).load_distributed(group, path)
    }
}

impl GradScaler {
    /// Lets `optimizer` divide the gradients, unless [`unscale`](Self::unscale) or [`Optimizer::unscale`] has done so,
    /// and step if all are finite on all ranks.
    ///
    /// A program that must know at once whether the optimizer has stepped calls [`step_if_finite`](Self::step_if_finite), which waits for a
    /// GPU. With `step`, the kernels of Adam, AdamW and SGD find out by themselves, and the host learns of it in the next step. As in PyTorch, a
    /// skipped step lowers the [`current_scale`](Self::current_scale) after [`update`](Self::update).
    ///
    /// # Errors
    /// Returns [`Error::GradScaler`] for a second call in the same step, and those of `unscale` and of the optimizer's
    /// step.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized), grads: &mut GradStore) -> Result<()> {
        optimizer.step_scaled(self, grads)
    }

    /// The same, where the host decides whether to step.
    pub(crate) fn step_on_host(
        &mut self,
        optimizer: &mut (impl Optimizer + ?Sized),
        grads: &mut GradStore,
    ) -> Result<()> {
        if self.is_scaled() {
            optimizer.unscale(self, grads)?;
        }
        self.step_if_finite(grads, |grads| optimizer.step(grads)).map(drop)
    }
}
