//! What a rank tells its launcher when it fails.
use crate::panic::lock;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use candle_ddp_rendezvous::error::{FILE_VARIABLE, RankError};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The job of a launcher to which a group belongs, and all groups that are split off from it.
pub(crate) struct Job {
    /// The launcher's number of each rank of the group of all ranks.
    pub(super) ranks: Vec<usize>,
    /// The last errors of calls that name a rank: the program may return one in its own words.
    named: Mutex<VecDeque<RankError>>,
    /// The launcher has been told how this rank fails, or need not be.
    is_told: AtomicBool,
}

impl Job {
    /// A job whose ranks have these numbers.
    pub(crate) fn new(ranks: Vec<usize>) -> Self {
        Self { ranks, named: Mutex::default(), is_told: AtomicBool::new(false) }
    }

    /// Takes note of an error that names a rank.
    pub(super) fn note(&self, error: RankError) {
        const MOST: usize = 16;
        let mut named = lock(&self.named);
        if named.len() == MOST {
            named.pop_front();
        }
        named.push_back(error);
    }

    /// The last of the errors that `is` holds for.
    pub(super) fn noted(&self, is: impl Fn(&RankError) -> bool) -> Option<RankError> {
        lock(&self.named).iter().rev().find(|error| is(error)).cloned()
    }

    /// The launcher is told, or need not be; returns whether that was so before.
    pub(super) fn end(&self) -> bool {
        self.is_told.swap(true, Ordering::Relaxed)
    }
}

/// Tells the launcher how this rank fails, if it wants to know. A problem with that is not the program's.
pub(super) fn tell(told: Option<RankError>) {
    let Some((told, path)) = told.zip(path()) else { return };
    let write = || -> Result<()> {
        let content = told.to_json().to_string();
        let file = PreparedFile::write(&path, &Progress::default(), |file| file.write_all(content.as_bytes()))?;
        Ok(file.commit()?)
    };
    if let Err(error) = write() {
        log::warn!("rank {}: the launcher does not learn why this rank fails: {error}", told.rank);
    }
}

/// Tells the launcher of an error of this process while it has no group. `number` gives the launcher's number of a rank that
/// the error names.
pub(crate) fn tell_error(rank: Option<usize>, error: &Error, number: impl Fn(usize) -> Option<usize>) {
    let own = || std::env::var("RANK").ok()?.trim().parse().ok();
    if let Some(rank) = rank.or_else(own) {
        tell(Some(error.of_rank(rank, number)));
    }
}

/// Takes back what this process has told the launcher, because it has a new group.
pub(crate) fn take_back() {
    if let Some(path) = path()
        && let Err(error) = std::fs::remove_file(&path)
        && error.kind() != ErrorKind::NotFound
    {
        log::debug!("removing {}: {error}", path.display());
    }
}

fn path() -> Option<PathBuf> {
    std::env::var_os(FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}
