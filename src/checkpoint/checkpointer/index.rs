//! The index of a checkpoint: a JSON file that is written last and completes it.
use crate::error::Context;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// The name of the index in the folder of a checkpoint.
pub(super) const INDEX: &str = "checkpoint.json";

/// The number of this format.
const FORMAT: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    format: u32,
    pub(super) step: u64,
    /// Whether it was saved by `save_best`.
    pub(super) best: bool,
    /// The number of ranks that saved it.
    pub(super) world_size: usize,
    pub(super) parts: Vec<Part>,
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
}

impl Index {
    /// The index of files that are on the disk. `parts` has the parts' names, and whether they are sharded.
    pub(super) fn new(
        folder: &Path,
        step: u64,
        best: bool,
        world_size: usize,
        parts: &[(String, bool)],
    ) -> Result<Self> {
        let written = |name: String| {
            let path = folder.join(&name);
            let file = path.metadata().with_context(|| {
                format!(
                    "looking for {}, which another rank has written (all ranks need the same file system)",
                    path.display()
                )
            })?;
            Ok(Written { name, bytes: file.len() })
        };
        let parts = parts.iter().map(|(name, sharded)| {
            let files = files(name, *sharded, world_size).map(written).collect::<Result<_>>()?;
            Ok(Part { name: name.clone(), sharded: *sharded, files })
        });
        Ok(Self { format: FORMAT, step, best, world_size, parts: parts.collect::<Result<_>>()? })
    }

    pub(super) fn to_json(&self) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::invalid("parts", format!("their index cannot be written: {error}")))?;
        text.push(b'\n');
        Ok(text)
    }

    /// Reads the index in `folder`. `Ok(Err(…))` says why the checkpoint there is not complete.
    pub(super) fn read(folder: &Path) -> Result<std::result::Result<Self, String>> {
        let path = folder.join(INDEX);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Err(format!("it has no {INDEX}"))),
            Err(error) => return Err(Error::io(format!("reading {}", path.display()), error)),
        };
        let index = match Self::parse(&text) {
            Ok(index) => index,
            Err(reason) => return Ok(Err(reason)),
        };
        for Written { name, bytes } in index.parts.iter().flat_map(|part| &part.files) {
            let is = match folder.join(name).metadata() {
                Ok(file) => file.len(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Ok(Err(format!("{name} is missing")));
                }
                Err(error) => return Err(Error::io(format!("looking for {name} in {}", folder.display()), error)),
            };
            if is != *bytes {
                return Ok(Err(format!("{name} has {is} bytes instead of {bytes}")));
            }
        }
        Ok(Ok(index))
    }

    /// An index, whose files may be missing.
    fn parse(text: &[u8]) -> std::result::Result<Self, String> {
        let index: Self = serde_json::from_slice(text).map_err(|error| format!("its {INDEX} is damaged: {error}"))?;
        if index.format != FORMAT {
            return Err(format!(
                "its format is {}, but this version of candle-ddp reads only format {FORMAT}",
                index.format
            ));
        }
        check_names(index.parts.iter().map(|part| part.name.as_str()))
            .map_err(|error| format!("its {INDEX} is damaged: {error}"))?;
        // Otherwise an index could name the files of other programs.
        for Part { name, sharded, files: listed } in &index.parts {
            if !files(name, *sharded, index.world_size).eq(listed.iter().map(|file| file.name.clone())) {
                return Err(format!(
                    "its {INDEX} is damaged: it lists files for the part {name:?} that no save writes"
                ));
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

    #[test]
    fn an_index_finds_what_is_missing_or_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let why = || Index::read(folder.path()).unwrap().unwrap_err();
        assert_eq!(why(), "it has no checkpoint.json");
        std::fs::write(file("model.safetensors"), "1234").unwrap();
        let parts = [("model".to_string(), false), ("zero".to_string(), true)];
        let error = Index::new(folder.path(), 7, true, 2, &parts).unwrap_err().to_string();
        assert!(error.contains("zero-00000-of-00002.safetensors, which another rank has written"), "{error}");
        for rank in 0..2 {
            std::fs::write(file(&shard_file("zero", rank, 2)), "12").unwrap();
        }
        let index = Index::new(folder.path(), 7, true, 2, &parts).unwrap();
        std::fs::write(file(INDEX), index.to_json().unwrap()).unwrap();
        assert_eq!(Index::read(folder.path()).unwrap().unwrap(), index);
        assert_eq!(index.part("zero").unwrap().files[1], Written { name: shard_file("zero", 1, 2), bytes: 2 });
        let error = index.part("ema").unwrap_err().to_string();
        assert!(error.contains(r#"no part "ema"; it has model, zero"#), "{error}");
        std::fs::write(file("model.safetensors"), "123").unwrap();
        assert_eq!(why(), "model.safetensors has 3 bytes instead of 4");
        std::fs::remove_file(file("model.safetensors")).unwrap();
        assert_eq!(why(), "model.safetensors is missing");
        std::fs::write(file(INDEX), String::from_utf8(index.to_json().unwrap()).unwrap().replace(": 1,", ": 2,"))
            .unwrap();
        assert_eq!(why(), "its format is 2, but this version of candle-ddp reads only format 1");
        std::fs::write(file(INDEX), "{").unwrap();
        assert!(why().starts_with("its checkpoint.json is damaged"), "{}", why());
    }
}
