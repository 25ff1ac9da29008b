//! Work that may take longer than a collective, such as writing a large file.
use super::ProcessGroup;
use crate::panic::panic_message;
use crate::state::FileHash;
use crate::state::file::{PreparedFile, Progress, WriteJob};
use crate::{Error, Result, thread};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work without any progress for this long, or for the group's time-out if that is longer, is abandoned.
const STUCK: Duration = Duration::from_secs(600);

impl ProcessGroup {
    /// Like [`agree`](Self::agree) on the result of `work`, which may take longer than the group's time-out as long as
    /// it makes progress: it runs on a separate thread while the ranks report that they are alive. Every rank must call
    /// it. If one fails, the others' work is cancelled and its results are dropped.
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
        // Ranks without work wait in the exchange of reports, which has the group's time-out. All learn of a failure
        // soon.
        let interval = (self.timeout() / 4).min(stuck).min(Duration::from_secs(1));
        let mut state = Background::start(work, stuck).map(State::Working);
        loop {
            state = match state {
                Ok(State::Working(background)) => background.wait(interval),
                ended => ended,
            };
            // An engine may end failed calls as if they were complete; their results must not be used.
            state = state.and_then(|state| self.failure().map_or(Ok(state), Err));
            let report = match &state {
                Ok(State::Working(_)) => Ok(WORKING),
                Ok(State::Done(_)) => Ok(""),
                Err(error) => Err(error),
            };
            let reports = self.gather_reports(report);
            let own = state?;
            let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
            state = match own {
                State::Done(value) if reports.iter().all(|report| report != WORKING) => return Ok(value),
                own => Ok(own),
            };
        }
    }

    /// Writes the files of all ranks that have some, like [`agree_on_long_work`](Self::agree_on_long_work). They are
    /// renamed once all are on disk and the group is known to be healthy; otherwise the old files stay. Returns the hashes of
    /// this rank's files.
    pub(crate) fn write_together(
        &self,
        files: Result<impl IntoIterator<Item = WriteJob> + Send + 'static>,
    ) -> Result<Vec<FileHash>> {
        let write = |progress: &Progress| files?.into_iter().map(|file| file.run(progress)).collect::<Result<Vec<_>>>();
        let (written, hashes): (Vec<_>, Vec<_>) = self.agree_on_long_work(write)?.into_iter().unzip();
        self.agree_on_long_work(|_| Ok(written.into_iter().try_for_each(PreparedFile::commit)?))?;
        Ok(hashes)
    }
}

enum State<T> {
    Working(Background<T>),
    Done(T),
}

/// A thread that runs work. Dropping this tells it to stop.
struct Background<T> {
    progress: Arc<Progress>,
    result: Receiver<Result<T>>,
    thread: Option<JoinHandle<()>>,
    stuck: Duration,
    /// Its last progress, and when that was first seen.
    seen: (u64, Instant),
}

impl<T: Send + 'static> Background<T> {
    fn start(work: impl FnOnce(&Progress) -> Result<T> + Send + 'static, stuck: Duration) -> Result<Self> {
        let progress = Arc::new(Progress::default());
        let (sender, result) = mpsc::channel();
        let body = {
            let progress = Arc::clone(&progress);
            // Nothing receives the result after the work was cancelled.
            move || drop(sender.send(work(&progress)))
        };
        let thread = thread::spawn("ddp-save", body)?;
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
        /// Work that does not end by then is stuck in the system, for example on a file system that does not respond.
        /// Its result is dropped when it ends.
        const PATIENCE: Duration = Duration::from_secs(5);
        self.progress.cancel();
        // Its temporary files should be gone before the error is returned. If it is done, there is nothing to wait for.
        drop(self.result.recv_timeout(PATIENCE.min(self.stuck)));
    }
}

#[cfg(test)]
pub(super) mod tests;
