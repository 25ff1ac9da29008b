//! The mean over the ranks.
use crate::Result;
use crate::backend::{Purpose, ReduceOp};
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::pack::packs;
use candle_core::{Tensor, Var};

pub(super) static AVERAGER: Purpose = Purpose::of("PeriodicModelAverager::average_parameters");

/// Replaces every parameter by its mean over the ranks, in few messages.
pub(super) fn average(group: &ProcessGroup, parameters: &[(String, Var)]) -> Result<()> {
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
