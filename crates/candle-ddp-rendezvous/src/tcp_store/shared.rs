//! Bytes that the store shares with pending replies, counted as long as anything refers to them.
use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes of all its [`Shared`] values.
#[derive(Clone, Default)]
pub(super) struct Meter(Arc<AtomicUsize>);

impl Meter {
    pub(super) fn share(&self, bytes: Vec<u8>) -> Shared {
        self.0.fetch_add(bytes.len(), Ordering::Relaxed);
        Shared(Arc::new(Counted { bytes: bytes.into_boxed_slice(), meter: self.clone() }))
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

struct Counted {
    bytes: Box<[u8]>,
    meter: Meter,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.meter.0.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

/// Reference-counted bytes: many holders, one copy.
#[derive(Clone)]
pub(super) struct Shared(Arc<Counted>);

impl Shared {
    /// Returns the number of bytes that dropping this value would free.
    pub(super) fn exclusive(&self) -> usize {
        if Arc::strong_count(&self.0) == 1 { self.len() } else { 0 }
    }
}

impl Deref for Shared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

// Equality and hash are those of the bytes, so that maps can be queried with plain bytes.
impl Borrow<[u8]> for Shared {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Shared {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Shared {}

impl Hash for Shared {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}
