//! Files of an optimizer's state, and of its shards, which earlier versions have written.
use crate::state::file::read_safetensors;
use crate::state::{Dict, Saved};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A random number that all files of one save have in common.
const SAVING: &str = "saving";

/// Reads the file of a state, or the folder of its shards.
pub(super) fn read(path: &Path) -> Result<Saved> {
    match path.is_dir() {
        true => read_shards(path).map(Saved::Shards),
        false => read_safetensors(path).map(Saved::Whole),
    }
}

/// Reads the files of one save, in the order of ranks.
fn read_shards(folder: &Path) -> Result<Vec<Dict>> {
    let mut savings = Vec::new();
    let mut shards = Vec::new();
    for path in files(folder)? {
        let mut shard = read_safetensors(&path)?;
        let saving = shard.remove(SAVING).ok_or_else(|| Error::parameter(SAVING, "it is missing from the shard"))?;
        savings.push(saving.to_vec1::<i64>()?);
        shards.push(shard);
    }
    if savings.windows(2).any(|pair| pair[0] != pair[1]) {
        let reason = "its files are from different saves, at least one of which was interrupted";
        return Err(Error::invalid("folder", format!("{}: {reason}", folder.display())));
    }
    Ok(shards)
}

/// The files of one save in the order of ranks, in which their parts of a parameter follow each other.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |source| Error::io(format!("reading {}", folder.display()), source);
    let mut sizes = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let size = name.to_str().and_then(|name| {
            let (_, size) = name.strip_prefix("shard-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
            size.parse::<usize>().ok()
        });
        sizes.extend(size);
    }
    let invalid = |reason: String| Error::invalid("folder", format!("{} {reason}", folder.display()));
    match sizes.iter().copied().collect::<Vec<_>>()[..] {
        [] => Err(invalid("holds no shard-….safetensors".to_string())),
        [size] => (0..size)
            .map(|rank| {
                let path = folder.join(format!("shard-{rank:05}-of-{size:05}.safetensors"));
                if path.is_file() { Ok(path) } else { Err(invalid(format!("lacks {}", path.display()))) }
            })
            .collect(),
        _ => Err(invalid(format!(
            "must hold the shards of one world, but holds those of worlds of {sizes:?} ranks: keep one"
        ))),
    }
}
