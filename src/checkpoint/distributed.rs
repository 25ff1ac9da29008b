//! Checkpoints of several ranks: all succeed, or all fail.
use super::load::Prepared;
use super::{LoadOptions, LoadReport, tensors};
use crate::Result;
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use candle_nn::VarMap;
use std::path::Path;

/// Rank 0 writes the variables of `varmap`, as [`save`](super::save) does; every rank calls it. When it returns, the file
/// is there, and every rank that sees the same file system may read it.
///
/// The file takes its name only after all ranks have confirmed that everything went well up to then, on GPUs as well. So
/// what was there before is never replaced by the variables of a run that has failed, as long as they are trained with
/// `group`. Writing may take longer than the group's time-out, unless there is no progress for so long (and for 10
/// minutes).
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::RankFailed`](crate::Error::RankFailed) with its text; or
/// the failure of the group. What was there before stays, unless the group fails in the very moment in which the new file,
/// which is whole then, takes its name.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    let job = (group.rank() == 0).then(|| WriteJob::new(path.as_ref(), &tensors(varmap))).transpose();
    Label::SAVE.during(|| group.write_together(job))
}

/// Every rank reads a checkpoint into its variables, as [`load_with`](super::load_with) does; on several hosts each
/// reads its own copy of the file.
///
/// # Errors
/// On every rank, and none has changed anything, if the file of one does not fit: that rank gets its own error, the others
/// [`Error::RankFailed`](crate::Error::RankFailed).
pub fn load_distributed(
    group: &ProcessGroup,
    varmap: &VarMap,
    path: impl AsRef<Path>,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let prepared = Prepared::new(varmap, path.as_ref(), options);
    let prepared = Label::LOAD.during(|| group.agree(prepared))?;
    let report = prepared.apply();
    Label::LOAD.during(|| group.agree(report))
}
