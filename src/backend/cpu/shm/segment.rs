//! Memory that one rank creates and all map.
use super::sync::AtomicU32;
use rustix::fd::OwnedFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io::{Error, Result};
use std::ptr::NonNull;

/// A mapping of shared memory. It has no name in any file system and vanishes with the last process that maps it.
pub(super) struct Segment {
    base: NonNull<u8>,
    size: usize,
    #[cfg(thread_sanitizer)]
    users: Option<aliases::Users>,
}

// SAFETY: the mapping belongs to no thread. All access goes through atomics, or through raw pointers within its bounds
// (`Slot`), so that it is sound whatever other threads and processes do to the bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Far more than any layout with the engine's own sizes needs.
const LARGEST: usize = 256 << 20;

impl Segment {
    /// Creates a file that has no memory yet. Peers find it under `/proc` by its name.
    pub(super) fn announce(name: &str) -> Result<OwnedFd> {
        file::create(name)
    }

    /// Gives the announced file `size` bytes of zeros, all reserved: a lack of memory is an error here, not a signal
    /// later.
    pub(super) fn reserve(fd: &OwnedFd, size: usize) -> Result<Self> {
        // The system would reserve page after page until it runs out of memory and kills a process.
        if size > LARGEST {
            return Err(Error::other(format!("that is more than the {LARGEST} that a rank may take")));
        }
        file::reserve(fd, size)?;
        let segment = Self::map(fd, size)?;
        #[cfg(thread_sanitizer)]
        aliases::add(fd, &segment);
        Ok(segment)
    }

    /// Announces a file and reserves its memory.
    #[cfg(test)]
    pub(super) fn create(name: &str, size: usize) -> Result<(Self, OwnedFd)> {
        let fd = Self::announce(name)?;
        Ok((Self::reserve(&fd, size)?, fd))
    }

    /// Maps the segment that process `pid` created as `fd`, if that file exists and is the right one.
    pub(super) fn open(pid: u32, fd: i32, name: &str, size: usize) -> Result<Self> {
        let file = file::open(pid, fd, name, size)?;
        #[cfg(thread_sanitizer)]
        if let Some(segment) = aliases::find(pid, fd) {
            return Ok(segment);
        }
        Self::map(&file, size)
    }

    /// Pages are mapped when they are first touched. With `MapFlags::POPULATE`, every rank would map all pages of all ranks
    /// at once, most of which it never touches: time and page tables that grow with the square of the number of ranks.
    fn map(fd: &OwnedFd, size: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the system chooses, overlaps nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, access, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::other("mmap returned address 0"))?;
        Ok(Self {
            base,
            size,
            #[cfg(thread_sanitizer)]
            users: Some(aliases::Users::default()),
        })
    }

    /// The word at `offset`, which comes from the layout.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.size, "no word at {offset} of {}", self.size);
        // SAFETY: within the mapping, which lives as long as `self`, and aligned, since mappings begin at pages. Words
        // are accessed as atomics only, by all processes: the layout keeps payload away from them.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The start of the `length` bytes at `offset`.
    pub(super) fn bytes(&self, offset: usize, length: usize) -> NonNull<u8> {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.size), "no {length} bytes at {offset}");
        // SAFETY: within the mapping.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        #[cfg(thread_sanitizer)]
        if self.users.take().and_then(aliases::Users::into_inner).is_none() {
            return;
        }
        // SAFETY: nothing borrows the mapping any more: `word` and `Slot` borrow `self`.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.size) };
        if let Err(error) = result {
            log::error!("munmap: {error}");
        }
    }
}

/// The segments of this process, by their descriptors. The thread sanitizer takes two mappings for different memory, so
/// that ranks which are threads of one process must share a mapping for it to see what they do.
#[cfg(thread_sanitizer)]
mod aliases {
    use super::{OwnedFd, Segment};
    use crate::panic::lock;
    use rustix::fd::AsRawFd;
    use std::collections::HashMap;
    use std::sync::{Arc, LazyLock, Mutex, Weak};

    pub(super) type Users = Arc<()>;
    /// The address of a mapping, its size and its users.
    type Alias = (usize, usize, Weak<()>);

    static ALIASES: LazyLock<Mutex<HashMap<i32, Alias>>> = LazyLock::new(Mutex::default);

    pub(super) fn add(fd: &OwnedFd, segment: &Segment) {
        let users = segment.users.as_ref().map(Users::downgrade).unwrap_or_default();
        let alias = (segment.base.as_ptr().expose_provenance(), segment.size, users);
        lock(&ALIASES).insert(fd.as_raw_fd(), alias);
    }

    /// The segment that this process created as `fd`.
    pub(super) fn find(pid: u32, fd: i32) -> Option<Segment> {
        let aliases = lock(&ALIASES);
        let (address, size, users) = aliases.get(&fd).filter(|_| pid == std::process::id())?;
        let users = users.upgrade();
        let base = super::NonNull::new(std::ptr::with_exposed_provenance_mut(*address))?;
        users.map(|users| Segment { base, size: *size, users: Some(users) })
    }
}

/// Memory as a file that is in no file system.
mod file {
    use super::OwnedFd;
    use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
    use rustix::io::Errno;
    use std::io::{Error, Result};

    /// Seals that fix its size: otherwise a process could shrink it, and the system would kill its peers by a signal.
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    pub(super) fn create(name: &str) -> Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require memory that cannot be executed. Linux before 6.3 does not know the flag.
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
            result => result?,
        };
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        Ok(fd)
    }

    pub(super) fn reserve(fd: &OwnedFd, size: usize) -> Result<()> {
        // The limit on file sizes applies to memory files too, and the system kills a process that exceeds it by a
        // signal.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if let Some(limit) = limit.filter(|limit| *limit < size as u64) {
            return Err(Error::other(format!("files may have {limit} bytes here: raise the limit with ulimit -f")));
        }
        rustix::fs::ftruncate(fd, size as u64)?;
        rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, size as u64)?;
        Ok(rustix::fs::fcntl_add_seals(fd, SEALS)?)
    }

    pub(super) fn open(pid: u32, fd: i32, name: &str, size: usize) -> Result<OwnedFd> {
        let path = format!("/proc/{pid}/fd/{fd}");
        // In another process namespace the same numbers belong to something else, which must not be opened.
        let link = rustix::fs::readlink(&path, Vec::new())?;
        let expected = format!("/memfd:{name} (deleted)");
        if link.as_bytes() != expected.as_bytes() {
            return Err(Error::other(format!("{path} is {link:?} here, and not {expected:?}")));
        }
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
        let status = rustix::fs::fstat(&fd)?;
        let found = status.st_size;
        // The kernel lets no other user open it, unless that is root. Nobody shall make this process use their memory either.
        if status.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Error::other(format!("{path} belongs to another user, {}", status.st_uid)));
        }
        if u64::try_from(found) != Ok(size as u64) || !rustix::fs::fcntl_get_seals(&fd)?.contains(SEALS) {
            return Err(Error::other(format!("{path} is no segment of {size} bytes")));
        }
        Ok(fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd;

    /// The bytes of a mapping that are in this process's page tables.
    fn resident(segment: &Segment) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", segment.base.as_ptr() as usize);
        let mapping = maps.lines().skip_while(|line| !line.starts_with(&start));
        let line = mapping.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn a_segment_of_a_peer_takes_no_memory_before_it_is_used() {
        const SIZE: usize = 32 << 20;
        let (own, fd) = Segment::create("lazy", SIZE).unwrap();
        let peer = Segment::open(std::process::id(), fd.as_raw_fd(), "lazy", SIZE).unwrap();
        assert_eq!((resident(&own), resident(&peer)), (0, 0));
        own.word(SIZE - 4).store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(peer.word(SIZE - 4).load(std::sync::atomic::Ordering::Relaxed), 7);
        // The kernel may map the pages around the one that was touched.
        assert!(resident(&peer) < SIZE / 4, "{}", resident(&peer));
    }
}
