use super::Store;
use crate::{Error, Result};
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::{lock, wait_timeout};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A store inside one process, for ranks that are threads; like PyTorch's `HashStore`.
pub struct HashStore {
    shared: Arc<Shared>,
    timeout: Duration,
}

debug_fields!(HashStore: timeout);

#[derive(Default)]
struct Shared {
    map: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl HashStore {
    /// Creates an empty store. Waiting calls time out after `timeout`.
    pub fn new(timeout: Duration) -> Self {
        Self { shared: Arc::default(), timeout }
    }

    /// Returns the same store, whose waits end at `deadline`.
    pub(super) fn until(&self, deadline: Instant) -> Self {
        let left = deadline.saturating_duration_since(Instant::now());
        Self { shared: Arc::clone(&self.shared), timeout: self.timeout.min(left) }
    }

    fn write<T>(&self, change: impl FnOnce(&mut HashMap<String, Vec<u8>>) -> T) -> T {
        let result = change(&mut lock(&self.shared.map));
        self.shared.changed.notify_all();
        result
    }

    /// Waits until all `keys` are set, then reads the map under the same lock.
    fn wait_then<T>(
        &self,
        operation: &str,
        keys: &[&str],
        timeout: Duration,
        read: impl FnOnce(&HashMap<String, Vec<u8>>) -> T,
    ) -> Result<T> {
        let deadline = deadline_after(timeout);
        let mut map = lock(&self.shared.map);
        loop {
            let missing: Vec<&str> = keys.iter().copied().filter(|key| !map.contains_key(*key)).collect();
            if missing.is_empty() {
                return Ok(read(&map));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::StoreTimeout {
                    operation: operation.to_string(),
                    store: "in this process".to_string(),
                    timeout,
                    reason: format!("no rank set {missing:?}"),
                });
            }
            map = wait_timeout(&self.shared.changed, map, left);
        }
    }
}

/// Parses a counter's value: decimal text, as in PyTorch's stores.
pub(super) fn parse_counter(key: &str, store: &str, value: &[u8]) -> Result<i64> {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(|| Error::Store {
        operation: format!("add({key:?})"),
        store: store.to_string(),
        reason: format!("the key holds {:?}, which is not a number", String::from_utf8_lossy(value)),
    })
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(|map| map.insert(key.to_string(), value.to_vec()));
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.wait_then("get", &[key], self.timeout, |map| map[key].clone())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.write(|map| {
            let old = map.get(key).map_or(Ok(0), |value| parse_counter(key, "in this process", value))?;
            let new = old.wrapping_add(amount);
            map.insert(key.to_string(), new.to_string().into_bytes());
            Ok(new)
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.write(|map| {
            let current = map.get(key);
            if current.map_or(expected.is_empty(), |value| value == expected) {
                map.insert(key.to_string(), desired.to_vec());
                return Ok(desired.to_vec());
            }
            Ok(current.map_or_else(|| expected.to_vec(), Vec::clone))
        })
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.wait_then("wait", keys, timeout.unwrap_or(self.timeout), |_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let map = lock(&self.shared.map);
        Ok(keys.iter().all(|key| map.contains_key(*key)))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.write(|map| map.remove(key).is_some()))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.write(|map| map.entry(key.to_string()).or_default().extend_from_slice(value));
        Ok(())
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait_then("multi_get", keys, self.timeout, |map| keys.iter().map(|key| map[*key].clone()).collect())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.write(|map| map.extend(pairs.iter().map(|(key, value)| (key.to_string(), value.to_vec()))));
        Ok(())
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(lock(&self.shared.map).len())
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }
}
