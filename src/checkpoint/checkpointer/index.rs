//! The index of a checkpoint: a JSON file that is written last and completes it. It lists every file with its hash, and holds a
//! hash of itself.
use crate::error::Context;
use crate::hash::content_64;
use crate::state::FileHash;
use crate::state::file::LONGEST_HEADER;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The name of the index in the folder of a checkpoint.
pub(super) const INDEX: &str = "checkpoint.json";

/// The number of this format.
const FORMAT: u32 = 2;
/// The number of the format without hashes, which is only read.
const UNHASHED: u32 = 1;

/// The reason why a folder has no index that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It has none: it is a running save, a leftover, or another program's folder.
    Absent,
    /// The checkpoint is not as it was saved.
    Damaged(String),
    /// A later version has saved it.
    Unknown(String),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    format: u32,
    pub(super) step: u64,
    /// Whether it was saved by `save_best`.
    pub(super) best: bool,
    /// The number of ranks that saved it.
    pub(super) world_size: usize,
    pub(super) parts: Vec<Part>,
    /// The first infinity or NaN in it, as text, if it may not replace a finite checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) non_finite: Option<String>,
    /// The hash of this index without this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hash: Option<FileHash>,
}

/// One of the states that were saved together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) name: String,
    /// Whether each rank has written its own file.
    pub(super) sharded: bool,
    /// In rank order.
    pub(super) files: Vec<Written>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) name: String,
    pub(super) bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hash: Option<FileHash>,
}

/// Facts about the files that the ranks have written.
#[derive(Default)]
pub(super) struct Files {
    /// The hashes, by name.
    pub(super) hashes: HashMap<String, FileHash>,
    /// The first infinity or NaN, as text.
    pub(super) non_finite: Option<String>,
}

impl Index {
    /// The index of files that are on the disk. `parts` has the parts' names, and whether they are sharded. What is not finite is never
    /// the best.
    pub(super) fn new(
        folder: &Path,
        step: u64,
        best: bool,
        world_size: usize,
        parts: &[(String, bool)],
        Files { hashes, non_finite }: Files,
    ) -> Result<Self> {
        let written = |name: String| {
            let path = folder.join(&name);
            let file = path.metadata().with_context(|| {
                format!(
                    "looking for {}, which another rank has written (all ranks need the same file system)",
                    path.display()
                )
            })?;
            let hash = hashes.get(&name).copied();
            Ok(Written { name, bytes: file.len(), hash })
        };
        let parts = parts.iter().map(|(name, sharded)| {
            let files = files(name, *sharded, world_size).map(written).collect::<Result<_>>()?;
            Ok(Part { name: name.clone(), sharded: *sharded, files })
        });
        let parts = parts.collect::<Result<_>>()?;
        let best = best && non_finite.is_none();
        let index = Self { format: FORMAT, step, best, world_size, parts, non_finite, hash: None };
        Ok(Self { hash: Some(index.own_hash()?), ..index })
    }

    fn own_hash(&self) -> Result<FileHash> {
        let text = Self { hash: None, ..self.clone() }.to_json()?;
        Ok(FileHash(content_64(&text)))
    }

    /// Whether the files can be compared with hashes.
    pub(super) fn is_hashed(&self) -> bool {
        self.hash.is_some()
    }

    pub(super) fn to_json(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::invalid("parts", format!("their index cannot be written: {error}")))?;
        text.push(b'\n');
        Ok(text)
    }

    /// Reads the index in `folder`, the folder of step `step`. `Ok(Err(…))` says why the checkpoint there cannot be used.
    pub(super) fn read(folder: &Path, step: u64) -> Result<std::result::Result<Self, Fault>> {
        let path = folder.join(INDEX);
        let mut text = Vec::new();
        match File::open(&path).and_then(|file| file.take(LONGEST_HEADER).read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Err(Fault::Absent)),
            Err(error) => return Err(Error::io(format!("reading {}", path.display()), error)),
        };
        let index = match Self::parse(&text) {
            Ok(index) => index,
            Err(fault) => return Ok(Err(fault)),
        };
        let damaged = |reason| Ok(Err(Fault::Damaged(reason)));
        if index.step != step {
            return damaged(format!("its {INDEX} belongs to step {}", index.step));
        }
        for Written { name, bytes, .. } in index.parts.iter().flat_map(|part| &part.files) {
            let is = match folder.join(name).metadata() {
                Ok(file) => file.len(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return damaged(format!("{name} is missing"));
                }
                Err(error) => return Err(Error::io(format!("looking for {name} in {}", folder.display()), error)),
            };
            if is != *bytes {
                return damaged(format!("{name} has {is} bytes instead of {bytes}"));
            }
        }
        Ok(Ok(index))
    }

    /// An index, whose files may be missing.
    fn parse(text: &[u8]) -> std::result::Result<Self, Fault> {
        let damaged = |reason: &dyn std::fmt::Display| Fault::Damaged(format!("its {INDEX} is damaged: {reason}"));
        /// The rest may be anything in another format.
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_slice(text).map_err(|error| damaged(&error))?;
        if format > FORMAT {
            return Err(Fault::Unknown(format!(
                "its format is {format}, and this version of candle-ddp reads only formats up to {FORMAT}: use the version that \
                 saved it, or move it away"
            )));
        }
        let index: Self = serde_json::from_slice(text).map_err(|error| damaged(&error))?;
        let mut hashes = index.parts.iter().flat_map(|part| &part.files).map(|file| file.hash);
        let is_right = match format {
            UNHASHED => index.hash.is_none() && hashes.all(|hash| hash.is_none()),
            FORMAT => index.own_hash().ok() == index.hash && hashes.all(|hash| hash.is_some()),
            _ => false,
        };
        if !is_right {
            return Err(damaged(&"it does not have the hash that was saved with it"));
        }
        check_names(index.parts.iter().map(|part| part.name.as_str())).map_err(|error| damaged(&error))?;
        // Otherwise an index could name the files of other programs.
        for Part { name, sharded, files: listed } in &index.parts {
            if !files(name, *sharded, index.world_size).eq(listed.iter().map(|file| file.name.clone())) {
                return Err(damaged(&format_args!("it lists files for the part {name:?} that no save writes")));
            }
        }
        Ok(index)
    }

    pub(super) fn part(&self, name: &str) -> Result<&Part> {
        self.parts.iter().find(|part| part.name == name).ok_or_else(|| {
            let names: Vec<_> = self.parts.iter().map(|part| part.name.as_str()).collect();
            let (step, names) = (self.step, names.join(", "));
            Error::invalid("parts", format!("the checkpoint of step {step} has no part {name:?}; it has {names}"))
        })
    }
}

/// The files of a part, in rank order.
fn files(part: &str, sharded: bool, world_size: usize) -> impl Iterator<Item = String> {
    let ranks = if sharded { world_size } else { 1 };
    (0..ranks).map(move |rank| if sharded { shard_file(part, rank, world_size) } else { whole_file(part) })
}

pub(super) fn whole_file(part: &str) -> String {
    format!("{part}.safetensors")
}

pub(super) fn shard_file(part: &str, rank: usize, world_size: usize) -> String {
    format!("{part}-{rank:05}-of-{world_size:05}.safetensors")
}

/// Whether a file of the part `name` could be taken for the shard of another part, as `own-00000-of-00002`.
fn is_shard(name: &str) -> bool {
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut words = name.rsplitn(4, '-');
    let (size, of, rank, part) = (words.next(), words.next(), words.next(), words.next());
    part.is_some() && of == Some("of") && size.is_some_and(is_number) && rank.is_some_and(is_number)
}

/// Checks names of parts, which become names of files.
pub(super) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<()> {
    const LONGEST: usize = 100;
    let mut seen = HashSet::new();
    for name in names {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > LONGEST || name.starts_with('.') || !name.bytes().all(is_allowed) {
            let reason = format!(
                "{name:?} is not a valid part name: it must have 1 to {LONGEST} letters, digits, '.', '_' or '-', and \
                 must not begin with '.'"
            );
            return Err(Error::invalid("parts", reason));
        }
        if is_shard(name) {
            let reason = format!(
                "{name:?} is not a valid part name: the shards of a part that is spread over the \
                                  ranks have such names"
            );
            return Err(Error::invalid("parts", reason));
        }
        if !seen.insert(name) {
            return Err(Error::invalid("parts", format!("{name:?} is given twice: each part needs its own name")));
        }
    }
    Ok(())
}

/// An index that was read is written as the same text.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz_index(data: &[u8]) {
    if let Ok(index) = Index::parse(data) {
        let text = index.to_json().expect("an index that was read can be written");
        assert_eq!(Index::parse(&text), Ok(index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_names_of_files() {
        check_names(["model", "ema.0.999", "a_b-c", "9"].into_iter()).unwrap();
        for name in ["", ".model", "a/b", "a b", "ä", &"x".repeat(101)] {
            let error = check_names([name].into_iter()).unwrap_err().to_string();
            assert!(error.contains("is not a valid part name"), "{error}");
        }
        assert!(check_names(["a", "a"].into_iter()).unwrap_err().to_string().contains("given twice"));
        // The shards of a part `own` have this name.
        assert_eq!(shard_file("own", 0, 2), whole_file("own-00000-of-00002"));
        let error = check_names(["own", "own-00000-of-00002"].into_iter()).unwrap_err().to_string();
        assert!(error.contains("the shards of a part"), "{error}");
        check_names(["own-0-of-2", "00000-of-00002", "own-of-00002"].into_iter()).unwrap();
    }

    /// The files `model` and `zero` of step 7, and their index.
    fn indexed(folder: &Path) -> Index {
        std::fs::write(folder.join("model.safetensors"), "1234").unwrap();
        for rank in 0..2 {
            std::fs::write(folder.join(shard_file("zero", rank, 2)), "12").unwrap();
        }
        let parts = [("model".to_string(), false), ("zero".to_string(), true)];
        let names = ["model.safetensors".to_string(), shard_file("zero", 0, 2), shard_file("zero", 1, 2)];
        let hashes = names.into_iter().zip([5, 6, 0xfeed]).map(|(name, hash)| (name, FileHash(hash))).collect();
        Index::new(folder, 7, true, 2, &parts, Files { hashes, ..Files::default() }).unwrap()
    }

    #[test]
    fn an_index_finds_what_is_missing_or_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let why = || match Index::read(folder.path(), 7).unwrap() {
            Err(Fault::Damaged(reason)) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(Index::read(folder.path(), 7).unwrap(), Err(Fault::Absent));
        let index = indexed(folder.path());
        let written = Written { name: shard_file("zero", 1, 2), bytes: 2, hash: Some(FileHash(0xfeed)) };
        assert_eq!(index.part("zero").unwrap().files[1], written);
        std::fs::write(file(INDEX), index.to_json().unwrap()).unwrap();
        assert_eq!(Index::read(folder.path(), 7).unwrap(), Ok(index.clone()));
        assert!(matches!(Index::read(folder.path(), 8).unwrap(), Err(Fault::Damaged(why)) if why.contains("step 7")));
        let error = index.part("ema").unwrap_err().to_string();
        assert!(error.contains(r#"no part "ema"; it has model, zero"#), "{error}");
        std::fs::write(file("model.safetensors"), "123").unwrap();
        assert_eq!(why(), "model.safetensors has 3 bytes instead of 4");
        std::fs::remove_file(file("model.safetensors")).unwrap();
        assert_eq!(why(), "model.safetensors is missing");
        std::fs::remove_file(file(&shard_file("zero", 1, 2))).unwrap();
        let parts = [("zero".to_string(), true)];
        let error = Index::new(folder.path(), 7, true, 2, &parts, Files::default()).unwrap_err().to_string();
        assert!(error.contains("zero-00001-of-00002.safetensors, which another rank has written"), "{error}");
    }

    #[test]
    fn every_bit_of_an_index_counts() {
        let folder = tempfile::tempdir().unwrap();
        let index = indexed(folder.path());
        let text = index.to_json().unwrap();
        assert_eq!(Index::parse(&text), Ok(index.clone()));
        let mut unknown = 0;
        for (place, bit) in (0..text.len()).flat_map(|place| (0..8).map(move |bit| (place, bit))) {
            let mut other = text.clone();
            other[place] ^= 1 << bit;
            match Index::parse(&other) {
                // Blanks between the words, one of which may become another.
                Ok(read) => assert!(read == index && text[place].is_ascii_whitespace(), "bit {bit} of byte {place}"),
                Err(Fault::Damaged(reason)) => {
                    assert!(reason.starts_with("its checkpoint.json is damaged: "), "{reason}")
                }
                Err(Fault::Unknown(reason)) => {
                    unknown += 1;
                    assert!(reason.contains("reads only formats up to 2: use the version that saved it"), "{reason}");
                }
                Err(Fault::Absent) => panic!("there is a text"),
            }
        }
        // The 2 of the format becomes a 3 or a 6.
        assert_eq!(unknown, 2);
        for end in 0..text.len() - 1 {
            assert!(matches!(Index::parse(&text[..end]), Err(Fault::Damaged(_))), "{end}");
        }
    }

    #[test]
    fn absurd_numbers_of_an_index_cost_nothing() {
        for world_size in [u64::MAX, 1_000_000_000_000] {
            let text = format!(
                r#"{{"format": 1, "step": 18446744073709551615, "best": true, "world_size": {world_size}, "parts": [
                {{"name": "zero", "sharded": true, "files": [{{"name": "zero-00000-of-{world_size:05}.safetensors",
                "bytes": 18446744073709551615}}]}}]}}"#
            );
            assert!(
                matches!(Index::parse(text.as_bytes()), Err(Fault::Damaged(why)) if why.contains("no save writes"))
            );
        }
    }

    /// The format without hashes is still read, but not if the index has hashes.
    #[test]
    fn an_index_of_the_first_format_is_read() {
        let text = r#"{"format": 1, "step": 7, "best": false, "world_size": 1, "parts": [
            {"name": "model", "sharded": false, "files": [{"name": "model.safetensors", "bytes": 4}]}]}"#;
        let index = Index::parse(text.as_bytes()).unwrap();
        assert!(!index.is_hashed() && index.parts[0].files[0].hash.is_none());
        for (from, to) in [
            ("\"bytes\"", "\"hash\": \"00000000000000ff\", \"bytes\""),
            ("\"format\": 1", "\"format\": 2"),
            ("\"format\": 1", "\"format\": 0"),
        ] {
            assert!(matches!(Index::parse(text.replace(from, to).as_bytes()), Err(Fault::Damaged(_))), "{to}");
        }
    }
}
