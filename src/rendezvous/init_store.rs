use super::cancellation::Cancellation;
use super::{FileStore, Store, TcpStore};
use crate::{Error, Result};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// How long after the deadline the store is still asked which ranks are missing, and told of a failure.
pub(super) const REPORTING: Duration = Duration::from_secs(2);

/// A store whose calls can be given a common end.
pub(super) trait LimitedStore: Store {
    /// The same store for calls that all end at `deadline`.
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

/// A run's store. While the group is being made, waits end at the deadline or when they are cancelled, and other calls
/// soon after the deadline. Afterwards it is the plain store.
pub(super) struct InitStore {
    plain: Arc<dyn LimitedStore>,
    /// `None` after initialisation.
    limited: RwLock<Option<Arc<dyn Store>>>,
    pub(super) cancellation: Cancellation,
    pub(super) deadline: Instant,
}

impl InitStore {
    pub(super) fn new(plain: Arc<dyn LimitedStore>, deadline: Instant) -> Self {
        let limited = RwLock::new(Some(plain.limited(deadline + REPORTING)));
        Self { plain, limited, cancellation: Cancellation::default(), deadline }
    }

    /// Another limited store, which waits for nobody's deadline but `deadline`.
    pub(super) fn limited(&self, deadline: Instant) -> Arc<dyn Store> {
        self.plain.limited(deadline)
    }

    /// Initialisation is over.
    pub(super) fn lift_limits(&self) {
        *self.limited.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn in_init(&self) -> Option<Arc<dyn Store>> {
        self.limited.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn now(&self) -> Arc<dyn Store> {
        self.in_init().unwrap_or_else(|| Arc::clone(&self.plain) as Arc<dyn Store>)
    }
}

impl Store for InitStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.now().set(key, value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.wait(&[key], None)?;
        self.now().get(key)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.now().add(key, amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.now().compare_set(key, expected, desired)
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
        let Some(limited) = self.in_init() else {
            return self.plain.wait_cancellable(keys, timeout, cancelled);
        };
        let longest = self.timeout();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let either = || cancelled().and_then(|()| self.cancellation.check());
        match limited.wait_cancellable(keys, Some(timeout.unwrap_or(longest).min(left)), &either) {
            Err(Error::StoreTimeout { operation, store, reason, .. }) if Instant::now() >= self.deadline => {
                Err(Error::StoreTimeout { operation, store, timeout: longest, reason })
            }
            result => result,
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.now().check(keys)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.now().delete(key)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.now().append(key, value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, None)?;
        self.now().multi_get(keys)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.now().multi_set(pairs)
    }

    fn num_keys(&self) -> Result<usize> {
        self.now().num_keys()
    }

    fn timeout(&self) -> Duration {
        self.plain.timeout()
    }
}
