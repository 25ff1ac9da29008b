//! How a save in the background ends.
use crate::panic::{lock, wait};
use crate::{Error, Result};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// A save that [`Checkpointer::save`](super::Checkpointer::save) has started, and that goes on in the background.
#[derive(Clone, Debug)]
pub struct SaveHandle(pub(super) Arc<Save>);

impl SaveHandle {
    /// The step that is saved.
    pub fn step(&self) -> u64 {
        self.0.step
    }

    /// Whether the save has ended, well or not.
    pub fn is_done(&self) -> bool {
        !matches!(*self.0.outcome(), Outcome::Running)
    }

    /// Waits until the checkpoint is whole and durable, on the disks of all ranks, and returns its folder. It does not
    /// communicate: any rank may call it.
    ///
    /// # Errors
    /// On every rank why nothing was saved: the rank that failed has its own error, the others
    /// [`Error::RankFailed`] with its text. The first who asks gets it; later ones get its text as [`Error::Io`].
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
    /// The failure's text: somebody has got the error.
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
            Outcome::Running | Outcome::Failed(_) => Err(self.failed("it has no result")),
        }
    }

    fn failed(&self, reason: &str) -> Error {
        Error::io(format!("saving the checkpoint of step {}", self.step), io::Error::other(reason.to_string()))
    }

    /// Why the save failed, if nobody has asked yet; `None` while it is running.
    pub(super) fn unreported(&self) -> Option<Error> {
        let is_unreported = matches!(*self.outcome(), Outcome::Failed(_));
        is_unreported.then(|| self.wait().err()).flatten()
    }
}
