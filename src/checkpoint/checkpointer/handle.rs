//! The outcome of a save in the background.
use crate::panic::{lock, wait};
use crate::{Error, Result};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// A save that [`Checkpointer::save`](super::Checkpointer::save) has started and that continues in the background.
#[derive(Clone, Debug)]
pub struct SaveHandle(pub(super) Arc<Save>);

impl SaveHandle {
    /// Whether the save has ended, successfully or not.
    pub fn is_done(&self) -> bool {
        !matches!(*self.0.outcome(), Outcome::Running)
    }

    /// Waits until the checkpoint is complete and durable, on the disks of all ranks, and returns its folder. This
    /// does not communicate: any rank may call it.
    ///
    /// # Errors
    /// Returns, on every rank, why nothing was saved: the rank that failed gets its own error, the others
    /// [`Error::RankFailed`] with its text. The first call on a rank gets that error; later calls get its text as
    /// [`Error::Io`].
    pub fn wait(&self) -> Result<PathBuf> {
        self.0.wait()
    }
}

#[derive(Debug)]
pub(super) struct Save {
    step: u64,
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

#[derive(Debug)]
enum Outcome {
    Running,
    Saved(PathBuf),
    Failed(Error),
    /// The failure's text, after a call has taken the error itself.
    Reported(String),
}

impl Save {
    pub(super) fn new(step: u64) -> Arc<Self> {
        Arc::new(Self { step, outcome: Mutex::new(Outcome::Running), ended: Condvar::new() })
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        lock(&self.outcome)
    }

    pub(super) fn end(&self, result: Result<PathBuf>) {
        *self.outcome() = result.map_or_else(Outcome::Failed, Outcome::Saved);
        self.ended.notify_all();
    }

    fn wait(&self) -> Result<PathBuf> {
        let mut outcome = self.outcome();
        while matches!(*outcome, Outcome::Running) {
            outcome = wait(&self.ended, outcome);
        }
        if let Outcome::Failed(error) = &*outcome {
            let text = error.to_string();
            if let Outcome::Failed(error) = std::mem::replace(&mut *outcome, Outcome::Reported(text)) {
                return Err(error);
            }
        }
        match &*outcome {
            Outcome::Saved(folder) => Ok(folder.clone()),
            Outcome::Reported(text) => Err(self.failed(text)),
            Outcome::Running | Outcome::Failed(_) => Err(self.failed("its thread ended without a result")),
        }
    }

    fn failed(&self, reason: &str) -> Error {
        Error::io(format!("saving the checkpoint of step {}", self.step), io::Error::other(reason.to_string()))
    }

    /// The reason why the save failed, if no call has taken the error yet; `None` while it is running.
    pub(super) fn unreported(&self) -> Option<Error> {
        let is_unreported = matches!(*self.outcome(), Outcome::Failed(_));
        is_unreported.then(|| self.wait().err()).flatten()
    }
}
