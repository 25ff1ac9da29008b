//! The optimizer's step with the gradients of some buckets while later ones are still being reduced.
use crate::Result;
use crate::ddp::gradients::left_out::put_numbers;
use crate::ddp::gradients::scaled;
use crate::ddp::pass::Pass;
use crate::ddp::pass::graph::Graph;
use crate::ddp::pass::order::Member;
use crate::ddp::watch::replicas;
use crate::goes_with::Feature;
use candle_core::TensorId;
use candle_core::backprop::GradStore;
use std::collections::HashSet;

/// Makes the part of a step for which the gradients are there.
pub(crate) type StepPart<'a> = dyn FnMut(&GradStore) -> Result<()> + 'a;

/// The most parts of a step: a GPU launches a kernel for each, and keeps the tables of a few of them only.
const MOST: usize = 16;

/// Refuses what no step may follow.
pub(in crate::ddp) fn check(pass: &Pass) -> Result<()> {
    if pass.models.iter().any(|model| model.core.group().virtual_ranks().is_some()) {
        Feature::BackwardAndStep.goes_with(Feature::VirtualRanks)?;
    }
    if pass.synchronised().next().is_none() {
        Feature::BackwardAndStep.goes_with(Feature::NoSync)?;
    }
    if pass.graph.iter().flat_map(Graph::variables).any(scaled::is_key) {
        Feature::BackwardAndStep.goes_with(Feature::GradScaler)?;
    }
    Ok(())
}

/// Whether a part of the step may be made before the last bucket is there. All that the ranks decide together at the end of the pass then
/// comes too late: whether to leave the step out, and whether they have the same model.
pub(in crate::ddp) fn has_parts(pass: &Pass) -> bool {
    let [Member { core, synchronises: true, .. }] = pass.models[..] else { return false };
    let mut known = HashSet::<TensorId>::new();
    core.reducer.has_parts()
        && !core.options.policy().is_on()
        && (pass.is_joined() || !replicas::are_due(core))
        // A variable with two names gets the sum of both gradients.
        && core.variables.named_parameters().all(|(_, var)| known.insert(var.id()))
}

/// Waits for the buckets, and makes the step of each before it waits for the next.
pub(in crate::ddp) fn step(pass: &Pass, step: &mut StepPart) -> Result<()> {
    for Member { core, .. } in &pass.models {
        let count = core.reducer.bucket_count();
        let together = count.div_ceil(MOST).max(1);
        for first in (0..count).step_by(together) {
            let numbers = first..count.min(first + together);
            let gradients = core.phase("wait for buckets", || core.reducer.finalize_buckets(numbers))?;
            let mut part = GradStore::default();
            let mut unsure = Vec::new();
            for (index, gradient, verdict) in gradients {
                let var = &core.variables.parameters[index].var;
                match verdict {
                    None => drop(part.insert(var, gradient)),
                    Some(verdict) => unsure.push((var, gradient, verdict)),
                }
            }
            step(&part)?;
            // Each is updated by itself, or left alone, by its own verdict.
            for (var, gradient, verdict) in unsure {
                let mut alone = GradStore::default();
                alone.insert(var, gradient);
                put_numbers(&mut alone, verdict)?;
                step(&alone)?;
            }
        }
    }
    Ok(())
}
