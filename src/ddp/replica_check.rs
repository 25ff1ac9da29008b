//! Compares the ranks' replicas, which may part in ways that no collective notices.
use super::model::DistributedModel;
use super::pass::Pass;
use crate::backend::label;
use crate::state;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How often ranks compare their models, bit for bit, by hashes. An option of [`DdpOptions`](crate::DdpOptions).
///
/// The parameters of all ranks are the same as long as all make the same steps with the same averaged gradients. A rank that makes a
/// step more or less, has another learning rate, applies sums of [`no_sync`](crate::DistributedDataParallel::no_sync), or loads a file
/// that the others do not load, parts from them without an error of any collective. So does one whose memory flips a bit.
///
/// The ranks compare parameters, frozen variables, and buffers if they are [broadcast](crate::DdpOptions::broadcast_buffers), at the end
/// of a backward pass. Passes under `no_sync` or in a join do not count, nor do those of a communication hook that averages no gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCheck {
    /// The number of synchronised backward passes from one comparison to the next; at least 1. Default: 1000.
    pub every: u64,
    /// Whether a difference is only a warning, which rank 0 gives once, and not [`Error::ReplicasDiffer`] on every rank, which ends the
    /// group. Default: false.
    pub warn_only: bool,
}

impl Default for ReplicaCheck {
    fn default() -> Self {
        Self { every: 1000, warn_only: false }
    }
}

impl ReplicaCheck {
    pub(super) fn check(&self) -> Result<()> {
        match self.every {
            0 => Err(Error::invalid("replica_check", "`every` must be at least 1, not 0 (None turns the check off)")),
            _ => Ok(()),
        }
    }
}

/// What a model knows of earlier comparisons.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// The number of passes that count.
    passes: AtomicU64,
    has_warned: AtomicBool,
}

/// At the end of a pass, compares the models whose turn it is.
pub(super) fn end(pass: &Pass) -> Result<()> {
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
    let passes = model.compared.passes.fetch_add(1, Ordering::Relaxed) + 1;
    if !passes.is_multiple_of(check.every) {
        return Ok(());
    }
    let variables = &model.variables;
    let variables: Vec<_> = match model.options.broadcast_buffers {
        true => variables.shared().collect(),
        false => variables.without_buffers().collect(),
    };
    let dict = variables.into_iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    let fingerprint = model.phase("compare replicas", || state::fingerprint(&dict))?;
    let (ranks, names) = match label::DDP_REPLICAS.during(|| group.compare_states(&[("model", &fingerprint)])) {
        Err(Error::PartDiffers { ranks, names, .. }) => (ranks, names),
        result => return result,
    };
    let error = Error::ReplicasDiffer { ranks, names, passes };
    if !check.warn_only {
        return Err(error);
    }
    if group.rank() == 0 && !model.compared.has_warned.swap(true, Ordering::Relaxed) {
        warn_aloud(format_args!("{error}"));
    }
    Ok(())
}
