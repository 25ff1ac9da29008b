//! Parts of states in files and in memory.
use crate::state::Dict;
use crate::state::file::read_safetensors;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A random number that all files of one save have in common.
pub(super) const SAVING: &str = "saving";

/// Parts of states by the names of the whole states, each with the element at which it starts.
#[derive(Default)]
pub(super) struct Parts(pub(super) HashMap<String, Vec<(usize, Tensor)>>);

impl Parts {
    pub(super) fn add(&mut self, whole: &str, start: usize, part: &Tensor) -> Result<()> {
        self.0.entry(whole.to_string()).or_default().push((start, part.flatten_all()?));
        Ok(())
    }

    /// Checks the dtype of the parts, and that they add up to `elements` if that is given.
    pub(super) fn check(&self, key: &str, elements: Option<usize>, dtype: DType) -> Result<()> {
        let parts = self.0.get(key).map_or(&[][..], Vec::as_slice);
        let next = |end, (start, part): &(usize, Tensor)| (*start == end).then(|| end + part.elem_count());
        let end = || parts.iter().try_fold(0, next);
        if let Some(elements) = elements
            && end() != Some(elements)
        {
            let reason = format!("its parts in the shards do not add up to the {elements} elements that it has here");
            return Err(Error::parameter(key, reason));
        }
        match parts.iter().find(|(_, part)| part.dtype() != dtype) {
            Some((_, part)) => {
                let (is, needed) = (part.dtype().as_str(), dtype.as_str());
                Err(Error::parameter(key, format!("the shards hold {is}, but it must be {needed}")))
            }
            None => Ok(()),
        }
    }

    /// The elements of a whole state from `start` on.
    pub(super) fn take(&self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        let mut found = Vec::new();
        for (offset, part) in self.0.get(key).into_iter().flatten() {
            let (from, to) = (start.max(*offset), (start + elements).min(offset + part.elem_count()));
            if from < to {
                found.push(part.narrow(0, from - offset, to - from)?);
            }
        }
        if found.iter().map(Tensor::elem_count).sum::<usize>() != elements {
            let reason = format!("elements {start} to {} of it are missing from the shards", start + elements);
            return Err(Error::parameter(key, reason));
        }
        // A copy, since the kernels change it in place.
        Ok(Tensor::cat(&found, 0)?.copy()?)
    }
}

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
