//! Where the samples of a shard are: made by reading its headers once, and kept in a file.
use super::names::split;
use super::read::{Shard, Stamp};
use crate::hash::content_64;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use rayon::prelude::*;
use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tar::Archive;

/// The first word of every index. The version is its last digit.
const MAGIC: u64 = u64::from_le_bytes(*b"ddp-tar1");
/// The words before the samples: the magic, the shard's size and time, and a hash of its name.
const HEADER: usize = 4;

/// Where each sample of a shard begins, and how long it is, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Index(Vec<[u64; 2]>);

impl Index {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The offset and the length of a sample.
    pub(super) fn place(&self, sample: usize) -> Option<(u64, usize)> {
        self.0.get(sample).and_then(|[offset, len]| Some((*offset, usize::try_from(*len).ok()?)))
    }
}

/// The indices of all shards. Those that do not exist yet are made.
pub(super) fn of_all(shards: &[Shard], folder: Option<&Path>) -> Result<Vec<Index>> {
    // Ranks begin in different places, so that they share the work: each looks for an index that another has made since.
    let first = std::process::id() as usize % shards.len();
    let order: Vec<usize> = (0..shards.len()).map(|number| (number + first) % shards.len()).collect();
    let mut made = order
        .into_par_iter()
        .map(|number| {
            let shard = &shards[number];
            let file = file_of(shard, folder);
            let index = match load(shard, &file)? {
                Some(index) => index,
                None => {
                    let index = scan(shard)?;
                    save(&index, shard, &file)?;
                    index
                }
            };
            Ok((number, index))
        })
        .collect::<Result<Vec<_>>>()?;
    made.sort_unstable_by_key(|(number, _)| *number);
    Ok(made.into_iter().map(|(_, index)| index).collect())
}

fn name_hash(shard: &Shard) -> u64 {
    content_64(shard.path().as_os_str().as_bytes())
}

fn file_of(shard: &Shard, folder: Option<&Path>) -> PathBuf {
    match folder {
        // Shards of different folders may have the same name.
        Some(folder) => {
            let mut name = shard.path().file_name().map_or_else(OsString::new, ToOwned::to_owned);
            name.push(format!("-{:016x}.index", name_hash(shard)));
            folder.join(name)
        }
        None => {
            let mut path = shard.path().as_os_str().to_owned();
            path.push(".index");
            path.into()
        }
    }
}

/// The index in a file, unless there is none, or a damaged one.
fn load(shard: &Shard, file: &Path) -> Result<Option<Index>> {
    let bytes = match std::fs::read(file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("reading the index {}", file.display()), error)),
    };
    let Some((stamp, index)) = parse(&bytes) else {
        log::warn!("the index {} is damaged, or of another version: it is made again", file.display());
        return Ok(None);
    };
    match stamp.changed(shard.stamp) {
        None => Ok(Some(index)),
        Some(reason) => {
            let hint = format!("If that is right, remove {}, and a new one is made", file.display());
            Err(shard.error(format!("{reason}. {hint}")))
        }
    }
}

fn parse(bytes: &[u8]) -> Option<(Stamp, Index)> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    let (hash, content) = words.split_last()?;
    if content.first().map(|word| u64::from_le_bytes(*word)) != Some(MAGIC)
        || content_64(content.as_flattened()) != u64::from_le_bytes(*hash)
    {
        return None;
    }
    let (header, samples) = content.split_at_checked(HEADER)?;
    let stamp = Stamp { size: u64::from_le_bytes(header[1]), modified: i64::from_le_bytes(header[2]) };
    let (samples, []) = samples.as_chunks::<2>() else { return None };
    Some((stamp, Index(samples.iter().map(|sample| sample.map(u64::from_le_bytes)).collect())))
}

fn save(index: &Index, shard: &Shard, file: &Path) -> Result<()> {
    let header = [MAGIC, shard.stamp.size, shard.stamp.modified.cast_unsigned(), name_hash(shard)];
    let words = header.iter().chain(index.0.as_flattened());
    let mut bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(content_64(&bytes).to_le_bytes());
    let written =
        PreparedFile::write(file, &Progress::default(), |to| to.write_all(&bytes)).and_then(PreparedFile::commit);
    written.map_err(|error| {
        let hint =
            "an index is kept beside its shard, or in TarOptions::index_folder; choose a folder that may be written";
        Error::io(hint, std::io::Error::other(error))
    })
}

/// Reads all headers.
fn scan(shard: &Shard) -> Result<Index> {
    let mut samples = Samples::default();
    // The end of the last file, where the next header begins.
    let mut end = 0;
    let opened = shard.reader().map_err(|error| shard.error(error.to_string()))?;
    let mut archive = Archive::new(opened);
    let entries = archive.entries_with_seek().map_err(|error| shard.error_at(0, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| {
            let hint = if end == 0 { " (it must be a plain tar file, not a compressed one)" } else { "" };
            shard.error_at(end, format!("{error}{hint}"))
        })?;
        let (begin, kind) = (end, entry.header().entry_type());
        let data_end = entry.raw_file_position().checked_add(entry.size()).filter(|end| *end < u64::MAX - 512);
        let path = entry.path_bytes();
        end = data_end.ok_or_else(|| shard.error_at(begin, "the size of its file overflows"))?.div_ceil(512) * 512;
        if kind.is_gnu_sparse() {
            return Err(shard.error_at(begin, "a sparse file, which is not supported: make the shard without --sparse"));
        }
        if let Some((key, name)) = split(&path).filter(|_| kind.is_file()) {
            samples.add(key, name, begin, end).map_err(|reason| shard.error_at(begin, reason))?;
        }
    }
    // A tar file ends with a block of zeros, and one that is cut off has none.
    let mut block = [0; 512];
    let mut reader = archive.into_inner();
    let ended = reader.seek(SeekFrom::Start(end)).and_then(|_| reader.read_exact(&mut block));
    match ended {
        Ok(()) => Ok(Index(samples.places)),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            let last = samples.places.last().map_or(0, |[begin, _]| *begin);
            let reason = format!(
                "it is truncated: after the sample that begins here, a block of zeros should end it at byte {end}. Copy it again"
            );
            Err(shard.error_at(last, reason))
        }
        Err(error) => Err(shard.error_at(end, error)),
    }
}

/// The samples that were found so far.
#[derive(Default)]
struct Samples {
    places: Vec<[u64; 2]>,
    key: Vec<u8>,
    /// The names of its files.
    names: HashSet<Vec<u8>>,
    /// Hashes of all keys.
    keys: HashSet<u64>,
}

impl Samples {
    /// Adds a file, from its header to its end.
    fn add(&mut self, key: &[u8], name: &[u8], begin: u64, end: u64) -> Result<(), String> {
        let shown = || String::from_utf8_lossy(key);
        match self.places.last_mut() {
            Some(last) if self.key == key => last[1] = end - last[0],
            _ => {
                if !self.keys.insert(content_64(key)) {
                    return Err(format!(
                        "another file of the sample {} was not next to this one: make the shard with tar --sort=name",
                        shown()
                    ));
                }
                self.places.push([begin, end - begin]);
                self.key = key.to_vec();
                self.names.clear();
            }
        }
        if !self.names.insert(name.to_vec()) {
            return Err(format!("the sample {} has two files .{}", shown(), String::from_utf8_lossy(name)));
        }
        Ok(())
    }
}
