//! Files that lie elsewhere.
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Files that lie elsewhere, such as in an object store: what [`TarShards::remote`](super::TarShards::remote) reads, best through a
/// [`RangeCache`](super::RangeCache). `docs/data.md` has one over the crate `object_store`.
pub trait ReadRange: Send + Sync {
    /// The bytes `range` of `file`: fewer only where the file ends, and none from its end on. Several threads call it at the same
    /// time. It must return after a time, with an error if the other side does not answer, since nobody else can end it.
    ///
    /// # Errors
    /// The system's, or any other: [`RangeCache`](super::RangeCache) tries again, except after those of kinds
    /// [`NotFound`](io::ErrorKind::NotFound), [`PermissionDenied`](io::ErrorKind::PermissionDenied),
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) and [`Unsupported`](io::ErrorKind::Unsupported).
    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>>;
}

impl<R: ReadRange + ?Sized> ReadRange for Arc<R> {
    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        (**self).read_range(file, range)
    }
}
