//! A group's place in its job.
use super::job::Job;
use crate::backend::{Communicator, Completion, Work};
use crate::error::{Failure, RankError};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

/// Which of the groups of a job a group is, and how its ranks are numbered in the group of all ranks.
pub(super) struct Place {
    pub(super) job: Arc<Job>,
    /// Its number among the groups of the job, and the number of the group of which it is a part.
    number: u64,
    part_of: u64,
    /// This rank's number in the group.
    rank: usize,
    pub(super) global_ranks: Vec<usize>,
}

impl Place {
    /// The place of the group of all ranks.
    pub(super) fn of_all(job: Job, rank: usize, world_size: usize) -> Self {
        let number = job.number();
        Self { job: Arc::new(job), number, part_of: number, rank, global_ranks: (0..world_size).collect() }
    }

    /// The place of a group that is split off from this one: `ranks[i]` here is rank `i` there, of which this rank is number
    /// `rank`.
    pub(super) fn split(&self, ranks: &[usize], rank: usize) -> Self {
        let number = self.job.number();
        let global_ranks = ranks.iter().map(|rank| self.global_ranks[*rank]).collect();
        Self { job: Arc::clone(&self.job), number, part_of: number, rank, global_ranks }
    }

    /// The place of a group of the same ranks that is a part of this one: either ends with the other.
    pub(super) fn part(&self) -> Self {
        let (job, number, global_ranks) = (Arc::clone(&self.job), self.job.number(), self.global_ranks.clone());
        Self { job, number, part_of: self.part_of, rank: self.rank, global_ranks }
    }

    /// Whether it is the group of all ranks, or a part of that group.
    pub(super) fn is_of_all(&self) -> bool {
        self.part_of == 0
    }

    /// Lists the group in its job, so that it ends when the whole job does.
    pub(super) fn list(&self, communicator: &Arc<dyn Communicator>) {
        self.job.list(self.part_of, &self.global_ranks, communicator);
    }

    /// Why a part of this group has failed, if one has.
    pub(super) fn failure_of_parts(&self) -> Option<Error> {
        self.job.failure_of_parts(self.number)
    }

    /// Ends the parts of this group with its `failure`.
    pub(super) fn end_parts(&self, failure: &Failure) {
        if let Some(failure) = self.in_all(failure) {
            self.job.end_groups(Some(self.number), &failure);
        }
    }

    /// `failure` with ranks numbered as in the group of all ranks.
    fn in_all(&self, failure: &Failure) -> Option<Failure> {
        failure.renumbered(|rank| self.global_ranks.get(rank).copied())
    }

    /// Records the error of a call, and of the construction, of the group.
    pub(super) fn note(&self, error: Error) -> Error {
        self.job.note(self.told(&error));
        if let Some(failure) = error.failure() {
            if error.is_echo(self.rank) {
                self.job.note_echo();
            }
            if (self.is_of_all() || matches!(failure, Failure::PeerGone { .. }))
                && let Some(failure) = self.in_all(failure)
            {
                self.job.end(failure);
            }
        }
        error
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
        let place = |rank: usize| self.global_ranks.iter().position(|global| *global == rank);
        concerns_all.then(|| ended.renumbered(place)).flatten()
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
        let error = Error::from(self.job.ended()?.clone());
        Some(error.of_rank(self.own_number(), |rank| self.job.ranks.get(rank).copied()))
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
