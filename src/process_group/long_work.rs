//! Work that may take longer than a collective, such as writing a large file.
use super::ProcessGroup;
use crate::panic::panic_message;
use crate::state::FileHash;
use crate::state::file::{NextPart, PreparedFile, Progress, WriteJob};
use crate::{Error, Result, thread};
use candle_core::Tensor;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
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
        self.agree_on_work(|progress, _| work(progress), STUCK.max(self.timeout()), &mut || Ok(None))
    }

    /// As [`agree_on_long_work`](Self::agree_on_long_work). If rank 0's work asks for a part, all ranks call `send`, which returns it on
    /// rank 0.
    fn agree_on_work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Progress, &mut NextPart) -> Result<T> + Send + 'static,
        stuck: Duration,
        send: &mut dyn FnMut() -> Result<Option<Tensor>>,
    ) -> Result<T> {
        const WORKING: &str = "working";
        const ASKING: &str = "asking";
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
            state = state.and_then(|state| self.failed().map(|()| state));
            let report = match &state {
                Ok(State::Working(background)) if background.asks => Ok(ASKING),
                Ok(State::Working(_)) => Ok(WORKING),
                Ok(State::Done(_)) => Ok(""),
                Err(error) => Err(error),
            };
            let reports = self.gather_reports(report);
            let own = state?;
            let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
            let part = match reports[0] == ASKING {
                // Others may be sending already, and would not hear of it otherwise.
                true => send().inspect_err(|error| self.abort(&error.to_string()))?,
                false => None,
            };
            state = Ok(match own {
                State::Done(value) if reports.iter().all(String::is_empty) => return Ok(value),
                State::Working(background) => State::Working(background.give(part)),
                done => done,
            });
        }
    }

    /// Writes the files of all ranks that have some, like [`agree_on_long_work`](Self::agree_on_long_work). They are
    /// renamed once all are on disk and the group is known to be healthy; otherwise the old files stay. Returns the hashes of
    /// this rank's files.
    pub(crate) fn write_together(
        &self,
        files: Result<impl IntoIterator<Item = WriteJob> + Send + 'static>,
    ) -> Result<Vec<FileHash>> {
        self.write_sent(files, &mut || Ok(None))
    }

    /// As [`write_together`](Self::write_together), for files of rank 0 with values that the ranks send while it writes: all ranks call
    /// `send` for each part, which returns it on rank 0.
    pub(crate) fn write_sent(
        &self,
        files: Result<impl IntoIterator<Item = WriteJob> + Send + 'static>,
        send: &mut dyn FnMut() -> Result<Option<Tensor>>,
    ) -> Result<Vec<FileHash>> {
        let write = |progress: &Progress, next: &mut NextPart| {
            files?.into_iter().map(|file| file.run(progress, next)).collect::<Result<Vec<_>>>()
        };
        let written = self.agree_on_work(write, STUCK.max(self.timeout()), send)?;
        let (written, hashes): (Vec<_>, Vec<_>) = written.into_iter().unzip();
        self.agree_on_long_work(|_| Ok(written.into_iter().try_for_each(PreparedFile::commit)?))?;
        Ok(hashes)
    }
}

/// A thread's report about its work.
enum Event<T> {
    /// It needs a part.
    Asks,
    Done(Result<T>),
}

enum State<T> {
    Working(Background<T>),
    Done(T),
}

/// A thread that runs work. Dropping this tells it to stop.
struct Background<T> {
    progress: Arc<Progress>,
    events: Receiver<Event<T>>,
    /// For the parts that it asks for.
    parts: Option<Sender<Tensor>>,
    /// Whether it waits for a part.
    asks: bool,
    thread: Option<JoinHandle<()>>,
    stuck: Duration,
    /// Its last progress, and when that was first seen.
    seen: (u64, Instant),
}

impl<T: Send + 'static> Background<T> {
    fn start(
        work: impl FnOnce(&Progress, &mut NextPart) -> Result<T> + Send + 'static,
        stuck: Duration,
    ) -> Result<Self> {
        let progress = Arc::new(Progress::default());
        let (sender, events) = mpsc::channel();
        let (parts, sent) = mpsc::channel();
        let body = {
            let progress = Arc::clone(&progress);
            // Nothing receives the events after the work was cancelled.
            move || {
                let mut asked = 0;
                let mut next = || {
                    // The part after this one comes while this one is written.
                    while asked < 2 {
                        drop(sender.send(Event::Asks));
                        asked += 1;
                    }
                    let part = sent.recv().map_err(|_| io::Error::other("it was cancelled"))?;
                    asked -= 1;
                    progress.step().map(|()| part)
                };
                let result = work(&progress, &mut next);
                drop(sender.send(Event::Done(result)));
            }
        };
        let thread = Some(thread::spawn("ddp-save", body)?);
        Ok(Self { progress, events, parts: Some(parts), asks: false, thread, stuck, seen: (0, Instant::now()) })
    }

    /// Hands over the part that it asks for.
    fn give(mut self, part: Option<Tensor>) -> Self {
        if let (Some(part), Some(parts)) = (part, &self.parts) {
            // If it has ended, the reason comes as an event.
            let _ = parts.send(part);
        }
        self.asks = false;
        self
    }

    /// Waits for `interval`, or until the work is done or asks for a part.
    fn wait(mut self, interval: Duration) -> Result<State<T>> {
        match self.events.recv_timeout(interval) {
            Ok(Event::Done(result)) => result.map(State::Done),
            Ok(Event::Asks) => {
                self.asks = true;
                Ok(State::Working(self))
            }
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
        self.parts = None;
        // Its temporary files should be gone before the error is returned. If it is done, there is nothing to wait for.
        while let Ok(Event::Asks) = self.events.recv_timeout(PATIENCE.min(self.stuck)) {}
    }
}

#[cfg(test)]
pub(super) mod tests;
