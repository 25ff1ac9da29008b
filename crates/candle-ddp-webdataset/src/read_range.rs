//! Files that lie elsewhere.
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

/// Files that lie elsewhere, such as in an object store: what [`TarShards::remote`](super::TarShards::remote) reads, best through a
/// [`RangeCache`](super::RangeCache). `docs/shards.md` has one over the crate `object_store`.
///
/// Several threads call its functions at the same time. They must return after a time, with an error if the other side does not
/// answer, since nobody else can end them. [`RangeCache`](super::RangeCache) tries again after errors, except after errors of the
/// kinds [`NotFound`](ErrorKind::NotFound), [`PermissionDenied`](ErrorKind::PermissionDenied),
/// [`InvalidInput`](ErrorKind::InvalidInput) and [`Unsupported`](ErrorKind::Unsupported).
pub trait ReadRange: Send + Sync {
    /// The name of `file` in the world, such as its URL: no file of another source may have the same name, and a file must have the
    /// same name in every process and run. Caches on a disk find its data by this name. It must not be empty. This function is
    /// called often, so it should not ask the other side.
    fn location(&self, file: &str) -> String;

    /// The version of `file` that is there now.
    ///
    /// # Errors
    /// The system's, or any other.
    fn version(&self, file: &str) -> io::Result<FileVersion>;

    /// The bytes `range` of `file`, which is not empty and lies within the file.
    ///
    /// # Errors
    /// The system's, or any other. A file that has changed, and is shorter now, is an error or gives fewer bytes.
    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// Like [`read_range`](Self::read_range), but from the file itself, even if the source keeps bytes of it: the bytes that it
    /// keeps were not what they should be. A source that keeps nothing need not implement it.
    ///
    /// # Errors
    /// The errors of [`read_range`](Self::read_range).
    fn read_again(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        self.read_range(file, range)
    }
}

/// Which content a file of a [`ReadRange`] has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileVersion {
    /// The length of the file, in bytes.
    pub len: u64,
    /// A text that changes whenever the content does: the ETag, a generation, a hash or, if there is nothing better, the time of
    /// modification. It must not be empty: a source whose files never change gives a text such as `immutable`.
    pub tag: String,
}

impl<R: ReadRange + ?Sized> ReadRange for Arc<R> {
    fn location(&self, file: &str) -> String {
        (**self).location(file)
    }

    fn version(&self, file: &str) -> io::Result<FileVersion> {
        (**self).version(file)
    }

    fn read_range(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        (**self).read_range(file, range)
    }

    fn read_again(&self, file: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        (**self).read_again(file, range)
    }
}

/// The location of a file, by which its kept blocks are found again.
pub(super) fn location_of(source: &(impl ReadRange + ?Sized), file: &str) -> io::Result<String> {
    let location = source.location(file);
    match location.is_empty() {
        true => Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!(
                "ReadRange::location must name {file} as no other file is named, such as by its URL, not by an empty text"
            ),
        )),
        false => Ok(location),
    }
}

/// The version of a file, by which a change shows.
pub(super) fn version_of(source: &(impl ReadRange + ?Sized), file: &str) -> io::Result<FileVersion> {
    let version = source.version(file)?;
    match version.tag.is_empty() {
        true => Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!("ReadRange::version must give {file} a tag that changes with its content, not an empty one"),
        )),
        false => Ok(version),
    }
}
