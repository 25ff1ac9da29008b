use super::{LastWill, Store};
use crate::Result;
use candle_ddp_base::debug_fields;
use std::sync::Arc;
use std::time::Duration;

/// A namespace inside another store: every key gets the prefix `prefix/`, as in PyTorch's `PrefixStore`.
#[derive(Clone)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

debug_fields!(PrefixStore: prefix);

impl PrefixStore {
    /// Creates the namespace of `store`'s keys that begin with `prefix/`.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into(), store }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with_keys<T>(&self, keys: &[&str], call: impl FnOnce(&[&str]) -> T) -> T {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        call(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.store.get(&self.key(key))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.key(key), amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.with_keys(keys, |keys| self.store.wait(keys, timeout))
    }

    fn wait_cancellable(
        &self,
        keys: &[&str],
        timeout: Option<Duration>,
        cancelled: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        self.with_keys(keys, |keys| self.store.wait_cancellable(keys, timeout, cancelled))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_keys(keys, |keys| self.store.check(keys))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(&self.key(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.store.multi_get(keys))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<String> = pairs.iter().map(|(key, _)| self.key(key)).collect();
        let pairs: Vec<(&str, &[u8])> = keys.iter().map(String::as_str).zip(pairs.iter().map(|pair| pair.1)).collect();
        self.store.multi_set(&pairs)
    }

    /// Counts the keys of the whole store, like PyTorch's `PrefixStore`.
    fn num_keys(&self) -> Result<usize> {
        self.store.num_keys()
    }

    fn last_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        self.store.last_will(&self.key(key), value)
    }

    fn is_hosted_here(&self) -> bool {
        self.store.is_hosted_here()
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }
}
