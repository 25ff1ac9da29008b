//! Compiled kernels in a folder, so that a machine compiles each of them once.
use crate::Result;
use candle_ddp_env::PROCESS;
use rustix::fs::OFlags;
use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The environment variable that names the folder, or with the value 0 switches the cache off. By default it is
/// `candle-ddp/kernels` in the user's folder for caches.
const FOLDER: &str = "CANDLE_DDP_KERNEL_CACHE";
/// The beginning of each file.
const MAGIC: &[u8; 8] = b"cddpker1";

/// A folder of compiled kernels. A file is complete or absent, and names everything that its content follows from. Without access to
/// the folder, kernels are compiled, as without a cache. Other users may be able to write to it: only regular files of this process's
/// user count, and links are not followed.
#[derive(Debug)]
pub(super) struct Cache(PathBuf);

/// Everything on which a compilation depends.
#[derive(Debug)]
pub(super) struct Key {
    /// For the file's name.
    pub(super) name: String,
    /// The compiler's version, its options and the source.
    pub(super) text: String,
}

impl Cache {
    pub(super) fn of_environment() -> Option<Self> {
        let folder = PROCESS.path(FOLDER).or_else(|| {
            let cache = PROCESS.path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            Some(cache.or_else(|| Some(PROCESS.path("HOME")?.join(".cache")))?.join("candle-ddp/kernels"))
        })?;
        (folder.as_os_str() != "0").then_some(Self(folder))
    }

    /// Returns the image of `key` from the folder. If there is none, or only a broken one, `compile` makes it. Other processes that
    /// want to compile wait meanwhile.
    pub(super) fn get(&self, key: &Key, compile: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let path = self.0.join(format!("{}-{:016x}", key.name, fingerprint([key.text.as_bytes()])));
        if let Some(image) = read(&path, key) {
            return Ok(image);
        }
        // Unlocked when it is closed. Not every file system has locks; then several processes compile at once.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        let lock = made.and_then(|()| open(&self.0.join("lock"), File::options().write(true).create(true)));
        let locked = lock.and_then(|file| file.lock().map(|()| file));
        if locked.is_ok()
            && let Some(image) = read(&path, key)
        {
            return Ok(image);
        }
        let image = compile()?;
        // The next process compiles too if this fails.
        let _unwritten = self.write(&path, key, &image);
        Ok(image)
    }

    fn write(&self, path: &Path, key: &Key, image: &[u8]) -> io::Result<()> {
        // Processes of other machines may have the same id.
        let new = self.0.join(format!("{}.{:016x}.new", std::process::id(), RandomState::new().hash_one(0)));
        let mut file = File::create_new(&new)?;
        let text = key.text.as_bytes();
        let lengths = [text.len(), image.len()].map(|length| (length as u64).to_le_bytes());
        let sum = fingerprint([text, image]).to_le_bytes();
        let parts: [&[u8]; 6] = [MAGIC, &lengths[0], &lengths[1], &sum, text, image];
        let written = parts.iter().try_for_each(|part| file.write_all(part)).and_then(|()| fs::rename(&new, path));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

/// Opens a file of the folder, if it is one of this user.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Without the second flag, opening a FIFO waits for its other end.
    let file = options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32).open(path)?;
    let found = file.metadata()?;
    let is_own = found.is_file() && found.uid() == rustix::process::geteuid().as_raw();
    if is_own { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Returns the image in the file at `path`, if it is intact and of `key`.
fn read(path: &Path, key: &Key) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, File::options().read(true)).ok()?.read_to_end(&mut bytes).ok()?;
    let (magic, rest) = bytes.split_first_chunk::<8>()?;
    let (text_length, rest) = rest.split_first_chunk::<8>()?;
    let (image_length, rest) = rest.split_first_chunk::<8>()?;
    let (sum, rest) = rest.split_first_chunk::<8>()?;
    let (text, image) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*text_length)).ok()?)?;
    let is_intact = magic == MAGIC
        && text == key.text.as_bytes()
        && image.len() as u64 == u64::from_le_bytes(*image_length)
        && fingerprint([text, image]) == u64::from_le_bytes(*sum);
    is_intact.then(|| image.to_vec())
}

/// FNV-1a of all parts.
fn fingerprint<const N: usize>(parts: [&[u8]; N]) -> u64 {
    let bytes = parts.into_iter().flatten();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn key(text: &str) -> Key {
        Key { name: "adam.cu-f32".to_string(), text: text.to_string() }
    }

    /// The only file of an image.
    fn entry(folder: &Path) -> PathBuf {
        let is_entry = |path: &PathBuf| path.file_name().is_some_and(|name| name != "lock");
        let mut entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_entry);
        let entry = entries.next().unwrap();
        assert_eq!(entries.next(), None);
        entry
    }

    #[test]
    fn an_image_is_compiled_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache(folder.path().join("made"));
        let compiled = Cell::new(0);
        let get = |text: &str| {
            let compile = || {
                compiled.set(compiled.get() + 1);
                Ok(text.as_bytes().to_vec())
            };
            (cache.get(&key(text), compile).unwrap(), compiled.get())
        };
        assert_eq!(get("one"), (b"one".to_vec(), 1));
        assert_eq!(get("one"), (b"one".to_vec(), 1));
        assert_eq!(get("another"), (b"another".to_vec(), 2));
    }

    #[test]
    fn a_broken_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache(folder.path().to_path_buf());
        let get = |image: &[u8]| cache.get(&key("source"), || Ok(image.to_vec())).unwrap();
        assert_eq!(get(b"first"), b"first");
        let path = entry(folder.path());
        let intact = fs::read(&path).unwrap();
        let mut flipped = intact.clone();
        *flipped.last_mut().unwrap() ^= 1;
        for (number, broken) in [&intact[..intact.len() - 1], &intact[..20], &[], &flipped].into_iter().enumerate() {
            fs::write(&path, broken).unwrap();
            let image = format!("image {number}").into_bytes();
            assert_eq!(get(&image), image);
            assert_eq!(get(b"unused"), image);
        }
        assert_eq!(entry(folder.path()), path);
    }

    #[test]
    fn threads_that_start_together_compile_once() {
        let folder = tempfile::tempdir().unwrap();
        let (start, compiled) = (Barrier::new(4), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = Cache(folder.path().to_path_buf());
                    start.wait();
                    let compile = || {
                        compiled.fetch_add(1, Ordering::Relaxed);
                        Ok(b"image".to_vec())
                    };
                    assert_eq!(cache.get(&key("source"), compile).unwrap(), b"image");
                });
            }
        });
        assert_eq!(compiled.into_inner(), 1);
    }

    #[test]
    fn links_in_a_folder_that_others_write_to_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache(folder.path().join("made"));
        let get = |image: &[u8]| cache.get(&key("source"), || Ok(image.to_vec())).unwrap();
        assert_eq!(get(b"first"), b"first");
        let mode = fs::metadata(&cache.0).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        // Somebody else puts links there: to a file worth keeping, and to an image.
        let (precious, planted) = (folder.path().join("precious"), folder.path().join("planted"));
        let (lock, entry) = (cache.0.join("lock"), entry(&cache.0));
        fs::write(&precious, "worth keeping").unwrap();
        fs::rename(&entry, &planted).unwrap();
        fs::remove_file(&lock).unwrap();
        symlink(&precious, &lock).unwrap();
        symlink(&planted, &entry).unwrap();
        assert_eq!(get(b"second"), b"second");
        assert_eq!(fs::read(&precious).unwrap(), b"worth keeping");
        assert!(fs::read(&planted).unwrap().ends_with(b"first"));
        assert_eq!(get(b"unused"), b"second");
        // Only root can give a file away.
        if chown(&entry, Some(65534), None).is_ok() {
            assert_eq!(get(b"third"), b"third");
        }
    }

    #[test]
    fn without_a_folder_everything_is_compiled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache(file.path().join("folder"));
        for image in [b"first", b"other"] {
            assert_eq!(cache.get(&key("source"), || Ok(image.to_vec())).unwrap(), image);
        }
    }
}
