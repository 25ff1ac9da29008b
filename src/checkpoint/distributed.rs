//! Checkpoints of several ranks: all succeed, or all fail.
use super::load::Prepared;
use super::{LoadOptions, LoadReport, tensors};
use crate::Result;
use crate::backend::label;
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use crate::tensor::copy::copy;
use crate::variables::{Piece, piece_of};
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Rank 0 writes the variables of `varmap`, as [`save`](super::save) does; every rank calls it. Once it returns, the
/// file exists, and every rank on the same file system may read it.
///
/// The file takes its name only after all ranks have confirmed that everything has succeeded so far, on GPUs too. So
/// an earlier file is never replaced by the variables of a failed run, as long as they are trained with `group`.
/// Writing may take longer than the group's time-out; it fails only if there is no progress for that long (and for 10
/// minutes). Under [sharding](crate::Sharding) rank 0 puts the whole model together in its host's memory; a
/// [`Checkpointer`](super::Checkpointer) does not.
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::RankFailed`](crate::Error::RankFailed) with its
/// text; or all get the group's failure. An earlier file stays, unless the group fails at the very moment in which
/// the new, complete file takes its name.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    let gathered = label::SAVE.during(|| whole(group, varmap))?;
    let job = (group.rank() == 0).then(|| WriteJob::new(path.as_ref(), &gathered)).transpose();
    label::SAVE.during(|| group.write_together(job)).map(drop)
}

/// The variables as a whole, on rank 0. Under sharding, all ranks send it their pieces, variable by variable.
fn whole(group: &ProcessGroup, varmap: &VarMap) -> Result<HashMap<String, Tensor>> {
    let vars: BTreeMap<String, Var> = lock(varmap.data()).clone().into_iter().collect();
    if vars.values().all(|var| piece_of(var).is_none()) {
        return tensors(varmap);
    }
    let pieces: Vec<Option<Piece>> = vars.values().map(piece_of).collect();
    let ranges: Vec<Option<(usize, usize)>> =
        pieces.iter().map(|piece| piece.as_ref().map(|piece| (piece.range.start, piece.range.len()))).collect();
    let ranges = group.all_gather_object(&ranges)?;
    let mut gathered = HashMap::new();
    for (index, ((name, var), piece)) in vars.into_iter().zip(pieces).enumerate() {
        let Some(piece) = piece else {
            gathered.insert(name, var.as_tensor().clone());
            continue;
        };
        let own = var.as_detached_tensor().flatten_all()?;
        if group.rank() > 0 {
            if own.elem_count() > 0 {
                group.send(&own, 0)?;
            }
            continue;
        }
        let whole = Tensor::zeros(piece.shape.elem_count(), var.dtype(), var.device())?;
        for (rank, ranges) in ranges.iter().enumerate() {
            let Some(Some((start, elements))) = ranges.get(index).copied() else { continue };
            let part = whole.narrow(0, start, elements)?;
            match rank {
                _ if elements == 0 => {}
                0 => copy(&part, &own)?,
                _ => group.recv(&part, rank)?,
            }
        }
        gathered.insert(name, whole.to_device(&Device::Cpu)?.reshape(&piece.shape)?);
    }
    Ok(gathered)
}

/// Every rank reads a checkpoint into its variables, as [`load_with`](super::load_with) does. On several hosts, each
/// host needs a copy of the file.
///
/// # Errors
/// If the file does not fit on one rank, every rank returns an error and no rank changes anything: that rank gets its
/// own error, the others [`Error::RankFailed`](crate::Error::RankFailed).
pub fn load_distributed(
    group: &ProcessGroup,
    varmap: &VarMap,
    path: impl AsRef<Path>,
    options: LoadOptions,
) -> Result<LoadReport> {
    let prepared = Prepared::new(varmap, path.as_ref(), &options);
    let prepared = label::LOAD.during(|| group.agree(prepared))?;
    let report = prepared.apply();
    label::LOAD.during(|| group.agree(report))
}
