//! Groups that this rank has left. Their communicators can be freed once all other ranks have left as well, for which nobody
//! waits.
use crate::comm::{Comm, Notice, Notices};
use crate::library::MpiError;
use crate::patience::Patience;
use candle_ddp_base::panic::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(crate) struct Retired {
    pub(crate) comms: [Comm; 2],
    pub(crate) notices: Notices,
    pub(crate) outgoing: Vec<Notice>,
    /// The number of ranks that have not left yet.
    pub(crate) expected: usize,
}

static RETIRED: Mutex<Vec<Retired>> = Mutex::new(Vec::new());

pub(crate) fn retire(group: Retired) {
    lock(&RETIRED).push(group);
    sweep();
}

/// Frees the communicators of groups that all ranks have left. Returns how many groups remain.
pub(crate) fn sweep() -> usize {
    let mut retired = lock(&RETIRED);
    let groups = std::mem::take(&mut *retired);
    for mut group in groups {
        match group.is_over() {
            Ok(false) => retired.push(group),
            Ok(true) => note(group.free()),
            // It is no longer of use. What MPI may still use is kept.
            Err(error) => note(Err(error)),
        }
    }
    retired.len()
}

/// Ends the groups that are left, at the end of the process.
pub(crate) fn end_all() {
    // A rank that ends without leaving its groups sends no notice.
    const MOMENT: Duration = Duration::from_secs(1);
    let (until, mut patience) = (Instant::now() + MOMENT, Patience::default());
    while sweep() > 0 && Instant::now() < until {
        patience.pause();
    }
    for group in std::mem::take(&mut *lock(&RETIRED)) {
        note(group.notices.end());
    }
}

fn note(result: Result<(), MpiError>) {
    if let Err(error) = result {
        log::debug!("ending a group: {error}");
    }
}

impl Retired {
    fn is_over(&mut self) -> Result<bool, MpiError> {
        while self.expected > 0 && self.notices.next()?.is_some() {
            self.expected -= 1;
        }
        for notice in &mut self.outgoing {
            if !notice.is_over()? {
                return Ok(false);
            }
        }
        Ok(self.expected == 0)
    }

    fn free(self) -> Result<(), MpiError> {
        self.notices.end()?;
        self.comms.into_iter().try_for_each(Comm::free)
    }
}
