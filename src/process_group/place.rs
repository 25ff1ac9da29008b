//! A group's place in its job.
use super::job::Job;
use super::whole::Whole;
use crate::backend::{Communicator, Completion, Work};
use crate::error::{Failure, RankError};
use crate::{Error, Result};
use candle_ddp_engine::standing::Membership;
use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

/// Which of the groups of a job a group is, and how its ranks are numbered in the group of all ranks.
pub(super) struct Place {
    pub(super) job: Arc<Job>,
    /// Its number among the groups of the job, and the number of the group that it is a part of.
    number: u64,
    part_of: u64,
    /// This rank's number in the group.
    rank: usize,
    pub(super) global_ranks: Vec<usize>,
    /// Its place for the engine.
    pub(super) membership: Membership,
    /// The whole group, for a part that does not have all its ranks.
    whole: Option<Whole>,
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

    /// The place of a part of this group with some of its ranks: either ends with the other.
    pub(super) fn split_part(&self, names: (&str, &str), whole: Whole, ranks: &[usize], rank: usize) -> Self {
        Self { part_of: self.part_of, whole: Some(whole), ..self.split(names, ranks, rank) }
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

    /// The reason why a part of this group has failed, if one has.
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
        failure.renumbered(|rank| self.global_ranks.get(rank).copied())
    }

    /// Records the error of a call, and of the construction, of the group. Returns how the program is told.
    pub(super) fn note(&self, error: Error) -> Error {
        let Some(failure) = error.failure() else {
            self.job.note(self.number, false, self.told(&error));
            return error;
        };
        if error.is_echo(self.rank) {
            self.job.note_echo();
        }
        let in_all = self.in_all(failure);
        let told = match (&self.whole, self.global_ranks.get(self.rank)) {
            (Some(whole), Some(own)) => in_all.map(|failure| whole.tell(failure, *own, &self.global_ranks)),
            _ => in_all,
        };
        if let Some(told) = &told
            && (self.is_of_all() || matches!(told, Failure::PeerGone { .. }))
        {
            self.job.end(told.clone());
        }
        match (told, &self.whole) {
            (Some(told), Some(_)) => {
                let error = Error::from(told);
                self.job.note(self.number, true, self.told_in_all(&error));
                error
            }
            _ => {
                let error = Error::from(self.named(failure.clone()));
                self.job.note(self.number, true, self.told(&error));
                error
            }
        }
    }

    /// Records the error of a call, or its success, and returns how the program is told.
    pub(super) fn noted(&self, result: Result<()>) -> Result<()> {
        result.map_err(|error| self.note(error)).inspect(|()| self.job.note_success(self.number))
    }

    /// `failure`, which names its group if its ranks have other numbers in the group of all ranks.
    fn named(&self, failure: Failure) -> Failure {
        match self.global_ranks.iter().enumerate().all(|(rank, global)| rank == *global) {
            true => failure,
            false => failure.within(&self.global_ranks),
        }
    }

    /// `work`, whose error is [noted](Self::note) when it is waited for.
    pub(super) fn noting(self: &Arc<Self>, work: Work) -> Work {
        Work::new(Noting { work, place: Arc::clone(self) })
    }

    /// The reason why the job has ended, with ranks numbered as in this group, if that ends this group too: it is the group of all
    /// ranks, or has the process that has ended.
    pub(super) fn ended(&self) -> Option<Failure> {
        let ended = self.job.ended()?;
        let concerns_all = self.is_of_all() || matches!(ended, Failure::PeerGone { .. });
        concerns_all.then(|| Some(self.named(ended.renumbered(|rank| self.number_here(rank))?))).flatten()
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

    /// The reason why the job has ended, as it is reported to the launcher.
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
        self.place.noted(self.work.wait())
    }

    fn synchronize(&self) -> Result<()> {
        self.place.noted(self.work.synchronize())
    }

    fn is_completed(&self) -> bool {
        self.work.is_completed()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.work.span()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.work.as_any()
    }
}
