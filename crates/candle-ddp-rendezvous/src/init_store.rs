use super::cancellation::Cancellation;
use super::progress::Reporter;
use super::{FileStore, HashStore, LastWill, Store, TcpStore};
use crate::{Error, Result};
use candle_ddp_base::panic::lock;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long after the deadline the store may still be used, to find missing ranks and to report a failure.
pub(super) const REPORTING: Duration = Duration::from_secs(2);

/// A store whose calls can be given a common deadline.
pub(super) trait LimitedStore: Store {
    /// Returns the same store with a common `deadline` for all calls.
    fn limited(&self, deadline: Instant) -> Arc<dyn Store>;
}

impl LimitedStore for TcpStore {
    fn limited(&self, deadline: Instant) -> Arc<dyn Store> {
        Arc::new(self.until(deadline))
    }
}

impl LimitedStore for FileStore {
    fn limited(&self, deadline: Instant) -> Arc<dyn Store> {
        Arc::new(self.until(deadline))
    }
}

impl LimitedStore for HashStore {
    fn limited(&self, deadline: Instant) -> Arc<dyn Store> {
        Arc::new(self.until(deadline))
    }
}

/// A run's store. During initialisation, waits end at the deadline or on cancellation, and other calls end shortly
/// after the deadline. Afterwards there are no such limits.
pub(super) struct InitStore {
    plain: Arc<dyn LimitedStore>,
    /// `None` after initialisation.
    limited: Mutex<Option<Arc<dyn Store>>>,
    pub(super) cancellation: Cancellation,
    pub(super) deadline: Instant,
    /// Runs as long as the group that uses this store.
    _reporter: Option<Arc<Reporter>>,
}

impl InitStore {
    pub(super) fn new(plain: Arc<dyn LimitedStore>, deadline: Instant) -> Self {
        let limited = Mutex::new(Some(plain.limited(deadline + REPORTING)));
        Self { plain, limited, cancellation: Cancellation::default(), deadline, _reporter: None }
    }

    /// Keeps `reporter` running as long as this store.
    pub(super) fn reporting(self, reporter: Option<Arc<Reporter>>) -> Self {
        Self { _reporter: reporter, ..self }
    }

    /// Returns another limited store, with its own `deadline`.
    pub(super) fn limited(&self, deadline: Instant) -> Arc<dyn Store> {
        self.plain.limited(deadline)
    }

    /// Lifts the limits at the end of initialisation.
    pub(super) fn lift_limits(&self) {
        *lock(&self.limited) = None;
    }

    /// Returns the limited store, unless the limits have been lifted.
    pub(super) fn in_init(&self) -> Option<Arc<dyn Store>> {
        lock(&self.limited).clone()
    }

    fn call<T>(&self, call: impl FnOnce(&dyn Store) -> Result<T>) -> Result<T> {
        let Some(limited) = self.in_init() else { return call(&*self.plain) };
        call(&*limited).map_err(|error| match error {
            Error::StoreTimeout { .. } => error,
            // If the store ended together with the rank that failed, that rank's reason is the cause.
            _ => self.cancellation.check().err().unwrap_or(error),
        })
    }
}

impl Store for InitStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(|store| store.set(key, value))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.wait(&[key], None)?;
        self.call(|store| store.get(key))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.call(|store| store.add(key, amount))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.call(|store| store.compare_set(key, expected, desired))
    }

    fn wait(&self, keys: &[&str], timeout: Option<Duration>) -> Result<()> {
        self.wait_cancellable(keys, timeout, &|| Ok(()))
    }

    fn wait_cancellable(
        &self,
        keys: &[&str],
        timeout: Option<Duration>,
        cancelled: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if self.in_init().is_none() {
            return self.plain.wait_cancellable(keys, timeout, cancelled);
        }
        let longest = self.timeout();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let either = || cancelled().and_then(|()| self.cancellation.check());
        let timeout = timeout.unwrap_or(longest).min(left);
        match self.call(|store| store.wait_cancellable(keys, Some(timeout), &either)) {
            Err(Error::StoreTimeout { operation, store, reason, .. }) if Instant::now() >= self.deadline => {
                Err(Error::StoreTimeout { operation, store, timeout: longest, reason })
            }
            result => result,
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.call(|store| store.check(keys))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.call(|store| store.delete(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(|store| store.append(key, value))
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, None)?;
        self.call(|store| store.multi_get(keys))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.call(|store| store.multi_set(pairs))
    }

    fn num_keys(&self) -> Result<usize> {
        self.call(|store| store.num_keys())
    }

    fn last_will(&self, key: &str, value: &[u8]) -> Result<Option<LastWill>> {
        self.call(|store| store.last_will(key, value))
    }

    fn is_hosted_here(&self) -> bool {
        self.plain.is_hosted_here()
    }

    fn timeout(&self) -> Duration {
        self.plain.timeout()
    }
}
