//! Post-local SGD and DiLoCo: ranks train independently, and their weights are averaged periodically.
mod mean;
mod outer;

use super::ParamsSgd;
use super::rule;
use crate::error::describe;
use crate::goes_with::Feature;
use crate::placement::Placement;
use crate::process_group::ProcessGroup;
use crate::state::{self, Loader, StateDict};
use crate::variables::Parameters;
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use mean::{AVERAGER, Means};
use outer::{Outer, Streaming};
use std::collections::HashMap;

/// Averages parameters over the ranks every few steps: PyTorch's `PeriodicModelAverager`.
///
/// For post-local SGD, average gradients as usual in the first `warmup_steps` steps; after that, let each rank apply
/// its own, with a model built from a plain `VarBuilder` and `loss.backward()`. (DDP's `no_sync` is not suitable: it
/// accumulates gradients from step to step.)
///
/// # DiLoCo
/// With an outer optimizer, an average is not the next parameters but the direction to them, which lets the period be hundreds of
/// steps ([*DiLoCo*](https://arxiv.org/abs/2311.08105), torchft's `DiLoCo`). The first averaging, in step `warmup_steps`, gives all ranks
/// the same parameters. In each further one, the difference between these and each rank's present ones, averaged over the ranks, is the
/// gradient with which SGD updates them; all ranks continue from the result. A rate of 1 without momentum is plain averaging. The paper's
/// options:
///
/// ```
/// use candle_core::Module;
/// use candle_ddp::nn::linear;
/// use candle_ddp::optim::{ParamsSgd, PeriodicModelAverager};
/// use candle_ddp::prelude::*;
/// use candle_ddp::seed;
///
/// fn main() -> Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         let varmap = VarMap::new();
///         // The same on all ranks: the mean of different initial values would be too small.
///         let model = linear(4, 1, seed::var_builder(&varmap, 0, DType::F32, pg.device()))?;
///         let mut optimizer = AdamW::new(&varmap, ParamsAdamW::default())?;
///         let outer = ParamsSgd { lr: 0.7, momentum: 0.9, nesterov: true, ..Default::default() };
///         let mut averager = PeriodicModelAverager::new(&pg, 500, 0, outer)?;
///         for _ in 0..1001 {
///             let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?;
///             optimizer.step(&model.forward(&x)?.sqr()?.mean_all()?.backward()?)?;
///             averager.average_parameters(&varmap)?; // sends something in steps 0, 500 and 1000
///         }
///         Ok(())
///     })
///     .map(drop)
/// }
/// ```
///
/// The last common parameters and the momentum take 4 bytes per element each (8 for f64), and differences are sent in f32 (f64). The inner
/// optimizer and its state stay with each rank. Give it parameters only: momentum would carry a batch norm's running variance below zero.
///
/// Between two averagings, ranks differ: in a checkpoint, the model and the inner optimizer are then
/// [`PerRank`](crate::checkpoint::PerRank), while the averager is the same on all ranks. In an [elastic run](crate::elastic), commit when
/// [`average_parameters`](Self::average_parameters) has returned true: after a death, all ranks, also new ones, continue from the last averaging.
///
/// [`streaming`](Self::streaming) averages one fragment of the model at a time, while training continues.
#[derive(Clone, Debug)]
pub struct PeriodicModelAverager {
    group: ProcessGroup,
    period: u64,
    warmup_steps: u64,
    step: u64,
    /// The list of parameters, once all ranks have compared it.
    agreed: Option<String>,
    outer: Option<Outer>,
}

/// The kind of its state.
const KIND: &str = "PeriodicModelAverager";

impl PeriodicModelAverager {
    /// Averages first in step `warmup_steps`, counted from 0, and then in every `period`-th step. With `outer`, the
    /// options of SGD, it is [DiLoCo](Self#diloco); with None, parameters become their mean. Every rank of `group` must give the same.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a period of 0, and for invalid options.
    pub fn new(
        group: &ProcessGroup,
        period: u64,
        warmup_steps: u64,
        outer: impl Into<Option<ParamsSgd>>,
    ) -> Result<Self> {
        let outer = outer.into();
        outer.iter().try_for_each(rule::check)?;
        if period == 0 {
            return Err(Error::invalid("period", "it must be at least 1"));
        }
        if period == 1 {
            log::warn!(
                "a PeriodicModelAverager of period 1 sends as much as averaging the gradients would: use \
                 DistributedDataParallel alone"
            );
        }
        let outer = outer.map(Outer::new);
        Ok(Self { group: group.clone(), period, warmup_steps, step: 0, agreed: None, outer })
    }

    /// Makes [DiLoCo](Self#diloco) [*streaming*](https://arxiv.org/abs/2501.18512), so that the ranks send less at once, and need not
    /// wait for it: torchft's `DiLoCo` with as many `model_fragments`, `fragment_sync_delay` and `fragment_update_alpha`. Every rank must
    /// give the same.
    ///
    /// Parameters are divided in the order of their names into `fragments` of about as many elements each, without dividing any.
    /// The first averaging is of all; then every `period / fragments` steps it is the turn of the next fragment, so each has an outer step
    /// in every period. Its all-reduce runs during the next `delay` local steps. Then the parameters of the fragment become
    /// `(1 - alpha) * result + alpha * local`, where the outer step gives `result`, and `local` is the rank's present parameter.
    /// One fragment, no delay and an `alpha` of 0, the default, are DiLoCo.
    ///
    /// Ranks then never have the same parameters again. What they have in common are the starts in the averager's state. The model is
    /// [`PerRank`](crate::checkpoint::PerRank) in every checkpoint and commit, or [`RankZero`](crate::checkpoint::RankZero): then all
    /// ranks continue from rank 0's, also more or fewer of them. Saving during a delay waits for the all-reduce, whose result is part of
    /// the state. A fragment in flight takes 8 bytes per element (16 for f64).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] without an outer optimizer, if `fragments` does not divide `period`, and unless `delay` is less
    /// than `period / fragments` and `alpha` is at least 0 and below 1. Only the first averaging finds more fragments than parameters.
    pub fn streaming(mut self, fragments: u64, delay: u64, alpha: f64) -> Result<Self> {
        let period = self.period;
        let Some(outer) = &mut self.outer else {
            let reason = "it must be Some for streaming: with an lr of 1 and no momentum, the result is the mean of the parameters";
            return Err(Error::invalid("outer", reason));
        };
        if fragments == 0 || !period.is_multiple_of(fragments) {
            let reason = format!(
                "it must divide the period of {period} steps, so that the fragments take turns evenly, but is {fragments}"
            );
            return Err(Error::invalid("fragments", reason));
        }
        let spacing = period / fragments;
        if delay >= spacing {
            let reason = format!(
                "it must be less than the {spacing} steps from one fragment to the next, so that one at a time is in flight, but is {delay}"
            );
            return Err(Error::invalid("delay", reason));
        }
        rule::fraction("alpha", alpha)?;
        outer.set_streaming(Streaming { fragments, delay, alpha });
        self.agreed = None;
        Ok(self)
    }

    /// Call this after every optimizer step, on every rank, with the same [parameters](Parameters), such as a `&VarMap` or a
    /// `&DistributedDataParallel` (whose ignored parameters are averaged as well): replaces them by their mean over the ranks,
    /// or by the result of the outer step, if it is due, or a fragment of them. Returns whether it did. Parameters are matched by name, whatever their order, and those without names by
    /// their place. Variables of integer type are left alone.
    ///
    /// Several sharded models are averaged piece by piece: the group of the averager is then of the ranks that have the same pieces, one of
    /// each model.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] on all ranks if names, shapes, dtypes or the elements of pieces differ, and the errors of
    /// [`ProcessGroup::all_reduce`].
    ///
    /// With an outer optimizer also, on all ranks and before anything changes: [`Error::NonFinite`] if a rank's parameters contain a NaN or
    /// an infinity; [`Error::Mismatch`] for other options of it; [`Error::PartDiffers`] if ranks have loaded different states;
    /// [`Error::Parameter`] for other parameters than in the first averaging; and [`Error::InvalidArgument`] for sharded blocks, and for
    /// more fragments than parameters. Errors of a fragment that is sent come after its delay. It is then not in flight any more, and has
    /// its turn again.
    pub fn average_parameters(&mut self, parameters: impl Into<Parameters>) -> Result<bool> {
        let fragments = self.outer.as_ref().map_or(1, |outer| outer.streaming.fragments);
        let phase = self.step.checked_sub(self.warmup_steps).map(|steps| steps % (self.period / fragments));
        let due = phase == Some(0);
        let takes_part = |phase: &u64| match &self.outer {
            Some(outer) => due || outer.arrives(*phase),
            None => due && self.group.world_size() > 1,
        };
        let mut replaced = due;
        if let Some(phase) = phase.filter(takes_part) {
            let Parameters { variables, named } = parameters.into();
            let mut parameters: Vec<_> = variables.into_iter().filter(|(_, var)| var.dtype().is_float()).collect();
            parameters.sort_by(|a, b| a.0.cmp(&b.0));
            // Between two turns the others may not be here: the outer optimizer finds by itself that parameters have changed.
            if due || self.agreed.is_none() {
                self.check(&parameters)?;
            }
            parameters.retain(|(_, var)| var.elem_count() > 0);
            match &mut self.outer {
                Some(outer) => replaced = outer.step(&self.group, &parameters, named, phase)?,
                None => Means::begin(&self.group, &parameters)?.finish()?,
            }
        }
        self.step += 1;
        Ok(replaced)
    }

    /// Checks that all ranks have the same parameters, and the same outer optimizer.
    fn check(&mut self, parameters: &[(String, Var)]) -> Result<()> {
        let line = |(name, var): &(String, Var)| {
            let placement = Placement::of(var);
            let whole = format!("{name} {}", describe(var.dtype(), &placement.shape));
            match placement.is_sharded() {
                true => format!("{whole}, elements {} to {}", placement.range.start, placement.range.end),
                false => whole,
            }
        };
        let outer = self.outer.iter().map(|outer| format!("outer {:?}, {:?}", outer.options, outer.streaming));
        let described = outer.chain(parameters.iter().map(line)).collect::<Vec<_>>().join("\n");
        if self.agreed.as_ref() == Some(&described) {
            return Ok(());
        }
        let is_sharded = |(_, var): &(String, Var)| Placement::of(var).is_sharded();
        let own = match self.outer.is_some() && parameters.iter().any(is_sharded) {
            true => Feature::ShardedBlocks.goes_with(Feature::OuterOptimizer),
            false => Ok(()),
        };
        let report = own.as_ref().map(|()| described.clone());
        let found = AVERAGER.during(|| self.group.compare(report, "it cannot average its parameters"));
        own?;
        match found? {
            Some((rank, difference)) => Err(Error::Mismatch { what: "list of parameters", rank, difference }),
            None => {
                if let Some(outer) = &self.outer {
                    let state = outer.fingerprint()?;
                    AVERAGER.during(|| self.group.compare_states(&[(KIND, &state)]))?;
                }
                self.agreed = Some(described);
                Ok(())
            }
        }
    }
}

/// Contains `step`; with an outer optimizer also the number of `outer_steps`, and `start.{name}` and `momentum_buffer.{name}` for each
/// parameter since the first averaging; with several fragments their number, and during a delay `moved.{name}`, by how much the ranks had
/// moved the parameters of the fragment on average. The program must keep the options itself. A run may continue with other ones:
/// a fragment that is in flight arrives after the new delay, or when the next is due. The state of an averager without an outer optimizer
/// loads into one that has it, which then begins with the next averaging.
impl StateDict for PeriodicModelAverager {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin(KIND)?;
        dict.insert("step".to_string(), state::count(self.step)?);
        self.outer.iter().try_for_each(|outer| outer.save(&mut dict))?;
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, KIND)?;
        let step = loader.count("step")?;
        let outer = self.outer.as_ref().map(|outer| outer.load(&mut loader)).transpose()?;
        loader.finish()?;
        self.step = step;
        if outer.is_some() {
            // Other ranks may have loaded another state.
            (self.outer, self.agreed) = (outer, None);
        }
        Ok(())
    }
}
