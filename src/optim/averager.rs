//! Post-local SGD: ranks train independently, and their weights are averaged periodically.
use crate::backend::{Purpose, ReduceOp};
use crate::error::describe;
use crate::placement::Placement;
use crate::process_group::ProcessGroup;
use crate::state::{self, Loader, StateDict};
use crate::tensor::copy;
use crate::tensor::pack::packs;
use crate::variables::Parameters;
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use std::collections::HashMap;

static AVERAGER: Purpose = Purpose::of("PeriodicModelAverager::average_parameters");

/// Averages parameters over the ranks every few steps: PyTorch's `PeriodicModelAverager`.
///
/// For post-local SGD, average gradients as usual in the first `warmup_steps` steps; after that, let each rank apply
/// its own, with a model built from a plain `VarBuilder` and `loss.backward()`. (DDP's `no_sync` is not suitable: it
/// accumulates gradients from step to step.)
#[derive(Clone, Debug)]
pub struct PeriodicModelAverager {
    group: ProcessGroup,
    period: u64,
    warmup_steps: u64,
    step: u64,
    /// The list of parameters, once all ranks have compared it.
    agreed: Option<String>,
}

impl PeriodicModelAverager {
    /// Averages first in step `warmup_steps`, counted from 0, and then in every `period`-th step. Every rank of `group` must give the same.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a period of 0.
    pub fn new(group: &ProcessGroup, period: u64, warmup_steps: u64) -> Result<Self> {
        if period == 0 {
            return Err(Error::invalid("period", "it must be at least 1"));
        }
        if period == 1 {
            log::warn!(
                "a PeriodicModelAverager of period 1 sends as much as averaging the gradients would: use \
                 DistributedDataParallel alone"
            );
        }
        Ok(Self { group: group.clone(), period, warmup_steps, step: 0, agreed: None })
    }

    /// Call this after every optimizer step, on every rank, with the same [parameters](Parameters), such as a `&VarMap` or a
    /// `&DistributedDataParallel` (whose ignored parameters are averaged as well): replaces them by their mean over the ranks
    /// if it is due. Returns whether it did. Parameters are matched by name, whatever their order, and those without names by
    /// their place. Variables of integer type are left alone.
    ///
    /// Several sharded models are averaged piece by piece: the group of the averager is then of the ranks that have the same pieces, one of
    /// each model.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] on all ranks if names, shapes, dtypes or the elements of pieces differ, and the errors of
    /// [`ProcessGroup::all_reduce`].
    pub fn average_parameters(&mut self, parameters: impl Into<Parameters>) -> Result<bool> {
        let (period, warmup_steps) = (self.period, self.warmup_steps);
        let due = self.step >= warmup_steps && (self.step - warmup_steps).is_multiple_of(period);
        if due && self.group.world_size() > 1 {
            let mut parameters: Vec<_> =
                parameters.into().into_iter().filter(|(_, var)| var.dtype().is_float()).collect();
            parameters.sort_by(|a, b| a.0.cmp(&b.0));
            self.check(&parameters)?;
            parameters.retain(|(_, var)| var.elem_count() > 0);
            average(&self.group, &parameters)?;
        }
        self.step += 1;
        Ok(due)
    }

    /// Checks that all ranks have the same parameters.
    fn check(&mut self, parameters: &[(String, Var)]) -> Result<()> {
        let line = |(name, var): &(String, Var)| {
            let placement = Placement::of(var);
            let whole = format!("{name} {}", describe(var.dtype(), &placement.shape));
            match placement.is_sharded() {
                true => format!("{whole}, elements {} to {}", placement.range.start, placement.range.end),
                false => whole,
            }
        };
        let described = parameters.iter().map(line).collect::<Vec<_>>().join("\n");
        if self.agreed.as_ref() == Some(&described) {
            return Ok(());
        }
        match AVERAGER.during(|| self.group.compare(Ok(described.clone()), "it has no parameters"))? {
            Some((rank, difference)) => Err(Error::Mismatch { what: "list of parameters", rank, difference }),
            None => {
                self.agreed = Some(described);
                Ok(())
            }
        }
    }
}

/// Replaces every parameter by its mean over the ranks, in few messages.
fn average(group: &ProcessGroup, parameters: &[(String, Var)]) -> Result<()> {
    let scale = 1. / group.world_size() as f64;
    let mut messages = Vec::new();
    for vars in packs(parameters.iter().map(|(_, var)| var)) {
        let parts = vars.iter().map(|var| var.as_detached_tensor().flatten_all());
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        // Divided first, like gradients, so that the sum cannot overflow. The product never shares a variable's
        // storage.
        let flat = (Tensor::cat(&parts, 0)? * scale)?.detach();
        let work = AVERAGER.during(|| group.all_reduce_async(&flat, ReduceOp::Sum))?;
        messages.push((vars, flat, work));
    }
    for (vars, flat, work) in messages {
        work.wait()?;
        let means = copy::views(&flat, vars.iter().map(|var| var.shape()))?;
        vars.iter().zip(&means).try_for_each(|(var, mean)| var.set(mean))?;
    }
    Ok(())
}

/// Contains `step`.
impl StateDict for PeriodicModelAverager {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin("PeriodicModelAverager")?;
        dict.insert("step".to_string(), state::count(self.step)?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "PeriodicModelAverager")?;
        let step = loader.count("step")?;
        loader.finish()?;
        self.step = step;
        Ok(())
    }
}
