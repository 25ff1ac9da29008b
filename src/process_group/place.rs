//! A group's place in its job.
use super::job::Job;
use crate::backend::{Communicator, Completion, Work};
use crate::error::{Failure, RankError, ranks};
use crate::{Error, Result};
use candle_ddp_engine::standing::Membership;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Which of the groups of a job a group is, and how its ranks are numbered in the group of all ranks.
pub(super) struct Place {
    pub(super) job: Arc<Job>,
    /// Its number among the groups of the job, and the number of the group of which it is a part.
    number: u64,
    part_of: u64,
    /// This rank's number in the group.
    rank: usize,
    pub(super) global_ranks: Vec<usize>,
    /// Its place for the engine.
    pub(super) membership: Membership,
    /// Of a part that does not have all ranks of its group.
    whole: Option<Whole>,
}

/// The group of which some ranks form a part that the program does not know, and how the part's failure is told: as one of the
/// group of all ranks.
#[derive(Clone)]
struct Whole {
    communicator: Weak<dyn Communicator>,
    global_ranks: Vec<usize>,
    /// What the part's calls return once it has failed.
    told: Arc<OnceLock<Failure>>,
}

impl Place {
    /// The place of the group of all ranks.
    pub(super) fn of_all(job: Job, rank: usize, world_size: usize) -> Self {
        let number = job.number();
        let (job, global_ranks) = (Arc::new(job), (0..world_size).collect());
        let membership = Membership::of_all(rank, world_size);
        Self { job, number, part_of: number, rank, global_ranks, membership, whole: None }
    }

    /// The place of a group that is split off from this one: `ranks[i]` here is rank `i` there, of which this rank is number
    /// `rank`. Its keys have the prefix `key`; messages call it `kind`.
    pub(super) fn split(&self, (key, kind): (&str, &str), ranks: &[usize], rank: usize) -> Self {
        let number = self.job.number();
        let global_ranks: Vec<usize> = ranks.iter().map(|rank| self.global_ranks[*rank]).collect();
        let membership = self.membership.of_subgroup(key, kind, global_ranks.clone());
        Self { job: Arc::clone(&self.job), number, part_of: number, rank, global_ranks, membership, whole: None }
    }

    /// The place of a part of this group, which `communicator` connects, with some of its ranks: either ends with the other.
    pub(super) fn split_part(
        &self,
        names: (&str, &str),
        communicator: &Arc<dyn Communicator>,
        ranks: &[usize],
        rank: usize,
    ) -> Self {
        let (communicator, global_ranks) = (Arc::downgrade(communicator), self.global_ranks.clone());
        let whole = Some(Whole { communicator, global_ranks, told: Arc::default() });
        Self { part_of: self.part_of, whole, ..self.split(names, ranks, rank) }
    }

    /// The place of a group of the same ranks that is a part of this one: either ends with the other.
    pub(super) fn part(&self, names: (&str, &str)) -> Self {
        let ranks: Vec<usize> = (0..self.global_ranks.len()).collect();
        Self { part_of: self.part_of, whole: self.whole.clone(), ..self.split(names, &ranks, self.rank) }
    }

    /// The same place, of a group that continues when others fail.
    pub(super) fn outliving(self) -> Self {
        Self { membership: self.membership.outliving(), ..self }
    }

    /// This rank's number in the group.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Whether it is the group of all ranks, or a part of that group.
    fn is_of_all(&self) -> bool {
        self.part_of == 0
    }

    /// Whether it is the group of all ranks.
    pub(super) fn is_all(&self) -> bool {
        self.number == 0
    }

    /// Lists the group in its job, so that it ends when the whole job does.
    pub(super) fn list(&self, communicator: &Arc<dyn Communicator>) {
        self.job.list(self.part_of, &self.global_ranks, communicator);
    }

    /// Why a part of this group has failed, if one has.
    pub(super) fn failure_of_parts(&self) -> Option<Error> {
        let error = self.job.failure_of_parts(self.number)?;
        let here = error.failure().and_then(|failure| failure.renumbered(|rank| self.number_here(rank)));
        Some(here.map_or(error, Error::from))
    }

    /// The number in this group of a rank of the group of all ranks.
    fn number_here(&self, rank: usize) -> Option<usize> {
        self.global_ranks.iter().position(|global| *global == rank)
    }

    /// Ends the parts of this group with its `failure`.
    pub(super) fn end_parts(&self, failure: &Failure) {
        if let Some(failure) = self.in_all(failure) {
            self.job.end_groups(Some(self.number), &failure);
        }
    }

    /// `failure` with ranks numbered as in the group of all ranks.
    fn in_all(&self, failure: &Failure) -> Option<Failure> {
        let number = |rank: usize| self.global_ranks.get(rank).copied();
        let mut failure = failure.renumbered(number)?;
        let is_renumbered = self.global_ranks.iter().enumerate().any(|(rank, global)| rank != *global);
        // Its text names ranks, too.
        if let Failure::TimedOut { waiting_for, reason, .. } = &mut failure
            && (is_renumbered && self.whole.is_some())
        {
            let (missing, all) = (ranks(waiting_for), ranks(&self.global_ranks));
            *reason = format!(
                "of its group of the ranks {all}, {missing} are missing. Numbered from 0 in that group, {reason}"
            );
        }
        Some(failure)
    }

    /// Records the error of a call, and of the construction, of the group. Returns how the program is told.
    pub(super) fn note(&self, error: Error) -> Error {
        let Some(failure) = error.failure() else {
            self.job.note(self.told(&error));
            return error;
        };
        if error.is_echo(self.rank) {
            self.job.note_echo();
        }
        let told = match &self.whole {
            Some(whole) => self.told_by_whole(whole, failure),
            None => self.in_all(failure),
        };
        if let Some(told) = &told
            && (self.is_of_all() || matches!(told, Failure::PeerGone { .. }))
        {
            self.job.end(told.clone());
        }
        match (told, &self.whole) {
            (Some(told), Some(_)) => {
                let error = Error::from(told);
                self.job.note(self.told_in_all(&error));
                error
            }
            _ => {
                self.job.note(self.told(&error));
                error
            }
        }
    }

    /// The `failure` of this part, with ranks numbered as in the group of all ranks. If the `whole` has failed, that is the reason. It may
    /// take a moment until this rank knows: a rank whose program fails leaves the part first.
    fn told_by_whole(&self, whole: &Whole, failure: &Failure) -> Option<Failure> {
        const PATIENCE: Duration = Duration::from_secs(5);
        if let Some(told) = whole.told.get() {
            return Some(told.clone());
        }
        let may_follow = match failure {
            Failure::PeerLeft { .. } => true,
            Failure::PeerFailed { peer, .. } => *peer != self.rank,
            _ => false,
        };
        let deadline = Instant::now() + if may_follow { PATIENCE } else { Duration::ZERO };
        let reason = loop {
            let communicator = whole.communicator.upgrade();
            let known = communicator.as_ref().and_then(|communicator| communicator.failure());
            if known.is_some() || communicator.is_none() || Instant::now() >= deadline {
                break known;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let number = |rank: usize| whole.global_ranks.get(rank).copied();
        let reason = reason.as_ref().and_then(|error| error.failure()?.renumbered(number));
        let told = reason.or_else(|| self.in_all(failure))?;
        Some(whole.told.get_or_init(|| told).clone())
    }

    /// `work`, whose error is [noted](Self::note) when it is waited for.
    pub(super) fn noting(self: &Arc<Self>, work: Work) -> Work {
        Work::new(Noting { work, place: Arc::clone(self) })
    }

    /// Why the job has ended, with ranks numbered as in this group, if that ends this group too: it is the group of all
    /// ranks, or has the process that has ended.
    pub(super) fn ended(&self) -> Option<Failure> {
        let ended = self.job.ended()?;
        let concerns_all = self.is_of_all() || matches!(ended, Failure::PeerGone { .. });
        concerns_all.then(|| ended.renumbered(|rank| self.number_here(rank))).flatten()
    }

    /// The launcher's number of a rank of this group.
    fn number_of(&self, rank: usize) -> Option<usize> {
        self.job.ranks.get(*self.global_ranks.get(rank)?).copied()
    }

    /// The launcher's number of this rank.
    pub(super) fn own_number(&self) -> usize {
        self.number_of(self.rank).unwrap_or(self.rank)
    }

    /// An error of this group as it is reported to the launcher.
    pub(super) fn told(&self, error: &Error) -> RankError {
        error.of_rank(self.own_number(), |rank| self.number_of(rank))
    }

    /// Why the job has ended, as it is reported to the launcher.
    pub(super) fn told_end(&self) -> Option<RankError> {
        Some(self.told_in_all(&Error::from(self.job.ended()?.clone())))
    }

    /// An error whose ranks are numbered as in the group of all ranks, as it is reported to the launcher.
    fn told_in_all(&self, error: &Error) -> RankError {
        error.of_rank(self.own_number(), |rank| self.job.ranks.get(rank).copied())
    }
}

/// A call in flight whose error is noted.
struct Noting {
    work: Work,
    place: Arc<Place>,
}

impl Completion for Noting {
    fn wait(&self) -> Result<()> {
        self.work.wait().map_err(|error| self.place.note(error))
    }

    fn synchronize(&self) -> Result<()> {
        self.work.synchronize().map_err(|error| self.place.note(error))
    }

    fn is_completed(&self) -> bool {
        self.work.is_completed()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.work.span()
    }
}
