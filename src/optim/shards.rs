//! Files of the shards of a state.
use crate::state::Dict;
use crate::state::file::read_safetensors;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A random number that all files of one save have in common.
pub(super) const SAVING: &str = "saving";

pub(super) fn file(folder: &Path, rank: usize, world_size: usize) -> PathBuf {
    folder.join(format!("shard-{rank:05}-of-{world_size:05}.safetensors"))
}

/// Reads the files of one save, in the order of ranks.
pub(super) fn read_shards(folder: &Path) -> Result<Vec<Dict>> {
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
                let path = file(folder, rank, size);
                if path.is_file() { Ok(path) } else { Err(invalid(format!("lacks {}", path.display()))) }
            })
            .collect(),
        _ => Err(invalid(format!(
            "must hold the shards of one world, but holds those of worlds of {sizes:?} ranks: keep one"
        ))),
    }
}
