//! Checkpoints of several ranks: all succeed, or all fail.
use super::{LoadOptions, LoadReport, Prepared, save};
use crate::Result;
use crate::process_group::ProcessGroup;
use candle_nn::VarMap;
use std::path::Path;

/// Rank 0 writes the variables of `varmap`, as [`save`] does; every rank calls it. When it returns, the file is there, and
/// every rank that sees the same file system may read it.
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::PeerFailed`](crate::Error::PeerFailed) with its text. Writing must not take longer
/// than the group's time-out.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    group.agree(if group.rank() == 0 { save(varmap, path) } else { Ok(()) })
}

/// Every rank reads a checkpoint into its variables, as [`load_with`](super::load_with) does; on several hosts each
/// reads its own copy of the file.
///
/// # Errors
/// On every rank, and none has changed anything, if the file of one does not fit: that rank gets its own error, the others
/// [`Error::PeerFailed`](crate::Error::PeerFailed).
pub fn load_distributed(
    group: &ProcessGroup,
    varmap: &VarMap,
    path: impl AsRef<Path>,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let prepared = group.agree(Prepared::new(varmap, path.as_ref(), options))?;
    group.agree(prepared.apply())
}
