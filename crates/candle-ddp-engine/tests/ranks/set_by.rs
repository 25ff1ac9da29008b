//! A store of which one method fails.
use candle_ddp_engine::Result;
use candle_ddp_rendezvous::Store;
use std::sync::Arc;
use std::time::Duration;

/// A store whose `set` is `set`, which gets the store behind it.
pub(crate) struct SetBy<F> {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) set: F,
}

impl<F: Fn(&Arc<dyn Store>, &str, &[u8]) -> Result<()> + Send + Sync> Store for SetBy<F> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        (self.set)(&self.store, key, value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.store.get(key)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(key, amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.store.wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(key)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(key, value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(keys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.store.multi_set(pairs)
    }

    fn num_keys(&self) -> Result<usize> {
        self.store.num_keys()
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }
}
