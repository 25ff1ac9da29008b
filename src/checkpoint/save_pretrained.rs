//! Writing the files of Hugging Face's folders.
use super::distributed::Saving;
use crate::backend::Purpose;
use crate::process_group::ProcessGroup;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use candle_ddp_state::weights::{INDEX, SINGLE};
use candle_nn::VarMap;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

static SAVE_PRETRAINED: Purpose = Purpose::of("save_pretrained");

/// Writes the variables of `varmap` as Hugging Face's libraries do, for [`Pretrained`](super::Pretrained) and transformers'
/// `from_pretrained`: `model.safetensors`, or, if that would have more than `max_shard_size` bytes of tensors,
/// `model-00001-of-00002.safetensors` and so on, with `model.safetensors.index.json`. A tensor that is larger has a file for itself. Every
/// rank calls it, and rank 0 writes, as in [`save_distributed`](super::save_distributed), also under [sharding](crate::Sharding).
///
/// `folder` must exist, and must not have a model yet, since a save that is interrupted between two files would mix both. The index takes
/// its name last; without it, nobody takes the other files for a model.
///
/// # Errors
/// As with [`save_distributed`](super::save_distributed), and [`Error::InvalidArgument`] for a folder that has a model.
pub fn save_pretrained(
    group: &ProcessGroup,
    varmap: &VarMap,
    folder: impl AsRef<Path>,
    max_shard_size: u64,
) -> Result<()> {
    let folder = folder.as_ref();
    SAVE_PRETRAINED.during(|| {
        let is_first = group.rank() == 0;
        let found = [INDEX, SINGLE].iter().find(|name| is_first && folder.join(name).exists());
        group.agree(match found {
            Some(name) => {
                let reason = format!("{} has {name} already: it must have no model", folder.display());
                Err(Error::invalid("folder", reason))
            }
            None => Ok(()),
        })?;
        let saving = Saving::new(varmap);
        let sizes = saving.sizes();
        let total: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
        let files = divide(sizes, max_shard_size);
        let name = |index: usize| match files.len() {
            1 => SINGLE.to_string(),
            len => format!("model-{:05}-of-{len:05}.safetensors", index + 1),
        };
        let paths = files.iter().enumerate().map(|(index, names)| (folder.join(name(index)), names.clone()));
        saving.write(group, &paths.collect::<Vec<_>>())?;
        if files.len() == 1 {
            return Ok(());
        }
        let of_file = |(index, names): (usize, &Vec<String>)| {
            let file = name(index);
            names.iter().map(|own| (own.clone(), file.clone())).collect::<Vec<_>>()
        };
        let map: BTreeMap<String, String> = files.iter().enumerate().flat_map(of_file).collect();
        let text = format!("{:#}\n", json!({ "metadata": { "total_size": total }, "weight_map": map }));
        let path = folder.join(INDEX);
        group.agree_on_long_work(move |progress: &Progress| match is_first {
            true => {
                let index = PreparedFile::write(&path, progress, |file| file.write_all(text.as_bytes()))?;
                Ok(index.commit()?)
            }
            false => Ok(()),
        })
    })
}

/// The names of each file, in their order.
fn divide(tensors: Vec<(String, u64)>, most: u64) -> Vec<Vec<String>> {
    let (mut files, mut size) = (vec![Vec::new()], 0u64);
    for (name, bytes) in tensors {
        if size > 0 && size.saturating_add(bytes) > most {
            files.push(Vec::new());
            size = 0;
        }
        size += bytes;
        if let Some(file) = files.last_mut() {
            file.push(name);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_filled_in_order() {
        let sizes = [("a", 4), ("b", 4), ("c", 9), ("d", 1), ("e", 3)].map(|(name, bytes)| (name.to_string(), bytes));
        let divided = |most| divide(sizes.to_vec(), most).iter().map(|file| file.concat()).collect::<Vec<_>>();
        assert_eq!(divided(8), ["ab", "c", "de"]);
        assert_eq!(divided(0), ["a", "b", "c", "d", "e"]);
        assert_eq!(divided(u64::MAX), ["abcde"]);
        assert_eq!(divide(Vec::new(), 1), [Vec::<String>::new()]);
    }
}
