//! Where the samples of a shard are: made by reading its headers once, and kept in a file.
use super::entries::Fault;
use super::read::{Indexed, Shard, Stamp};
use super::scan::scan;
use crate::{Error, Result};
use candle_ddp_base::file::{PreparedFile, Progress};
use candle_ddp_base::hash::content_64;
use rayon::prelude::*;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How every index begins. The version is its last digit.
const MAGIC: &[u8; 8] = b"ddp-tar2";
/// The beginning that all versions have in common.
const MARK: &[u8] = b"ddp-tar";
/// The words before the samples: the magic, a hash that identifies the shard, the shard's stamp, and the number of samples.
const HEADER: usize = 5;

/// The offset and the length of each sample of a shard, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Index {
    pub(super) indexed: Indexed,
    places: Vec<[u64; 2]>,
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The offset and the length of a sample.
    pub(super) fn place(&self, sample: usize) -> Option<(u64, usize)> {
        self.places.get(sample).and_then(|[offset, len]| Some((*offset, usize::try_from(*len).ok()?)))
    }
}

/// Whether a file is an index, of whatever shard.
pub(crate) fn is_index(path: &Path) -> bool {
    let mut begin = [0; MARK.len()];
    path.extension().is_some_and(|extension| extension == "index")
        && File::open(path).and_then(|mut file| file.read_exact(&mut begin)).is_ok()
        && begin == *MARK
}

/// The indices of all shards. Missing ones are made.
pub(super) fn of_all(shards: &[Shard], folder: Option<&Path>) -> Result<Vec<Index>> {
    // Ranks begin in different places, so that they share the work: each looks for an index that another has made since.
    let first = std::process::id() as usize % shards.len();
    let order: Vec<usize> = (0..shards.len()).map(|number| (number + first) % shards.len()).collect();
    let mut made = order
        .into_par_iter()
        .map(|number| Ok((number, of_shard(&shards[number], folder)?)))
        .collect::<Result<Vec<_>>>()?;
    made.sort_unstable_by_key(|(number, _)| *number);
    Ok(made.into_iter().map(|(_, index)| index).collect())
}

fn of_shard(shard: &Shard, folder: Option<&Path>) -> Result<Index> {
    let owner = owner_of(shard, folder.is_some())?;
    let file = file_of(shard, folder, owner);
    if let Some(index) = load(shard, owner, &file)? {
        return Ok(index);
    }
    let index = made(shard, file)?;
    // Zeros are an archive without files, but also what a source may give by mistake.
    if index.len() > 0 || !shard.is_remote() {
        save(&index, owner)?;
    }
    Ok(index)
}

/// A hash that tells the shard from all others that may have an index of this name.
fn owner_of(shard: &Shard, in_folder: bool) -> Result<u64> {
    if let Some(location) = shard.location()? {
        return Ok(content_64(location.as_bytes()));
    }
    // An index next to its shard stays with it when their folder moves.
    let path = match in_folder {
        true => &std::fs::canonicalize(shard.path()).map_err(|error| shard.error(error.to_string()))?,
        false => Path::new(shard.path().file_name().unwrap_or_default()),
    };
    Ok(content_64(path.as_os_str().as_bytes()))
}

fn file_of(shard: &Shard, folder: Option<&Path>, owner: u64) -> PathBuf {
    match folder {
        // Shards of different folders, or sources, may have the same name.
        Some(folder) => {
            let name = shard.path().file_name().unwrap_or_default().to_string_lossy();
            // No longer than a file's name may be.
            let name: String = name.chars().take(50).collect();
            folder.join(format!("{name}-{owner:016x}.index"))
        }
        None => {
            let mut path = shard.path().as_os_str().to_owned();
            path.push(".index");
            path.into()
        }
    }
}

/// The index in a file, unless it is missing or wrong.
fn load(shard: &Shard, owner: u64, file: &Path) -> Result<Option<Index>> {
    let bad = |reason: &str| {
        log::warn!("the index {} {reason}: it is made again", file.display());
        Ok(None)
    };
    let reading = |error| Error::io(format!("reading the index {}", file.display()), error);
    let words = match read(file) {
        Ok(words) => words,
        Err(Unread::Absent) => return Ok(None),
        Err(Unread::Damaged) => return bad("is damaged, or of another version"),
        Err(Unread::Foreign) => {
            let reason = "it is where an index should be, but is none: move it away, or open the shards by TarShards::with_index_folder";
            return Err(Error::data_file(file, reason));
        }
        Err(Unread::Failed(error)) => return Err(reading(error)),
    };
    let Some((found, stamp, places)) = parse(&words) else { return bad("is damaged") };
    if found != owner {
        return bad("is that of another shard");
    }
    if places.is_empty() && shard.is_remote() {
        return Ok(None);
    }
    let indexed = Indexed { stamp, file: file.to_path_buf() };
    // Shards elsewhere are compared when they are first read: to ask for the version of all of them takes time.
    if !shard.is_remote() {
        shard.compare(&indexed, shard.stamp()?)?;
    }
    Ok(Some(Index { indexed, places }))
}

/// The reason why there are no words of an index.
enum Unread {
    Absent,
    Damaged,
    /// Somebody else's file.
    Foreign,
    Failed(io::Error),
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::NotFound => Self::Absent,
            ErrorKind::UnexpectedEof => Self::Damaged,
            ErrorKind::IsADirectory => Self::Foreign,
            _ => Self::Failed(error),
        }
    }
}

/// The words of an index. No more is read than its header says, which must be what the file has.
fn read(path: &Path) -> Result<Vec<u64>, Unread> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut begin = [0; MAGIC.len()];
    let taken = begin.len().min(usize::try_from(len).unwrap_or(usize::MAX));
    file.read_exact(&mut begin[..taken])?;
    // The system may have failed before the bytes were on the disk.
    if taken > 0 && !begin.starts_with(MARK) {
        return Err(Unread::Foreign);
    }
    let mut header = [0; 8 * (HEADER - 1)];
    file.read_exact(&mut header)?;
    let (header, _) = header.as_chunks::<8>();
    let mut words: Vec<u64> = [begin].iter().chain(header).map(|word| u64::from_le_bytes(*word)).collect();
    let [_, _, size, _, samples] = words[..] else { return Err(Unread::Damaged) };
    // Each sample takes a block at least.
    let expected = samples.checked_mul(16).and_then(|bytes| bytes.checked_add(8 * (HEADER as u64 + 1)));
    if begin != *MAGIC || samples > size / 512 || expected != Some(len) {
        return Err(Unread::Damaged);
    }
    let mut rest = vec![0; len as usize - 8 * HEADER];
    file.read_exact(&mut rest)?;
    words.extend(rest.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)));
    Ok(words)
}

/// The hash that identifies the shard, its stamp, and the places of the samples, if the words are as they were written.
fn parse(words: &[u64]) -> Option<(u64, Stamp, Vec<[u64; 2]>)> {
    let (hash, content) = words.split_last()?;
    if hash_of(content) != *hash {
        return None;
    }
    let (&[_, owner, size, version, _], places) = content.split_first_chunk::<HEADER>()?;
    let (places, []) = places.as_chunks::<2>() else { return None };
    let mut end = 0;
    for [offset, len] in places {
        let begins_after = *offset >= end;
        end = offset.checked_add(*len).filter(|end| begins_after && *end <= size)?;
    }
    Some((owner, Stamp { size, version }, places.to_vec()))
}

fn hash_of(words: &[u64]) -> u64 {
    content_64(&bytes_of(words))
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn save(index: &Index, owner: u64) -> Result<()> {
    let Indexed { stamp: Stamp { size, version }, file } = &index.indexed;
    let header = [u64::from_le_bytes(*MAGIC), owner, *size, *version, index.len() as u64];
    let mut words: Vec<u64> = header.iter().chain(index.places.as_flattened()).copied().collect();
    words.push(hash_of(&words));
    let bytes = bytes_of(&words);
    let write = |prepared: PreparedFile| {
        prepared.fill(&Progress::default(), |to| to.write_all(&bytes))?;
        prepared.commit()
    };
    // Its name follows from the shard's: a link there may be somebody else's.
    let written = PreparedFile::create_over_links(file).and_then(write);
    written.map_err(|error| {
        let hint =
            "an index is kept next to its shard, or in the folder of TarShards::with_index_folder; choose a folder that may be written";
        Error::io(hint, io::Error::other(error))
    })
}

/// Reads all headers. If they are wrong in a shard elsewhere, or there are none, only a cache may be at fault, so they are read once more.
fn made(shard: &Shard, file: PathBuf) -> Result<Index> {
    let stamp = shard.stamp()?;
    let scanned = |again| {
        let mut headers = shard.headers(stamp.size, again).map_err(|error| Fault::Read(0, error))?;
        scan(&mut *headers, stamp.size)
    };
    let places = match scanned(false) {
        Err(Fault::Content(at, reason)) if shard.is_remote() => {
            log::warn!("{}: at byte {at}: {reason}; reading it again", shard.name());
            scanned(true).map_err(|fault| match fault {
                Fault::Content(at, reason) => {
                    Fault::content(at, format!("{reason} (so the source says, past the cache)"))
                }
                read => read,
            })
        }
        Ok(places) if places.is_empty() && shard.is_remote() => {
            log::warn!("{} has no sample; reading it again past the cache", shard.name());
            scanned(true)
        }
        once => once,
    };
    let places = places.map_err(|fault| shard.fault(0, fault))?;
    let indexed = Indexed { stamp, file };
    // Somebody may still be writing it.
    shard.compare(&indexed, shard.stamp()?)?;
    Ok(Index { indexed, places })
}
