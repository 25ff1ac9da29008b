//! Compares the ranks' replicas, which may part in ways that no collective notices.
use crate::backend::Purpose;
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::Pass;
use crate::ddp::watch::replica_check::ReplicaCheck;
use crate::hash::content_64;
use crate::placement::Placement;
use crate::state;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::Var;
use std::collections::BTreeMap;

static DDP_REPLICAS: Purpose = Purpose::of("the comparison of DistributedDataParallel's replicas");

/// At the end of a pass, compares the models whose turn it is.
pub(in crate::ddp) fn compare_all(pass: &Pass) -> Result<()> {
    if pass.is_joined() {
        return Ok(());
    }
    pass.synchronised().try_for_each(compare)
}

/// Whether the next pass outside of a join ends with a comparison of this model.
pub(in crate::ddp) fn are_due(model: &DistributedModel) -> bool {
    check_of(model).is_some_and(|check| check.is_due(model.compared.next()))
}

/// How often its ranks compare it, if they do.
fn check_of(model: &DistributedModel) -> Option<ReplicaCheck> {
    model.options.replica_check.filter(|_| model.group().world_size() > 1 && !model.reducer.is_local())
}

fn compare(model: &DistributedModel) -> Result<()> {
    let (group, Some(check)) = (model.group(), check_of(model)) else { return Ok(()) };
    let passes = model.compared.count();
    if !check.is_due(passes) {
        return Ok(());
    }
    let variables = &model.variables;
    let variables: Vec<_> = match model.options.broadcast_buffers {
        true => variables.shared().collect(),
        false => variables.without_buffers().collect(),
    };
    let (pieces, whole): (Vec<_>, Vec<_>) = variables.into_iter().partition(|(_, var)| Placement::of(var).is_sharded());
    let hashes = |variables: Vec<(&String, &Var)>| {
        let dict = variables.into_iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        model.phase("compare replicas", || state::fingerprint(&dict))
    };
    let mut fingerprint = hashes(whole)?;
    fingerprint.extend(model.marks().steps.fingerprint());
    // Each rank has other pieces, but all copies of the model have the same.
    let groups = model.reducer.groups();
    if groups.across().is_some() && !pieces.is_empty() {
        let pieces = hashes(pieces)?;
        let of_copy: Vec<BTreeMap<String, u64>> = DDP_REPLICAS.during(|| groups.within().all_gather_object(&pieces))?;
        fingerprint.extend(pieces.into_keys().map(|name| {
            let of_all: Vec<u64> = of_copy.iter().filter_map(|pieces| pieces.get(&name).copied()).collect();
            (name, content_64(bytemuck::cast_slice(&of_all)))
        }));
    }
    let (ranks, names) = match DDP_REPLICAS.during(|| group.compare_states(&[("model", &fingerprint)])) {
        Err(Error::PartDiffers { ranks, names, .. }) => (ranks, names),
        result => return result,
    };
    let error = Error::ReplicasDiffer { ranks, names, passes };
    if !check.warn_only {
        return Err(group.note(error));
    }
    if group.rank() == 0 && model.compared.warns() {
        warn_aloud(format_args!("{error}"));
    }
    Ok(())
}
