//! A barrier that names the ranks that did not come.
use super::ProcessGroup;
use crate::rendezvous::{self, absent_ranks};
use crate::{Error, Result};
use candle_ddp_rendezvous::json::{decide, read};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl ProcessGroup {
    /// Waits until every rank has come here, for at most `timeout` (`None`: the group's), and otherwise names the ranks
    /// that have not: PyTorch's `monitored_barrier`. It works with any engine, and is for finding out where ranks part.
    /// Every rank must call it.
    ///
    /// It goes through the group's store and leaves the engine alone: work in flight need not be complete, and the
    /// group still works after an error. It takes much longer than [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// Returns [`Error::MonitoredBarrier`] on every rank that came, with all missing ranks, as PyTorch's does with
    /// `wait_all_ranks`. A rank that comes after others have given up gets their error. If the group has failed, returns its failure
    /// at once.
    pub fn monitored_barrier(&self, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let number = self.0.barriers.fetch_add(1, Ordering::Relaxed);
        let key = |number: u64, rank: usize| format!("monitored_barrier/{number}/{rank}");
        let store = &*self.0.store;
        store.set(&key(number, self.rank()), b"")?;
        let keys: Vec<String> = (0..self.world_size()).map(|rank| key(number, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // Under this key, the first rank that gives up says which ranks it missed.
        let verdict = format!("monitored_barrier/{number}/missing");
        let missing: Option<Vec<usize>> = match store.wait_cancellable(&keys, Some(timeout), &|| Ok(self.failed()?)) {
            Ok(()) => {
                let given_up = read(store, &verdict)?;
                if let Some(past) = number.checked_sub(1).filter(|_| given_up.is_none()) {
                    // All ranks have come here, so they have left the barrier before it.
                    store.delete(&key(past, self.rank()))?;
                }
                given_up
            }
            Err(rendezvous::Error::StoreTimeout { .. }) => {
                let missing = absent_ranks(store, 0..self.world_size(), &|rank| key(number, rank))?;
                // If none is missing, the last rank came at the last moment, unless others had given up already.
                if missing.is_empty() { read(store, &verdict)? } else { Some(decide(store, &verdict, &missing)?) }
            }
            Err(error) => return Err(error.into()),
        };
        let Some(missing) = missing else { return Ok(()) };
        Err(self.note(Error::MonitoredBarrier { rank: self.rank(), missing, timeout }))
    }
}
