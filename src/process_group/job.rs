//! The state that the groups of a job share: the errors of their calls, why they have ended, and how that is reported to the
//! launcher.
use crate::backend::Communicator;
use crate::error::Failure;
use crate::panic::lock;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::error::{FILE_VARIABLE, RankError};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// One rank's job: its group of all ranks, and all groups that are split off from that one.
pub(crate) struct Job {
    /// The launcher's number of each rank of the group of all ranks; without a launcher, its number in that group.
    pub(super) ranks: Vec<usize>,
    /// Whether a launcher has started the ranks as its processes.
    pub(super) has_launcher: bool,
    /// The last errors of calls that the program has not got over, which it may return in its own words.
    noted: Mutex<VecDeque<Noted>>,
    has_noted: AtomicBool,
    /// The reason why the group of all ranks ends: see [`end`](Self::end).
    ended: OnceLock<Failure>,
    /// Whether another rank has made a group fail, or has left it, and a call has said so.
    has_echo: AtomicBool,
    /// The other groups, while they exist.
    groups: Mutex<Vec<Listed>>,
    /// The number of groups so far.
    count: AtomicU64,
    /// Whether the launcher has been told how this rank fails, or need not be.
    is_told: AtomicBool,
}

/// The error of a call.
struct Noted {
    /// The number of the group that made the call.
    group: u64,
    /// It ends its group.
    is_last: bool,
    error: RankError,
}

/// A group that was split off.
struct Listed {
    /// The number of the group that it is a part of: either ends with the other.
    part_of: u64,
    global_ranks: Vec<usize>,
    communicator: Weak<dyn Communicator>,
}

impl Job {
    /// A job whose ranks have these numbers.
    pub(crate) fn new(ranks: Vec<usize>) -> Self {
        Self {
            ranks,
            has_launcher: true,
            noted: Mutex::default(),
            has_noted: AtomicBool::new(false),
            ended: OnceLock::new(),
            has_echo: AtomicBool::new(false),
            groups: Mutex::default(),
            count: AtomicU64::new(0),
            is_told: AtomicBool::new(false),
        }
    }

    /// A job of `world_size` ranks that are not a launcher's processes.
    pub(super) fn without_launcher(world_size: usize) -> Self {
        Self { has_launcher: false, ..Self::new((0..world_size).collect()) }
    }

    /// A number for the next group. The group of all ranks comes first.
    pub(super) fn number(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    /// Lists a group, which is a part of group number `part_of`.
    pub(super) fn list(&self, part_of: u64, global_ranks: &[usize], communicator: &Arc<dyn Communicator>) {
        let communicator = Arc::downgrade(communicator);
        let mut groups = lock(&self.groups);
        groups.retain(|group| group.communicator.strong_count() > 0);
        groups.push(Listed { part_of, global_ranks: global_ranks.to_vec(), communicator });
    }

    /// The listed groups that exist, with their ranks: the parts of group number `part_of`, or all.
    fn listed(&self, part_of: Option<u64>) -> Vec<(Vec<usize>, Arc<dyn Communicator>)> {
        let groups = lock(&self.groups);
        let chosen = groups.iter().filter(|group| part_of.is_none_or(|part_of| group.part_of == part_of));
        chosen.filter_map(|group| Some((group.global_ranks.clone(), group.communicator.upgrade()?))).collect()
    }

    /// The reason why a part of group number `part_of` has failed, if one has, with ranks numbered as in the group of all ranks.
    pub(super) fn failure_of_parts(&self, part_of: u64) -> Option<Error> {
        self.listed(Some(part_of)).iter().find_map(|(global_ranks, part)| {
            let error = part.failure()?;
            let number = |rank: usize| global_ranks.get(rank).copied();
            let in_all = error.failure().and_then(|failure| failure.renumbered(number));
            Some(in_all.map_or(error, Error::from))
        })
    }

    /// Ends the parts of group number `part_of`, or all groups that were split off, with `failure`, whose ranks are numbered
    /// as in the group of all ranks.
    pub(super) fn end_groups(&self, part_of: Option<u64>, failure: &Failure) {
        for (global_ranks, group) in self.listed(part_of) {
            match failure.renumbered(|rank| global_ranks.iter().position(|global| *global == rank)) {
                Some(failure) => group.fail(failure),
                // It is about ranks that this group does not have.
                None => group.abort(&failure.to_string()),
            }
        }
    }

    /// Records the error of a call in group number `group`, which has ended with it if `is_last`.
    pub(super) fn note(&self, group: u64, is_last: bool, error: RankError) {
        const MOST: usize = 16;
        let mut noted = lock(&self.noted);
        if noted.len() == MOST {
            noted.pop_front();
        }
        noted.push_back(Noted { group, is_last, error });
        self.has_noted.store(true, Ordering::Relaxed);
    }

    /// Records that a call in group number `group` is complete: the program has got over errors of earlier ones.
    pub(super) fn note_success(&self, group: u64) {
        if self.has_noted.load(Ordering::Relaxed) {
            let mut noted = lock(&self.noted);
            noted.retain(|noted| noted.group != group || noted.is_last);
            self.has_noted.store(!noted.is_empty(), Ordering::Relaxed);
        }
    }

    /// The last recorded error that the program has not got over.
    pub(super) fn noted(&self) -> Option<RankError> {
        lock(&self.noted).back().map(|noted| noted.error.clone())
    }

    /// Records that a call has returned a failure of some group that another rank has caused.
    pub(super) fn note_echo(&self) {
        self.has_echo.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_echo(&self) -> bool {
        self.has_echo.load(Ordering::Relaxed)
    }

    /// Records why the group of all ranks ends, with ranks numbered as in that group, unless the reason is known already. Either
    /// one of its calls has returned this failure, or a process has ended, and a call in any group has noticed it.
    pub(super) fn end(&self, failure: Failure) {
        // The first reason stays.
        let _ = self.ended.set(failure);
    }

    pub(super) fn ended(&self) -> Option<&Failure> {
        self.ended.get()
    }

    /// Records that the launcher is told, or need not be; returns whether that was already so.
    pub(super) fn conclude(&self) -> bool {
        self.is_told.swap(true, Ordering::Relaxed)
    }
}

/// Tells the launcher how this rank fails, if it asked for that. If this goes wrong, the program does not fail for it.
pub(super) fn tell(told: Option<RankError>) {
    let Some((told, path)) = told.zip(path()) else { return };
    let write = || -> Result<()> {
        let content = told.to_json().to_string();
        let file = PreparedFile::create_over_links(&path)?;
        file.fill(&Progress::default(), |file| file.write_all(content.as_bytes()))?;
        Ok(file.commit()?)
    };
    if let Err(error) = write() {
        log::warn!("rank {}: cannot tell the launcher why this rank fails: {error}", told.rank);
    }
}

/// Tells the launcher of an error of this process while it has no group. `number` returns the launcher's number of a
/// rank that the error names.
pub(crate) fn tell_error(rank: Option<usize>, error: &Error, number: impl Fn(usize) -> Option<usize>) {
    // A rank that is no number is an error by itself, and has no number to tell.
    let own = || PROCESS.number("RANK").ok().flatten();
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
    PROCESS.path(FILE_VARIABLE)
}
