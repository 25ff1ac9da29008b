use crate::flight_recorder::Recording;
use crate::standing::Membership;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use std::time::{Duration, Instant};

/// The conditions that can end the construction of a group early, and how its calls are recorded.
#[derive(Clone, Copy, Default)]
pub struct Construction<'a> {
    /// The deadline of the construction; `None` means the group's time-out, counted from the start.
    pub deadline: Option<Instant>,
    /// Called again and again while waiting for other ranks; an error ends the wait.
    pub cancelled: Option<&'a dyn Fn() -> Result<()>>,
    /// For the flight recorder, if there is one.
    pub recording: Option<&'a Recording>,
    /// The group's place in its job, if it is one of several.
    #[doc(hidden)]
    pub membership: Option<&'a Membership>,
}

/// Advice about missing ranks.
pub(crate) const ABSENT: &str = "Have they created this group too (new_group with the same ranks), or ended? Look for the \
                                 first error in their output";

impl Construction<'_> {
    /// The error of `rank` if the ranks `absent` have not come to the rendezvous of their group within `timeout`.
    #[doc(hidden)]
    pub fn missing(rank: usize, absent: Vec<usize>, timeout: Duration) -> Error {
        let reason = format!("they have not come to the rendezvous. {ABSENT}");
        Error::Connect { rank, peers: absent, timeout, reason }
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.cancelled.map_or(Ok(()), |cancelled| cancelled())
    }

    /// The root cause of `error`. A peer that gave up may have caused it, and its reason may take a moment to arrive.
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

debug_fields!(Construction<'_>: deadline);
