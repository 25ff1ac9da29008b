//! A barrier that names the ranks that did not come.
use super::ProcessGroup;
use crate::rendezvous::{self, absent_ranks};
use crate::{Error, Result};
use std::sync::atomic::Ordering;
use std::time::Duration;

impl ProcessGroup {
    /// Waits until every rank has come here, for at most `timeout` (`None`: the group's), and otherwise names those that
    /// have not: PyTorch's `monitored_barrier`, with any engine, for finding out where ranks part. Every rank must call it,
    /// with the same arguments.
    ///
    /// It goes through the group's store and leaves the engine alone: work in flight need not be over, and the group still
    /// works after an error. It takes much longer than [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// Returns [`Error::MonitoredBarrier`] on every rank that came. It names all ranks that are missing with
    /// `wait_all_ranks`, and the lowest of them without. A rank that comes after others have given up gets their error. If
    /// the group has failed, returns its failure at once.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, wait_all_ranks: bool) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let number = self.0.barriers.fetch_add(1, Ordering::Relaxed);
        let key = |number: u64, rank: usize| format!("monitored_barrier/{number}/{rank}");
        let store = &*self.0.store;
        store.set(&key(number, self.rank()), b"")?;
        let keys: Vec<String> = (0..self.world_size()).map(|rank| key(number, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // The key under which the first rank that gives up says which ranks it missed.
        let verdict = format!("monitored_barrier/{number}/missing");
        let missing = match store.wait_cancellable(&keys, Some(timeout), &|| Ok(self.failed()?)) {
            Ok(()) if !store.check(&[&verdict])? => {
                if let Some(past) = number.checked_sub(1) {
                    // All ranks have come here, so they have left the barrier before it.
                    store.delete(&key(past, self.rank()))?;
                }
                return Ok(());
            }
            Ok(()) => store.get(&verdict)?,
            Err(late @ rendezvous::Error::StoreTimeout { .. }) => {
                let missing = absent_ranks(store, 0..self.world_size(), &|rank| key(number, rank))?;
                if missing.is_empty() {
                    // The rank came at the last moment, unless others had given up already.
                    if store.check(&[&verdict])? { store.get(&verdict)? } else { return Ok(()) }
                } else {
                    let list = serde_json::to_vec(&missing).map_err(|_| late)?;
                    store.compare_set(&verdict, b"", &list)?
                }
            }
            Err(error) => return Err(error.into()),
        };
        let mut missing: Vec<usize> = serde_json::from_slice(&missing).unwrap_or_default();
        if !wait_all_ranks {
            missing.truncate(1);
        }
        Err(self.names_a_rank(Error::MonitoredBarrier { rank: self.rank(), missing, timeout }))
    }
}
