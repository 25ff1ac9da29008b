use crate::{Error, Result};
use std::time::{Duration, Instant};

/// What ends the making of a group early.
#[derive(Clone, Copy, Default)]
pub(crate) struct Construction<'a> {
    /// When the group must be made; `None`: within its time-out from now on.
    pub(crate) deadline: Option<Instant>,
    /// Asked again and again while other ranks are waited for: an error ends the waiting.
    pub(crate) cancelled: Option<&'a dyn Fn() -> Result<()>>,
}

impl Construction<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        self.cancelled.map_or(Ok(()), |cancelled| cancelled())
    }

    /// What is behind `error`, which a peer may have caused by giving up: its reason may take a moment to arrive.
    pub(crate) fn cause(&self, error: Error) -> Error {
        const PATIENCE: Duration = Duration::from_millis(1500);
        let until = Instant::now() + PATIENCE;
        while self.cancelled.is_some() && Instant::now() < until {
            if let Err(cause) = self.check() {
                return cause;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        error
    }
}
