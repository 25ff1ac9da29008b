//! The memory of a host, which one of its ranks creates and all map, and each rank's part of it.
use super::sync::AtomicU32;
use rustix::fd::AsRawFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::io::{Error, Result};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The memory of a host: a file in no file system, and this rank's mapping of its beginning. It vanishes with the last process
/// that uses it.
pub(super) struct Memory {
    /// Stays open, which shows the other ranks that this one lives.
    file: File,
    name: String,
    base: NonNull<u8>,
    /// How much of the file is mapped; letters follow.
    mapped: usize,
    #[cfg(thread_sanitizer)]
    users: Option<aliases::Users>,
}

// SAFETY: the mapping belongs to no thread. All access goes through atomics, or through raw pointers within its bounds
// (`Slot`), so that it is sound whatever other threads and processes do to the bytes.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The most that a rank may reserve at once: far more than any layout with the engine's default sizes needs.
const LARGEST: usize = 256 << 20;

impl Memory {
    /// Creates a file of `size` bytes of zeros, of which none takes memory yet, and maps the first `mapped`. The others find
    /// it under `/proc` by its name.
    pub(super) fn create(name: &str, mapped: usize, size: usize) -> Result<Self> {
        let memory = Self::map(file::create(name, size)?, name, mapped)?;
        #[cfg(thread_sanitizer)]
        aliases::add(&memory);
        Ok(memory)
    }

    /// Opens the file that process `pid` has as `fd`, if it exists and is the right one.
    pub(super) fn open(pid: u32, fd: u32, name: &str, mapped: usize, size: usize) -> Result<Self> {
        let file = file::open(pid, fd, name, size)?;
        #[cfg(thread_sanitizer)]
        if let Some((base, users)) = aliases::find(pid, fd) {
            return Ok(Self { file, name: name.to_string(), base, mapped, users: Some(users) });
        }
        Self::map(file, name, mapped)
    }

    /// Pages are mapped when they are first touched. With `MapFlags::POPULATE`, every rank would map all pages of all ranks
    /// at once, most of which it never touches: time and page tables that grow with the square of the number of ranks.
    fn map(file: File, name: &str, mapped: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the system chooses, overlaps nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, access, MapFlags::SHARED, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::other("mmap returned address 0"))?;
        Ok(Self {
            file,
            name: name.to_string(),
            base,
            mapped,
            #[cfg(thread_sanitizer)]
            users: Some(aliases::Users::default()),
        })
    }

    /// Reserves the memory of `range`: a lack of it is an error here, not a signal later.
    pub(super) fn reserve(&self, range: Range<usize>) -> Result<()> {
        // The system would reserve page after page until it runs out of memory and kills a process.
        if range.len() > LARGEST {
            return Err(Error::other(format!("a rank may take at most {LARGEST}")));
        }
        file::reserve(&self.file, range)
    }

    /// Writes to the file, which need not be mapped there.
    pub(super) fn write_at(&self, bytes: &[u8], offset: usize) -> Result<()> {
        self.file.write_all_at(bytes, offset as u64)
    }

    /// Reads from the file, which need not be mapped there.
    pub(super) fn read_at(&self, bytes: &mut [u8], offset: usize) -> Result<()> {
        self.file.read_exact_at(bytes, offset as u64)
    }

    /// The process and the descriptor that have this file open, for others.
    pub(super) fn place(&self) -> (u32, u32) {
        (std::process::id(), self.file.as_raw_fd() as u32)
    }

    /// Whether a process has this file open as `fd`: a process that ends closes its files.
    pub(super) fn is_open(&self, pid: u32, fd: u32) -> bool {
        file::is_open(pid, fd, &self.name)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        #[cfg(thread_sanitizer)]
        if self.users.take().and_then(aliases::Users::into_inner).is_none() {
            return;
        }
        // SAFETY: nothing borrows the mapping any more: a `Segment` owns it, and `word` and `Slot` borrow a `Segment`.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.mapped) };
        if let Err(error) = result {
            log::error!("munmap: {error}");
        }
    }
}

/// A part of the mapped memory: one rank's, or the board.
pub(super) struct Segment {
    start: NonNull<u8>,
    /// Where it begins in the memory.
    offset: usize,
    size: usize,
    _memory: Arc<Memory>,
}

// SAFETY: as for `Memory`, which it owns.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// The part of `memory` in `range`, which starts at a page.
    pub(super) fn new(memory: &Arc<Memory>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= memory.mapped, "{range:?} of {} bytes", memory.mapped);
        // SAFETY: within the mapping.
        let start = unsafe { memory.base.add(range.start) };
        Self { start, offset: range.start, size: range.len(), _memory: memory.clone() }
    }

    /// Where it begins in the memory.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// The word at `offset`, which comes from the layout.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.size, "no word at {offset} of {}", self.size);
        // SAFETY: within the mapping, which lives as long as `self`, and aligned, since mappings begin at pages. Words
        // are accessed as atomics only, by all processes: the layout keeps payload away from them.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// The start of the `length` bytes at `offset`.
    pub(super) fn bytes(&self, offset: usize, length: usize) -> NonNull<u8> {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.size), "no {length} bytes at {offset}");
        // SAFETY: within the mapping.
        unsafe { self.start.add(offset) }
    }
}

/// The mappings of this process, by their descriptors. The thread sanitizer takes two mappings for different memory, so
/// that ranks which are threads of one process must share a mapping for it to see what they do.
#[cfg(thread_sanitizer)]
mod aliases {
    use super::{AsRawFd, Memory, NonNull};
    use crate::panic::lock;
    use std::collections::HashMap;
    use std::sync::{Arc, LazyLock, Mutex, Weak};

    pub(super) type Users = Arc<()>;
    /// The address of a mapping and its users.
    type Alias = (usize, Weak<()>);

    static ALIASES: LazyLock<Mutex<HashMap<u32, Alias>>> = LazyLock::new(Mutex::default);

    pub(super) fn add(memory: &Memory) {
        let users = memory.users.as_ref().map(Users::downgrade).unwrap_or_default();
        lock(&ALIASES).insert(memory.file.as_raw_fd() as u32, (memory.base.as_ptr().expose_provenance(), users));
    }

    /// The mapping that this process made of its descriptor `fd`.
    pub(super) fn find(pid: u32, fd: u32) -> Option<(NonNull<u8>, Users)> {
        let aliases = lock(&ALIASES);
        let (address, users) = aliases.get(&fd).filter(|_| pid == std::process::id())?;
        Some((NonNull::new(std::ptr::with_exposed_provenance_mut(*address))?, users.upgrade()?))
    }
}

/// Creates memory as a file that is in no file system.
mod file {
    use super::{File, Range};
    use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
    use rustix::io::Errno;
    use std::io::{Error, Result};

    /// Seals that fix its size: otherwise a process could shrink it, and the system would kill its peers by a signal.
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    pub(super) fn create(name: &str, size: usize) -> Result<File> {
        // The limit on file sizes applies to memory files too, and the system kills a process that exceeds it by a
        // signal.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if let Some(limit) = limit.filter(|limit| *limit < size as u64) {
            return Err(Error::other(format!("files may have {limit} bytes here: raise the limit with ulimit -f")));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require memory that cannot be executed. Linux before 6.3 does not know the flag.
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
            result => result?,
        };
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&fd, size as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok(fd.into())
    }

    pub(super) fn reserve(file: &File, range: Range<usize>) -> Result<()> {
        Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), range.start as u64, range.len() as u64)?)
    }

    pub(super) fn open(pid: u32, fd: u32, name: &str, size: usize) -> Result<File> {
        let path = format!("/proc/{pid}/fd/{fd}");
        // In another process namespace the same numbers belong to something else, which must not be opened.
        let link = rustix::fs::readlink(&path, Vec::new())?;
        let expected = link_to(name);
        if link.as_bytes() != expected.as_bytes() {
            return Err(Error::other(format!("{path} is {link:?} here, not {expected:?}")));
        }
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
        let status = rustix::fs::fstat(&fd)?;
        let found = status.st_size;
        // The kernel lets no other user open it, except root. A process of root must not be made to use another user's
        // memory.
        if status.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Error::other(format!("{path} belongs to another user, {}", status.st_uid)));
        }
        if u64::try_from(found) != Ok(size as u64) || !rustix::fs::fcntl_get_seals(&fd)?.contains(SEALS) {
            return Err(Error::other(format!("{path} is not a segment of {size} bytes")));
        }
        Ok(fd.into())
    }

    pub(super) fn is_open(pid: u32, fd: u32, name: &str) -> bool {
        match rustix::fs::readlink(format!("/proc/{pid}/fd/{fd}"), Vec::new()) {
            Ok(link) => link.as_bytes() == link_to(name).as_bytes(),
            Err(error) => !matches!(error, Errno::NOENT | Errno::SRCH),
        }
    }

    fn link_to(name: &str) -> String {
        format!("/memfd:{name} (deleted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    /// The bytes of a mapping that are in this process's page tables.
    fn resident(memory: &Memory) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", memory.base.as_ptr() as usize);
        let mapping = maps.lines().skip_while(|line| !line.starts_with(&start));
        let line = mapping.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn memory_takes_no_space_before_it_is_used() {
        const SIZE: usize = 32 << 20;
        let name = "candle-ddp-lazy";
        let own = Arc::new(Memory::create(name, SIZE, SIZE + 4096).unwrap());
        own.reserve(0..SIZE).unwrap();
        let (pid, fd) = own.place();
        let peer = Arc::new(Memory::open(pid, fd, name, SIZE, SIZE + 4096).unwrap());
        assert_eq!((resident(&own), resident(&peer)), (0, 0));
        let [near, far] = [&own, &peer].map(|memory| Segment::new(memory, SIZE / 2..SIZE));
        near.word(SIZE / 2 - 4).store(7, Ordering::Relaxed);
        assert_eq!(far.word(SIZE / 2 - 4).load(Ordering::Relaxed), 7);
        // The kernel may map the pages around the one that was touched.
        assert!(resident(&peer) < SIZE / 4, "{}", resident(&peer));
        // Beyond the mapping.
        own.write_at(b"letter", SIZE + 100).unwrap();
        let mut read = [0; 6];
        peer.read_at(&mut read, SIZE + 100).unwrap();
        assert_eq!(&read, b"letter");
        assert!(peer.read_at(&mut read, SIZE + 4095).is_err());
        // An end shows.
        assert!(peer.is_open(pid, fd) && !peer.is_open(pid, fd + 1000) && !peer.is_open(u32::MAX / 2, fd));
        drop((own, near));
        assert!(!peer.is_open(pid, fd));
    }
}
