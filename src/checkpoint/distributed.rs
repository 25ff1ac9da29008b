//! Checkpoints of several ranks: all succeed, or all fail.
use super::load::Prepared;
use super::{LoadOptions, LoadReport, tensors};
use crate::Result;
use crate::backend::label;
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use candle_nn::VarMap;
use std::path::Path;

/// Rank 0 writes the variables of `varmap`, as [`save`](super::save) does; every rank calls it. Once it returns, the
/// file exists, and every rank on the same file system may read it.
///
/// The file takes its name only after all ranks have confirmed that everything has succeeded so far, on GPUs too. So
/// an earlier file is never replaced by the variables of a failed run, as long as they are trained with `group`.
/// Writing may take longer than the group's time-out; it fails only if there is no progress for that long (and for 10
/// minutes).
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::RankFailed`](crate::Error::RankFailed) with its
/// text; or all get the group's failure. An earlier file stays, unless the group fails at the very moment in which
/// the new, complete file takes its name.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    let job = (group.rank() == 0).then(|| WriteJob::new(path.as_ref(), &tensors(varmap))).transpose();
    label::SAVE.during(|| group.write_together(job)).map(drop)
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
