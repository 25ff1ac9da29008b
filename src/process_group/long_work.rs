//! Work that may take longer than a collective, such as writing a large file.
use super::ProcessGroup;
use crate::panic::panic_message;
use crate::state::file::{PreparedFile, Progress, WriteJob};
use crate::{Error, Result};
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work is given up without any progress for this long, or for the group's time-out if that is longer.
const STUCK: Duration = Duration::from_secs(600);

impl ProcessGroup {
    /// [`agree`](Self::agree) about what `work` returns, which may take longer than the group's time-out as long as it
    /// makes progress: it runs on a thread of its own, while the ranks tell each other that they are there. Every rank
    /// calls it. When one fails, the others' work is called off, and what it returns is dropped.
    ///
    /// When it returns, everything that the group did before is known to have succeeded.
    pub(crate) fn agree_on_long_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Progress) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.agree_on_work(work, STUCK.max(self.timeout()))
    }

    fn agree_on_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Progress) -> Result<T> + Send + 'static,
        stuck: Duration,
    ) -> Result<T> {
        const WORKING: &str = "working";
        // Ranks without work wait in the exchange of reports, which has the group's time-out. All hear of a failure soon.
        let interval = (self.timeout() / 4).min(stuck).min(Duration::from_secs(1));
        let mut state = Background::start(work, stuck).map(State::Working);
        loop {
            state = match state {
                Ok(State::Working(background)) => background.wait(interval),
                ended => ended,
            };
            // An engine may end failed calls as if they were complete: their results must not be used.
            state = state.and_then(|state| self.failure().map_or(Ok(state), Err));
            let report = match &state {
                Ok(State::Working(_)) => Ok(WORKING),
                Ok(State::Done(_)) => Ok(""),
                Err(error) => Err(error),
            };
            let reports = self.gather_reports(report);
            let own = state?;
            let reports = reports?.map_err(|(rank, reason)| Error::RankFailed { rank, reason })?;
            state = match own {
                State::Done(value) if reports.iter().all(|report| report != WORKING) => return Ok(value),
                own => Ok(own),
            };
        }
    }

    /// Writes the files of all ranks that have one, as [`agree_on_long_work`](Self::agree_on_long_work) does. They take
    /// their names once all are on the disk, and the group is known to be well: otherwise what was there stays.
    pub(crate) fn write_together(&self, file: Result<Option<WriteJob>>) -> Result<()> {
        let written = self.agree_on_long_work(|progress| file?.map(|file| file.run(progress)).transpose())?;
        self.agree_on_long_work(|_| written.map_or(Ok(()), PreparedFile::commit))
    }

    /// Why this group, or the one that its layers use, has ended, if it is known.
    fn failure(&self) -> Option<Error> {
        let own = self.0.communicator.failure();
        own.or_else(|| match self.0.companion.try_lock() {
            Ok(companion) => companion.as_ref()?.failure(),
            Err(TryLockError::Poisoned(companion)) => companion.into_inner().as_ref()?.failure(),
            // That group is being made, and has done nothing yet.
            Err(TryLockError::WouldBlock) => None,
        })
    }
}

enum State<T> {
    Working(Background<T>),
    Done(T),
}

/// A thread that works. Dropping this tells it to stop.
struct Background<T> {
    progress: Arc<Progress>,
    result: Receiver<Result<T>>,
    thread: Option<JoinHandle<()>>,
    stuck: Duration,
    /// Its last progress, and since when it has been that.
    seen: (u64, Instant),
}

impl<T: Send + 'static> Background<T> {
    fn start(work: impl FnOnce(&Progress) -> Result<T> + Send + 'static, stuck: Duration) -> Result<Self> {
        let progress = Arc::new(Progress::default());
        let (sender, result) = mpsc::channel();
        let body = {
            let progress = Arc::clone(&progress);
            // Nothing receives the result any more when the work was called off.
            move || drop(sender.send(work(&progress)))
        };
        let thread = std::thread::Builder::new()
            .name("ddp-save".to_string())
            .spawn(body)
            .map_err(|error| Error::io("starting a thread", error))?;
        Ok(Self { progress, result, thread: Some(thread), stuck, seen: (0, Instant::now()) })
    }

    /// Waits for `interval`, or until the work is done.
    fn wait(mut self, interval: Duration) -> Result<State<T>> {
        match self.result.recv_timeout(interval) {
            Ok(result) => result.map(State::Done),
            Err(RecvTimeoutError::Timeout) => {
                let (steps, now) = (self.progress.steps(), Instant::now());
                if steps != self.seen.0 {
                    self.seen = (steps, now);
                }
                let pause = now - self.seen.1;
                if pause < self.stuck {
                    return Ok(State::Working(self));
                }
                let reason = format!("there was no progress for {pause:?}: does the file system still answer?");
                Err(Error::io("writing", io::Error::new(io::ErrorKind::TimedOut, reason)))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.thread.take().map(JoinHandle::join);
                let reason = ended.and_then(|ended| ended.err().map(|panic| panic_message(&*panic)));
                Err(Error::io("writing", io::Error::other(reason.unwrap_or_else(|| "its thread ended".to_string()))))
            }
        }
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        /// Work that does not end by then is stuck in the system, for example on a file system that does not answer. Its
        /// result is dropped when it ends.
        const PATIENCE: Duration = Duration::from_secs(5);
        self.progress.cancel();
        // What it has written should be gone when the error is returned. If it was done, there is nothing to wait for.
        drop(self.result.recv_timeout(PATIENCE.min(self.stuck)));
    }
}

#[cfg(test)]
mod tests;
