//! Checkpoints of several ranks: all succeed, or all fail.
use super::{LoadOptions, LoadReport, Prepared, save};
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_nn::VarMap;
use std::path::Path;

/// Rank 0 writes the variables of `varmap`, as [`save`] does; every rank calls it. When it returns, the file is there, and
/// every rank that sees the same file system may read it.
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::PeerFailed`] with its text. Writing must not take longer
/// than the group's time-out.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    agree(group, if group.rank() == 0 { save(varmap, path) } else { Ok(()) })
}

/// Every rank reads a checkpoint into its variables, as [`load_with`](super::load_with) does; on several hosts each
/// reads its own copy of the file.
///
/// # Errors
/// On every rank, and none has changed anything, if the file of one does not fit: that rank gets its own error, the others
/// [`Error::PeerFailed`].
pub fn load_distributed(
    group: &ProcessGroup,
    varmap: &VarMap,
    path: impl AsRef<Path>,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let prepared = agree(group, Prepared::new(varmap, path.as_ref(), options))?;
    agree(group, prepared.apply())
}

/// This rank's result, unless another rank has failed.
fn agree<T>(group: &ProcessGroup, result: Result<T>) -> Result<T> {
    let report = match &result {
        Ok(_) => "+".to_string(),
        Err(error) => format!("-{error}"),
    };
    let reports = group.all_gather_bytes(report.as_bytes());
    let value = result?;
    for (peer, report) in reports?.into_iter().enumerate() {
        if let Some((b'-', reason)) = report.split_first() {
            return Err(Error::PeerFailed { peer, reason: String::from_utf8_lossy(reason).into_owned() });
        }
    }
    Ok(value)
}
