//! Notices that ranks make a call from different places where they should not: loops that run into each other.
use crate::call::Call;
use crate::call_site::CallSite;
use crate::panic::lock;
use crate::warnings::warn_aloud;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The places of other ranks that this rank has seen.
#[derive(Default)]
pub(crate) struct CallSites {
    met: Mutex<Vec<Met>>,
    /// Whether `met` has entries.
    any: AtomicBool,
    said: AtomicBool,
}

/// A call that this rank made from `own`, while another rank made it from `theirs`.
#[derive(Clone, Copy)]
struct Met {
    own: CallSite,
    theirs: CallSite,
    sequence: u64,
}

/// Programs have few.
const MOST_MET: usize = 64;

impl CallSites {
    /// Looks at a call that is over. `theirs` is another rank's place in it, if that differs from this rank's place. `has_called`
    /// tells whether this rank has lately called from a place.
    ///
    /// Ranks may make a call from different places, as in `if rank == 0 { … } else { … }`. But if a rank makes it from both
    /// places, the other rank may be in another loop. It may also have no batch left, and send zeros from another line. So this
    /// is a warning and no error.
    pub(crate) fn look(
        &self,
        rank: usize,
        (sequence, call): (u64, &Call),
        theirs: Option<CallSite>,
        has_called: impl FnOnce(CallSite) -> bool,
    ) {
        if (theirs.is_none() && !self.any.load(Ordering::Relaxed)) || self.said.load(Ordering::Relaxed) {
            return;
        }
        if !call.operation.is_common() || call.place == CallSite::NONE {
            return;
        }
        let mut met = lock(&self.met);
        let crossed = met.iter().copied().find(|met| met.theirs == call.place).or_else(|| {
            let new = Met { own: call.place, theirs: theirs?, sequence };
            let is_known = met.iter().any(|met| (met.own, met.theirs) == (new.own, new.theirs));
            if is_known {
                return None;
            }
            if has_called(new.theirs) {
                return Some(new);
            }
            if met.len() < MOST_MET {
                met.push(new);
                self.any.store(true, Ordering::Relaxed);
            }
            None
        });
        if let Some(Met { own, theirs, sequence }) = crossed
            && !self.said.swap(true, Ordering::Relaxed)
        {
            let text = |place: CallSite| place.text().unwrap_or_else(|| "an unknown place".to_string());
            let (own, theirs) = (text(own), text(theirs));
            warn_aloud(format_args!(
                "rank {rank} calls {call} at {theirs} and at {own}, and its call at {own}, sequence {sequence}, was taken together \
                 with another rank's call at {theirs}. If these are two loops with different numbers of turns on the ranks, the \
                 values of one are mixed with those of the other: add up in the loop, and make one call after it. If it is on \
                 purpose, make the call in one place, a function, for both. (Said once for each group)"
            ));
        }
    }
}
