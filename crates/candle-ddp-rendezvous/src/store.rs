use super::LastWill;
use crate::{Error, Result};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The interval at which a cancellable wait checks for cancellation.
pub(super) const CANCELLATION_CHECK: Duration = Duration::from_millis(250);

/// A key-value store that all ranks share: PyTorch's `torch.distributed.Store`.
///
/// Every call returns within a time-out. Keys are text, values are bytes; a store may limit the size of both.
pub trait Store: Send + Sync {
    /// Sets `key` to `value`, replacing its old value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` is set and returns its value.
    fn get(&self, key: &str) -> Result<Vec<u8>>;

    /// Adds `amount` to the counter `key` (absent: 0) and returns the new value. Counters are kept as decimal text.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Sets `key` to `desired` if it holds `expected`, or if it is absent and `expected` is empty. Returns the value
    /// after the call; if `key` is absent and `expected` is not empty, returns `expected`.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until all `keys` are set. `None` means the store's own time-out.
    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()>;

    /// Like [`wait`](Self::wait), but fails with the error of `cancelled`, which is called several times a second.
    fn wait_cancellable(
        &self,
        keys: &[&str],
        timeout: Option<Duration>,
        cancelled: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let start = Instant::now();
        loop {
            cancelled()?;
            let left = timeout.saturating_sub(start.elapsed());
            match self.wait(keys, Some(left.min(CANCELLATION_CHECK))) {
                Err(Error::StoreTimeout { .. }) if left > CANCELLATION_CHECK => {}
                Err(Error::StoreTimeout { operation, store, reason, .. }) => {
                    return Err(Error::StoreTimeout { operation, store, timeout, reason });
                }
                result => return result,
            }
        }
    }

    /// Returns whether all `keys` are set.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key` and returns whether it existed.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Appends `value` to what `key` holds (absent: nothing).
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until all `keys` are set and returns their values.
    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>>;

    /// Sets every key of `pairs`.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()>;

    /// Returns the number of keys in the store, including those set by others.
    fn num_keys(&self) -> Result<usize>;

    /// Leaves a last will (MQTT's term): when this process ends, or the returned value is dropped, the store does
    /// `compare_set(key, b"", value)`. Each will takes its own connection.
    ///
    /// Returns `None` if the store does not notice when processes end. The [`TcpStoreServer`](super::TcpStoreServer) of
    /// a job does, once their connections have closed; PyTorch's does not.
    fn last_will(&self, _key: &str, _value: &[u8]) -> Result<Option<LastWill>> {
        Ok(None)
    }

    /// Whether the store ends with this process. Other ranks may notice that before they have read its content.
    fn is_hosted_here(&self) -> bool {
        false
    }

    /// Returns the time-out of a call.
    fn timeout(&self) -> Duration;
}

/// Returns those of `ranks` whose key is not set. Bisects, because usually few of many are absent.
pub fn absent_ranks(store: &dyn Store, ranks: Range<usize>, key: &dyn Fn(usize) -> String) -> Result<Vec<usize>> {
    let keys: Vec<String> = ranks.clone().map(key).collect();
    if store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())? {
        return Ok(Vec::new());
    }
    if ranks.len() == 1 {
        return Ok(ranks.collect());
    }
    let middle = ranks.start + ranks.len() / 2;
    let mut absent = absent_ranks(store, ranks.start..middle, key)?;
    absent.extend(absent_ranks(store, middle..ranks.end, key)?);
    Ok(absent)
}

/// Removes a key that a group no longer needs. Otherwise the store of a job that keeps making groups would grow. An
/// error does not matter here, and is only logged.
pub fn discard(store: &dyn Store, key: &str) {
    if let Err(error) = store.delete(key) {
        log::debug!("removing {key} from the store: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashStore;

    #[test]
    fn absent_ranks_are_found() {
        let store = HashStore::new(Duration::from_secs(120));
        let key = |rank: usize| format!("rank/{rank}");
        for present in [1, 2, 4, 5, 6] {
            store.set(&key(present), b"").unwrap();
        }
        for (ranks, expected) in [(0..7, vec![0, 3]), (4..7, vec![]), (3..4, vec![3]), (0..0, vec![])] {
            assert_eq!(absent_ranks(&store, ranks, &key).unwrap(), expected);
        }
    }
}
