use super::ProcessGroup;
use crate::panic::panic_message;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl ProcessGroup {
    /// Runs `body`, such as a program's training, and [aborts](Self::abort) the group with the reason if it returns an
    /// error or panics. The other ranks then get that reason at once, as
    /// [`Failure::PeerFailed`](crate::error::Failure::PeerFailed); otherwise they would only see this rank leave.
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
            // The group keeps its first failure. An error's alternate form may say more, as that of `anyhow` does.
            Ok(result) => result.inspect_err(|error| self.abort(&format!("{error:#}"))),
            Err(panic) => {
                self.abort(&panic_message(&*panic));
                resume_unwind(panic)
            }
        }
    }
}
