//! The mean over the ranks.
use crate::Result;
use crate::backend::{Purpose, ReduceOp, Work};
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::pack::packs;
use candle_core::{Tensor, Var};

pub(super) static AVERAGER: Purpose = Purpose::of("PeriodicModelAverager::average_parameters");

/// Means over the ranks that are being calculated, in few messages.
#[derive(Clone, Debug)]
pub(super) struct Means(Vec<(Vec<Var>, Tensor, Work)>);

impl Means {
    pub(super) fn begin(group: &ProcessGroup, tensors: &[(String, Var)]) -> Result<Self> {
        let scale = 1. / group.world_size() as f64;
        let mut messages = Vec::new();
        for vars in packs(tensors.iter().map(|(_, var)| var)) {
            let parts = vars.iter().map(|var| var.as_detached_tensor().flatten_all());
            let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
            // Divided first, like gradients, so that the sum cannot overflow. The product never shares a variable's
            // storage.
            let flat = (Tensor::cat(&parts, 0)? * scale)?.detach();
            let work = AVERAGER.during(|| group.all_reduce_async(&flat, ReduceOp::Sum))?;
            messages.push((vars.into_iter().cloned().collect(), flat, work));
        }
        Ok(Self(messages))
    }

    /// Waits for the means, which replace the tensors. It may be called again.
    pub(super) fn finish(&self) -> Result<()> {
        for (vars, flat, work) in &self.0 {
            work.wait()?;
            let means = copy::views(flat, vars.iter().map(|var| var.shape()))?;
            vars.iter().zip(&means).try_for_each(|(var, mean)| var.set(mean))?;
        }
        Ok(())
    }
}
