//! Whether the gradients of ignored variables are finite. Each rank has others, so the ranks tell each other, since all leave out a step
//! or none.
use crate::ddp::model::DistributedModel;
use crate::ddp::model::parameter::Buffer;
use crate::ddp::pass::Pass;
use crate::ddp::pass::order::Member;
use crate::ddp::watch::non_finite::{DDP_NON_FINITE, Finding};
use crate::panic::lock;
use crate::tensor::finite::{any_non_finite, non_finite};
use crate::{ReduceOp, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

/// Looks at this rank's gradients, which are None on a rank without inputs, and asks the others. Every rank must call it.
pub(in crate::ddp) fn look(pass: &Pass, grads: Option<&GradStore>) -> Result<()> {
    for Member { core, synchronises, .. } in &pass.models {
        if !core.ignores || !core.options.policy().is_on() {
            continue;
        }
        let looks = core.reducer.findings()?.looks;
        let here = grads.filter(|_| looks).map_or(Ok(None), |grads| first_not_finite(core, grads))?;
        let mut skipped = lock(&core.skipped);
        let own = skipped.ignored.take().or(here);
        if !synchronises {
            // The next synchronised pass belongs to the step.
            skipped.ignored = own;
            continue;
        }
        drop(skipped);
        let is_found = match core.group().world_size() == 1 || core.reducer.is_local() {
            true => own.is_some(),
            false => any_rank(core, own.is_some())?,
        };
        if is_found {
            core.reducer.found_ignored(own)?;
        }
    }
    Ok(())
}

fn first_not_finite(model: &DistributedModel, grads: &GradStore) -> Result<Option<Finding>> {
    let present = |Buffer { name, var }: &'_ Buffer| Some((name.clone(), grads.get(var)?.detach()));
    let present: Vec<(String, Tensor)> = model.variables.ignored.iter().filter_map(present).collect();
    if !any_non_finite(&present.iter().map(|(_, gradient)| gradient).collect::<Vec<_>>())? {
        return Ok(None);
    }
    for (name, gradient) in present {
        if let Some(value) = non_finite(&gradient)? {
            return Ok(Some((name, value)));
        }
    }
    Ok(None)
}

fn any_rank(model: &DistributedModel, here: bool) -> Result<bool> {
    let group = model.group();
    let flag = Tensor::new(&[f64::from(u8::from(here))], group.device())?;
    DDP_NON_FINITE.during(|| group.all_reduce(&flag, ReduceOp::Max))?;
    Ok(flag.to_vec1::<f64>()?[0] > 0.)
}
