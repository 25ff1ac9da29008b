//! Checkpoints that just load: weights under the model's own names, from this crate and from PyTorch.
//!
//! [`save`] writes a safetensors file with the names of the `VarMap`. [`load`] reads such files, and those that
//! `torch.save` writes (`.pt`, `.pth`, `.bin`; which it is, the file's first bytes say), into the variables of a model
//! that has been built. The prefixes that PyTorch's wrappers leave in names, `module.` (DistributedDataParallel,
//! DataParallel) and `_orig_mod.` (torch.compile), are taken off.
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_ddp::checkpoint;
//! use candle_nn::{VarBuilder, VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! let varmap = VarMap::new();
//! let model = linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
//! # let file = std::env::temp_dir().join(format!("checkpoint-{}.safetensors", std::process::id()));
//! checkpoint::save(&varmap, &file)?;
//! checkpoint::load(&varmap, &file)?; // or a file from PyTorch
//! # std::fs::remove_file(&file).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # Another head
//! A checkpoint whose head is for other classes loads with [`LoadOptions::skip`], one with other names with
//! [`LoadOptions::rename`]; the [`LoadReport`] says what was left out. What has to be changed itself is [`read`], changed,
//! and given to [`load_tensors`].
//!
//! # A whole run
//! A [`Checkpointer`] saves model, optimizer, schedule and whatever else a run has to remember, together and in the
//! background, and loads the newest of its checkpoints after a restart.
//!
//! # With several ranks
//! [`save_distributed`] and [`load_distributed`] are called by every rank, and fail on every rank alike. With
//! DistributedDataParallel the variables are there once the model is built; every rank then loads the same file.
//!
//! # What is in a checkpoint
//! The variables, buffers among them. The state of an optimizer has a file of its own (see [`StateDict`]).
//!
//! Booleans are read as `u8`. A tensor that cannot be read, such as one of a dtype that candle does not have, is an
//! error where the model has a variable of that name, or where all tensors are asked for ([`read`]); otherwise it counts
//! like any other name.
//!
//! # Memory and trust
//! Tensors are read one by one: reading takes little more memory than they do. Tensors of a file of PyTorch's that share a
//! storage there share its memory here as well, where they are contiguous.
//!
//! A pickle is read without running any of it, however deep it is. Many of its tensors may be views of the same values: a
//! file whose tensors would need more than 16 times its size in memory (and one MiB) is refused. Besides, the pickle itself, which
//! holds names and shapes, takes about a hundred times its own size while it is read.
mod checkpointer;
mod distributed;
mod error;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod load;
mod model;
mod pickle;

pub use crate::state::{PerRank, RankZero, Serde, StateDict};
#[cfg(any(test, fuzzing))]
pub(crate) use checkpointer::fuzz_index;
pub use checkpointer::{Checkpointer, CheckpointerOptions, SaveHandle};
pub use distributed::{load_distributed, save_distributed};
#[cfg(any(test, fuzzing))]
pub(crate) use fuzz::{checkpoint_file as fuzz_checkpoint_file, pickle as fuzz_pickle};
pub use load::{LoadOptions, LoadReport, Rename, load, load_tensors, load_with};

use crate::panic::lock;
use crate::state::file::{Parsed, Readable, parse_safetensors, require_all, write_safetensors};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_nn::VarMap;
use error::unreadable;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

/// Writes the variables of `varmap` to a safetensors file: to a temporary one in the same folder first, which then takes
/// its name, so that there is never half a file, and the old one stays if something fails. What killed saves to the same
/// file have left is removed. Symbolic links are followed, and a file that is there keeps its permissions.
///
/// Of several ranks, one does this. It does not know whether the others are well, and on GPUs not even whether the last
/// collectives ended well: [`save_distributed`] does, before it replaces a file.
///
/// # Errors
/// [`Error::Io`] says what the system refused.
pub fn save(varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    save_tensors(&tensors(varmap), path)
}

/// [`save`] for any tensors, such as an average of weights.
///
/// # Errors
/// As with [`save`]; a dtype that candle cannot write is [`Error::Parameter`].
pub fn save_tensors(tensors: &HashMap<String, Tensor>, path: impl AsRef<Path>) -> Result<()> {
    write_safetensors(path.as_ref(), tensors)
}

/// Reads the tensors of a checkpoint to the CPU, under the model's names: those of the file without the prefixes of
/// PyTorch's wrappers.
///
/// # Errors
/// [`Error::CheckpointFile`], [`Error::Io`].
pub fn read(path: impl AsRef<Path>) -> Result<HashMap<String, Tensor>> {
    let path = path.as_ref();
    let tensors = own_names(path, read_file(path, None)?, |_| false, None)?;
    require_all(tensors).map_err(|reason| unreadable(path, reason))
}

fn tensors(varmap: &VarMap) -> HashMap<String, Tensor> {
    let vars = lock(varmap.data());
    vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect()
}

/// Takes PyTorch's prefixes off the names, where the model does not know them as they are, and then maps them by `rename`.
fn own_names(
    path: &Path,
    file: HashMap<String, Readable>,
    is_known: impl Fn(&str) -> bool,
    rename: Option<&Rename>,
) -> Result<HashMap<String, Readable>> {
    let mut renamed = HashMap::with_capacity(file.len());
    for (name, tensor) in file {
        let own = without_prefixes(&name, &is_known);
        let own = rename.map_or(own.clone(), |rename| rename(&own));
        if renamed.insert(own.clone(), tensor).is_some() {
            let reason = match rename {
                None => format!("it has {own} twice, with and without a prefix of PyTorch's wrappers"),
                Some(_) => {
                    format!("two of its names become {own}, by `rename` and without the prefixes of PyTorch's wrappers")
                }
            };
            return Err(unreadable(path, reason));
        }
    }
    Ok(renamed)
}

/// `module.` in front, and `_orig_mod.` wherever a part of the model was compiled.
fn without_prefixes(name: &str, is_known: &impl Fn(&str) -> bool) -> String {
    let mut parts: Vec<&str> = name.split('.').filter(|part| *part != "_orig_mod").collect();
    while parts.len() > 1 && parts[0] == "module" && !is_known(&parts.join(".")) {
        parts.remove(0);
    }
    parts.join(".")
}

/// The tensors of a file, with the names that they have there.
fn read_file(path: &Path, key: Option<&str>) -> Result<HashMap<String, Readable>> {
    let io = |error| Error::io(format!("reading {}", path.display()), error);
    let mut file = File::open(path).map_err(io)?;
    let mut start = Vec::new();
    file.by_ref().take(16).read_to_end(&mut start).map_err(io)?;
    file.rewind().map_err(io)?;
    // Eight bytes that say how long the following JSON is. They may begin with PK: this comes first. In a zip archive, a
    // method of compression that does not exist would be there.
    if start.get(8) == Some(&b'{') {
        let parsed: Parsed = parse_safetensors(&mut file).map_err(io)?;
        return parsed.map_err(|reason| unreadable(path, format!("not a safetensors file: {reason}")));
    }
    if start.starts_with(b"PK") {
        return pickle::read(path, file, key);
    }
    let reason = if start.is_empty() {
        "it is empty"
    } else if start.starts_with(&[0x80]) {
        "it is in the format of PyTorch before 1.6: load it in PyTorch and write it again with torch.save, or as safetensors"
    } else if start.starts_with(b"version https:/") {
        "it is a pointer of Git LFS and not the file itself: run `git lfs pull`"
    } else {
        "it is neither a safetensors file nor one that torch.save has written, or its beginning is damaged"
    };
    Err(unreadable(path, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_pytorchs_wrappers_are_taken_off() {
        let own = |name: &str, known: &[&str]| without_prefixes(name, &|name: &str| known.contains(&name));
        assert_eq!(own("module.fc.weight", &[]), "fc.weight");
        assert_eq!(own("_orig_mod.module.fc.weight", &[]), "fc.weight");
        assert_eq!(own("module._orig_mod.module.fc.weight", &[]), "fc.weight");
        assert_eq!(own("layers.0._orig_mod.weight", &[]), "layers.0.weight");
        assert_eq!(own("encoder.module.weight", &[]), "encoder.module.weight");
        assert_eq!(own("modules.0.weight", &[]), "modules.0.weight");
        assert_eq!(own("module", &[]), "module");
        // A model's own part of that name stays.
        assert_eq!(own("module.module.weight", &["module.weight"]), "module.weight");
    }
}
