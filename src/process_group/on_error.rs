use super::{InitOptions, Inner, ProcessGroup, init_process_group, job};
use crate::Error;
use crate::error::RankError;
use crate::panic::panic_message;
use candle_ddp_rendezvous::error::OF_PROGRAM;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs a distributed program: [`init_process_group`] with default options, then `program` under
/// [`abort_on_error`](ProcessGroup::abort_on_error). If `program` fails on this rank, the other ranks get its error at once.
/// Started without a launcher, the program is a world of one rank.
///
/// ```no_run
/// fn main() -> candle_ddp::Result<()> {
///     candle_ddp::run(|pg| {
///         println!("rank {} of {}", pg.rank(), pg.world_size());
///         Ok(())
///     })
/// }
/// ```
///
/// # Errors
/// Those of [`init_process_group`] and of `program`. The error type can be `anyhow::Error` or a type of the program.
pub fn run<T, E: Display + From<Error>>(program: impl FnOnce(&ProcessGroup) -> Result<T, E>) -> Result<T, E> {
    let group = init_process_group(InitOptions::default())?;
    group.abort_on_error(|| program(&group))
}

impl ProcessGroup {
    /// Runs `body`, such as a program's training, and [aborts](Self::abort) the group with the reason if it returns an
    /// error or panics. The other ranks then get that reason at once, as
    /// [`Failure::PeerFailed`](crate::Failure::PeerFailed); otherwise they would only see this rank leave.
    ///
    /// Under `ddprun` or torchrun, the launcher gets the error as well, with the rank that caused it
    /// (`TORCHELASTIC_ERROR_FILE`).
    ///
    /// An error that comes from the group itself, such as another rank's failure, is not changed on any rank.
    ///
    /// ```no_run
    /// # use candle_ddp::{InitOptions, ProcessGroup, Result, init_process_group};
    /// # fn train(pg: &ProcessGroup) -> Result<()> { Ok(()) }
    /// fn main() -> Result<()> {
    ///     let pg = init_process_group(InitOptions::default())?;
    ///     pg.abort_on_error(|| train(&pg))
    /// }
    /// ```
    pub fn abort_on_error<T, E: Display>(&self, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        match catch_unwind(AssertUnwindSafe(body)) {
            // The group keeps its first failure. The alternate form of an error, such as one of `anyhow`, may say more.
            Ok(result) => result.inspect_err(|error| self.fail(&format!("{error:#}"))),
            Err(panic) => {
                self.fail(&panic_message(&*panic));
                resume_unwind(panic)
            }
        }
    }

    /// Ends the group because this rank's program fails for `reason`, and tells the launcher.
    pub(crate) fn fail(&self, reason: &str) {
        let told = self.failure_to_tell(reason);
        // The other ranks come first: the launcher's disk may be slow.
        self.abort(reason);
        job::tell(told);
    }

    /// The error of all ranks when `rank` failed for `reason` in something that all ranks do together.
    pub(crate) fn rank_failed(&self, rank: usize, reason: String) -> Error {
        self.names_a_rank(Error::RankFailed { rank, reason })
    }

    /// Records an error that names a rank of this group.
    pub(crate) fn names_a_rank(&self, error: Error) -> Error {
        if let Some((job, told)) = self.0.job.as_ref().zip(self.0.rank_error(&error)) {
            job.note(told);
        }
        error
    }

    /// The report to the launcher when this rank's program fails with `message`. Call it before this rank ends the
    /// group for that reason.
    fn failure_to_tell(&self, message: &str) -> Option<RankError> {
        let job = self.0.job.as_ref()?;
        let rank = self.0.number(self.rank())?;
        // The group may also have failed because other ranks ended earlier, for the same reason.
        let is_returned = |error: &RankError| message.contains(&error.message);
        let cause = job.noted(is_returned).or_else(|| self.0.group_error().filter(is_returned));
        let (culprit, variant) = cause.map_or((None, OF_PROGRAM.to_string()), |cause| (cause.culprit, cause.variant));
        job.end();
        Some(RankError { rank, culprit, variant, message: message.to_string() })
    }

    /// Records that the launcher needs no report of this group's failure, since the program continues without the group.
    pub(crate) fn survives_failure(&self) {
        if let Some(job) = &self.0.job {
            job.end();
        }
    }
}

impl Inner {
    /// The launcher's number of a rank of this group.
    fn number(&self, rank: usize) -> Option<usize> {
        self.job.as_ref()?.ranks.get(*self.global_ranks.get(rank)?).copied()
    }

    fn rank_error(&self, error: &Error) -> Option<RankError> {
        Some(error.of_rank(self.number(self.communicator.rank())?, |rank| self.number(rank)))
    }

    /// Why this group has failed.
    fn group_error(&self) -> Option<RankError> {
        self.rank_error(&self.communicator.failure()?)
    }

    /// Tells the launcher why the group of all ranks has failed, unless the program has said how it ends.
    pub(super) fn tell_end(&self) {
        let Some(job) = self.job.as_ref().filter(|job| job.ranks.len() == self.global_ranks.len()) else { return };
        // A process may end after its last call without leaving the group, so an end only counts if a call has reported
        // it.
        let is_known = |told: &RankError| !told.says_gone() || job.noted(|named| named == told).is_some();
        if let Some(told) = self.group_error().filter(is_known)
            && !job.end()
        {
            job::tell(Some(told));
        }
    }
}
