//! How a failing rank reports to its launcher.
use crate::panic::lock;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use candle_ddp_rendezvous::error::{FILE_VARIABLE, RankError};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The launcher's job to which a group belongs, as do all groups that are split off from it.
pub(crate) struct Job {
    /// The launcher's number of each rank of the group of all ranks.
    pub(super) ranks: Vec<usize>,
    /// The last errors of calls that name a rank: the program may return one of them in its own words.
    named: Mutex<VecDeque<RankError>>,
    /// Whether the launcher has been told how this rank fails, or need not be.
    is_told: AtomicBool,
}

impl Job {
    /// A job whose ranks have these numbers.
    pub(crate) fn new(ranks: Vec<usize>) -> Self {
        Self { ranks, named: Mutex::default(), is_told: AtomicBool::new(false) }
    }

    /// Records an error that names a rank.
    pub(super) fn note(&self, error: RankError) {
        const MOST: usize = 16;
        let mut named = lock(&self.named);
        if named.len() == MOST {
            named.pop_front();
        }
        named.push_back(error);
    }

    /// The last recorded error for which `is` returns true.
    pub(super) fn noted(&self, is: impl Fn(&RankError) -> bool) -> Option<RankError> {
        lock(&self.named).iter().rev().find(|error| is(error)).cloned()
    }

    /// Records that the launcher is told, or need not be; returns whether that was already so.
    pub(super) fn end(&self) -> bool {
        self.is_told.swap(true, Ordering::Relaxed)
    }
}

/// Tells the launcher how this rank fails, if it asked for that. If this goes wrong, the program does not fail for it.
pub(super) fn tell(told: Option<RankError>) {
    let Some((told, path)) = told.zip(path()) else { return };
    let write = || -> Result<()> {
        let content = told.to_json().to_string();
        let file = PreparedFile::write(&path, &Progress::default(), |file| file.write_all(content.as_bytes()))?;
        Ok(file.commit()?)
    };
    if let Err(error) = write() {
        log::warn!("rank {}: cannot tell the launcher why this rank fails: {error}", told.rank);
    }
}

/// Tells the launcher of an error of this process while it has no group. `number` returns the launcher's number of a
/// rank that the error names.
pub(crate) fn tell_error(rank: Option<usize>, error: &Error, number: impl Fn(usize) -> Option<usize>) {
    let own = || std::env::var("RANK").ok()?.trim().parse().ok();
    if let Some(rank) = rank.or_else(own) {
        tell(Some(error.of_rank(rank, number)));
    }
}

/// Withdraws this process's report to the launcher, because it has a new group.
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
