//! The file behind a [`FileStore`](super::FileStore): a log of changes with its locks.
use crate::{Error, Result};
use candle_ddp_base::hash::fnv1a_32;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The first bytes of every log; a file without them is never taken for a log.
const MAGIC: &[u8] = b"candle-ddp store 1\n";
/// The size of the header of each record: its length, and its hash, which distinguishes whole records from those that a
/// crash of the host left incomplete.
const HEADER: usize = 8;
/// The maximum length of a record. A longer one means that the file is damaged.
const MAX_RECORD: usize = 9 << 20;

/// A log of records to which several processes append.
///
/// There are two locks, both released by the system when a process dies. All users of the log hold `PATH.lock` as a
/// shared lock, so a process that gets it exclusively knows that the log's content is stale. `PATH` itself is locked
/// for each access.
pub(super) struct FileLog {
    path: PathBuf,
    lock_path: PathBuf,
    data: File,
    users: File,
    /// The offset up to which the log has been read.
    offset: u64,
}

/// The lock for reading and appending, released when dropped.
pub(super) struct Access<'a> {
    log: &'a mut FileLog,
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        // The next lock call on this file would fail in the same way and report the error.
        let _ = self.log.data.unlock();
    }
}

fn retry(deadline: Instant, pause: &mut Duration) -> io::Result<()> {
    if Instant::now() >= deadline {
        return Err(io::ErrorKind::TimedOut.into());
    }
    std::thread::sleep((*pause).min(deadline.saturating_duration_since(Instant::now())));
    *pause = (*pause * 2).min(Duration::from_millis(10));
    Ok(())
}

const FIRST_PAUSE: Duration = Duration::from_micros(20);

/// Locks before the deadline, so that a process that was stopped while holding the lock does not block this one.
fn lock(deadline: Instant, attempt: impl Fn() -> Result<(), TryLockError>) -> io::Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => retry(deadline, &mut pause)?,
        }
    }
}

/// The permissions of a store's files. Their content decides where ranks connect, so only the owner may access them.
const MODE: u32 = 0o600;

/// Opens a file of this user, or creates it if `create` is set. In a folder that others can write to, such as /tmp,
/// files and links of other users must be refused.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    // Without O_NONBLOCK, opening a device could block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(false).mode(MODE).custom_flags(flags);
    let file = match options.open(path) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return refuse(format!(
                "{} is a symbolic link, which a store does not follow: choose another file",
                path.display()
            ));
        }
        result => result?,
    };
    let metadata = file.metadata()?;
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        let hint = "all ranks must run as the same user, and the folder must preserve ownership";
        return refuse(format!(
            "{} belongs to user id {owner}, but this process runs as {user}: {hint}, or choose another file",
            path.display()
        ));
    }
    if !metadata.is_file() {
        return refuse(format!("{} is not a regular file: choose another one", path.display()));
    }
    Ok(file)
}

/// Returns whether `path` still refers to `file`; the last user may have removed it.
fn leads_to(path: &Path, file: &File) -> io::Result<bool> {
    match path.metadata() {
        Ok(there) => file.metadata().map(|here| (here.dev(), here.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl FileLog {
    /// Opens the log at `path`, and empties it if no other process uses it.
    pub(super) fn open(path: &Path, deadline: Instant) -> Result<Self> {
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock_path = PathBuf::from(lock_path);
        let context = |error| Error::io(format!("open the file store {}", path.display()), error);
        let mut pause = FIRST_PAUSE;
        loop {
            let users = open(&lock_path, true).map_err(context)?;
            match users.try_lock() {
                Ok(()) if leads_to(&lock_path, &users).map_err(context)? => Self::clear(path)?,
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(context(error)),
            }
            // This is not atomic with the exclusive lock: another process may clear the log in between. That does no
            // harm, because nothing is written before the shared lock is held.
            lock(deadline, || users.try_lock_shared()).map_err(context)?;
            if leads_to(&lock_path, &users).map_err(context)? {
                let data = open(path, false).map_err(context)?;
                let path = path.to_path_buf();
                return Ok(Self { path, lock_path, data, users, offset: MAGIC.len() as u64 });
            }
            retry(deadline, &mut pause).map_err(context)?;
        }
    }

    /// Makes `path` an empty log, unless it is a file of another kind.
    fn clear(path: &Path) -> Result<()> {
        let context = |error| Error::io(format!("create the file store {}", path.display()), error);
        let mut data = open(path, true).map_err(context)?;
        let mut start = Vec::new();
        (&mut data).take(MAGIC.len() as u64).read_to_end(&mut start).map_err(context)?;
        if !MAGIC.starts_with(&start) {
            let reason = format!("the file {} exists and is not a store: choose another one", path.display());
            return Err(Error::invalid("init_method", reason));
        }
        // Files left by an earlier version may be readable by other users.
        data.set_permissions(Permissions::from_mode(MODE)).map_err(context)?;
        data.set_len(0).and_then(|()| data.rewind()).and_then(|()| data.write_all(MAGIC)).map_err(context)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the offset up to which the log has been read.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns whether there may be new records. Cheap enough for polling.
    pub(super) fn has_grown(&self) -> io::Result<bool> {
        self.data.metadata().map(|metadata| metadata.len() != self.offset)
    }

    /// Waits for the lock for reading and appending.
    pub(super) fn access(&mut self, deadline: Instant) -> io::Result<Access<'_>> {
        lock(deadline, || self.data.try_lock())?;
        Ok(Access { log: self })
    }
}

impl Access<'_> {
    /// Passes each record appended since the last call to `apply`. Skips a torn record at the end, whose writer died:
    /// no process has seen it, and the next writer overwrites it.
    pub(super) fn read(&mut self, mut apply: impl FnMut(&[u8])) -> io::Result<()> {
        let log = &mut *self.log;
        if log.data.metadata()?.len() <= log.offset {
            return Ok(());
        }
        log.data.seek(SeekFrom::Start(log.offset))?;
        let mut reader = io::BufReader::with_capacity(1 << 16, &log.data);
        let mut record = Vec::new();
        loop {
            let mut header = [0; HEADER];
            record.clear();
            match reader.read_exact(&mut header) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            }
            let [a, b, c, d, sum @ ..] = header;
            let length = u32::from_le_bytes([a, b, c, d]) as usize;
            if length > MAX_RECORD {
                return Ok(());
            }
            (&mut reader).take(length as u64).read_to_end(&mut record)?;
            if record.len() < length || u32::from_le_bytes(sum) != fnv1a_32(&record) {
                return Ok(());
            }
            apply(&record);
            log.offset += (HEADER + length) as u64;
        }
    }

    /// Appends a record. Everything before it must have been read.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        let log = &mut *self.log;
        let length = u32::try_from(record.len()).ok().filter(|length| *length as usize <= MAX_RECORD);
        let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
        let mut bytes = Vec::with_capacity(HEADER + record.len());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&fnv1a_32(record).to_le_bytes());
        bytes.extend_from_slice(record);
        // Anything after the offset is torn.
        log.data.set_len(log.offset)?;
        log.data.seek(SeekFrom::Start(log.offset))?;
        if let Err(error) = log.data.write_all(&bytes) {
            // This is best effort on a full disk; readers skip the torn record anyway.
            let _ = log.data.set_len(log.offset);
            return Err(error);
        }
        log.offset += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for FileLog {
    /// The last user removes the files.
    fn drop(&mut self) {
        if self.users.try_lock().is_ok() && leads_to(&self.lock_path, &self.users).unwrap_or(false) {
            // If a file cannot be removed, the next run clears it.
            let _ = std::fs::remove_file(&self.path);
            let _ = std::fs::remove_file(&self.lock_path);
        }
    }
}
