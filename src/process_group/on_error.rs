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
/// candle's backward pass recurses once per operation of the graph. On Linux, the main thread's stack may therefore grow to
/// 64 MiB, instead of the usual 8, from [`init_process_group`] on: enough for 50,000 operations. A thread of the program that
/// calls `backward` needs such a stack too ([`std::thread::Builder::stack_size`]).
///
/// ```
/// fn main() -> candle_ddp::Result<()> {
///     candle_ddp::run(|pg| {
///         println!("rank {} of {}", pg.rank(), pg.world_size());
///         Ok(())
///     })
/// }
/// ```
///
/// # Errors
/// The errors of [`init_process_group`] and of `program`. The error type can be `anyhow::Error` or a type of the program.
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
    /// An error that comes from the group itself, such as another rank's failure, is not changed on any rank. If a call of the group
    /// has returned one, and none has succeeded since, the launcher takes that for the cause, in whatever words `body` returns it.
    ///
    /// ```
    /// # use candle_ddp::{InitOptions, ProcessGroup, Result, init_process_group};
    /// # fn train(pg: &ProcessGroup) -> Result<()> { Ok(()) }
    /// fn main() -> Result<()> {
    ///     let pg = init_process_group(InitOptions::default())?;
    ///     pg.abort_on_error(|| train(&pg))
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns the error of `body`.
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
        self.note(Error::RankFailed { rank, reason })
    }

    /// Records an error of this group, which the program may return in its own words.
    pub(crate) fn note(&self, error: Error) -> Error {
        self.0.place.note(error)
    }

    /// The report to the launcher when this rank's program fails with `message`. Call it before this rank ends the
    /// group for that reason.
    fn failure_to_tell(&self, message: &str) -> Option<RankError> {
        let (place, job) = (&self.0.place, &self.0.place.job);
        let rank = place.own_number();
        if !job.has_launcher {
            return None;
        }
        // The group may also have failed because other ranks ended earlier, for the same reason: that counts only if a call
        // has returned it. In which words the program tells it does not.
        let cause = job.noted();
        let (culprit, variant) = cause.map_or((None, OF_PROGRAM.to_string()), |cause| (cause.culprit, cause.variant));
        job.conclude();
        Some(RankError { rank, culprit, variant, message: message.to_string() })
    }

    /// Records that the launcher needs no report of this group's failure, since the program continues without the group.
    pub(crate) fn survives_failure(&self) {
        self.0.place.job.conclude();
    }
}

impl Inner {
    /// The reason why this group has failed.
    fn group_error(&self) -> Option<RankError> {
        Some(self.place.told(&self.communicator.failure()?))
    }

    /// Tells the launcher why the group of all ranks has failed, unless the program has said how it ends.
    pub(super) fn tell_end(&self) {
        let job = &self.place.job;
        if !self.place.is_all() || !job.has_launcher {
            return;
        }
        // A process may end after its last call without leaving the group, so an end only counts if a call has reported
        // it.
        let told = self.place.told_end().or_else(|| self.group_error().filter(|told| !told.says_gone()));
        if let Some(told) = told
            && !job.conclude()
        {
            job::tell(Some(told));
        }
    }
}
