//! Compares the ranks' replicas, which may part in ways that no collective notices.
use super::model::DistributedModel;
use super::pass::Pass;
use crate::backend::label;
use crate::state;
use crate::variables::piece_of;
use crate::warnings::warn_aloud;
use crate::{Error, Result};

/// At the end of a pass, compares the models whose turn it is.
pub(super) fn compare_all(pass: &Pass) -> Result<()> {
    if pass.is_joined() {
        return Ok(());
    }
    pass.synchronised().try_for_each(compare)
}

fn compare(model: &DistributedModel) -> Result<()> {
    let (group, Some(check)) = (model.group(), model.options.replica_check) else { return Ok(()) };
    if group.world_size() == 1 || model.reducer.is_local() {
        return Ok(());
    }
    let passes = model.compared.count();
    // Most causes are there from the first step on.
    if passes != 2 && !passes.is_multiple_of(check.every) {
        return Ok(());
    }
    let variables = &model.variables;
    let variables: Vec<_> = match model.options.broadcast_buffers {
        true => variables.shared().collect(),
        false => variables.without_buffers().collect(),
    };
    // Each rank has other pieces.
    let variables = variables.into_iter().filter(|(_, var)| piece_of(var).is_none());
    let dict = variables.map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    let mut fingerprint = model.phase("compare replicas", || state::fingerprint(&dict))?;
    fingerprint.extend(model.marks().steps.fingerprint());
    let (ranks, names) = match label::DDP_REPLICAS.during(|| group.compare_states(&[("model", &fingerprint)])) {
        Err(Error::PartDiffers { ranks, names, .. }) => (ranks, names),
        result => return result,
    };
    let error = Error::ReplicasDiffer { ranks, names, passes };
    if !check.warn_only {
        return Err(error);
    }
    if group.rank() == 0 && model.compared.warns() {
        warn_aloud(format_args!("{error}"));
    }
    Ok(())
}
