//! Files of weights under the model's own names: safetensors, and PyTorch's files.
mod convert;
mod error;
mod hashes;
mod load;
mod model;
mod pretrained;
mod source;

pub use load::{LoadOptions, LoadReport, Rename, load, load_tensors, load_with};
pub use pretrained::Pretrained;

#[doc(hidden)]
pub use self::{
    error::unreadable,
    hashes::Hashes,
    load::Prepared,
    pretrained::{INDEX, SINGLE},
    source::Source,
};

#[cfg(doc)]
use crate::Error;
use crate::Result;
use crate::panic::lock;
use crate::state::file::{require_all, write_safetensors};
use crate::variables::check_whole;
use candle_core::Tensor;
use candle_nn::VarMap;
use std::collections::HashMap;
use std::path::Path;

/// Writes the variables of `varmap` to a safetensors file. A temporary file in the same folder is written first and
/// then takes the file's name, so there is never half a file, and an old one stays if something fails. Leftovers of
/// killed saves to the same file are removed. Symbolic links are followed, and an existing file keeps its
/// permissions.
///
/// Only one of several ranks should call this. It does not know whether the other ranks have failed or, on GPUs,
/// whether the last collectives succeeded; `save_distributed` checks both before it replaces a file.
///
/// # Errors
/// Returns [`Error::Io`] with the operation that the system refused.
pub fn save(varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    save_tensors(&tensors(varmap)?, path)
}

/// Like [`save`], for any tensors, such as an average of weights. Gradients end here: a file has values only.
///
/// # Errors
/// As with [`save`], and [`Error::Parameter`] for a dtype that candle cannot write.
pub fn save_tensors(tensors: &HashMap<String, Tensor>, path: impl AsRef<Path>) -> Result<()> {
    write_safetensors(path.as_ref(), tensors)
}

/// Reads the tensors of a checkpoint to the CPU, under the file's names without the prefixes of PyTorch's wrappers. A folder or an index
/// of several files will do, as for [`Pretrained::open`].
///
/// # Errors
/// [`Error::CheckpointFile`], [`Error::Io`].
pub fn read(path: impl AsRef<Path>) -> Result<HashMap<String, Tensor>> {
    let path = path.as_ref();
    let tensors = own_names(path, Source::open(path, None)?.into_tensors()?, |_| false, None)?;
    require_all(tensors).map_err(|reason| unreadable(path, reason))
}

/// The variables' tensors, if this rank has them as a whole.
#[doc(hidden)]
pub fn tensors(varmap: &VarMap) -> Result<HashMap<String, Tensor>> {
    let vars = lock(varmap.data());
    let instead =
        "save with a Checkpointer, which writes the pieces, or with save_distributed, which puts them together";
    check_whole(vars.iter(), instead)?;
    Ok(vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect())
}

/// Removes PyTorch's prefixes from names that the model does not have as they are, and then maps the names by
/// `rename`.
fn own_names<T>(
    path: &Path,
    file: impl IntoIterator<Item = (String, T)>,
    is_known: impl Fn(&str) -> bool,
    rename: Option<&Rename>,
) -> Result<HashMap<String, T>> {
    let mut renamed = HashMap::new();
    for (name, tensor) in file {
        let own = without_prefixes(&name, &is_known);
        let own = rename.map_or(own.clone(), |rename| rename(&own));
        if renamed.insert(own.clone(), tensor).is_some() {
            let reason = match rename {
                None => format!("it has {own} twice, with and without a prefix of PyTorch's wrappers"),
                Some(_) => {
                    format!(
                        "two of its names become {own} after `rename` and without the prefixes of PyTorch's \
                             wrappers"
                    )
                }
            };
            return Err(unreadable(path, reason));
        }
    }
    Ok(renamed)
}

/// Removes `module.` at the beginning, and `_orig_mod.` wherever a part of the model was compiled.
fn without_prefixes(name: &str, is_known: &impl Fn(&str) -> bool) -> String {
    let mut parts: Vec<&str> = name.split('.').filter(|part| *part != "_orig_mod").collect();
    while parts.len() > 1 && parts[0] == "module" && !is_known(&parts.join(".")) {
        parts.remove(0);
    }
    parts.join(".")
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
        // A model may have a module of that name, which stays.
        assert_eq!(own("module.module.weight", &["module.weight"]), "module.weight");
    }
}
