//! Where the tensors of a checkpoint come from.
use super::convert::converted;
use super::error::unreadable;
use super::hashes::Hashes;
use super::pretrained::{Pretrained, is_index};
use crate::state::file::{Hashed, Readable};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor, Var};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;
use std::path::Path;

/// The tensors of a checkpoint, under its own names.
#[derive(Debug)]
pub enum Source {
    /// Safetensors files, which have been opened.
    Files(Pretrained),
    /// Tensors in memory.
    Tensors(HashMap<String, Readable>),
}

/// Variables with values that fit.
pub(super) type Values = Vec<(String, Var, Tensor)>;

/// The values of a variable: these elements of a tensor.
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) range: Range<usize>,
}

impl Source {
    /// Opens a safetensors file, several of them with their index, or a file of `torch.save`, which is read completely.
    pub fn open(path: &Path, key: Option<&str>) -> Result<Self> {
        if is_index(path) || path.is_dir() {
            return Pretrained::open_incomplete(path).map(Self::Files);
        }
        let io = |error| Error::io(format!("reading {}", path.display()), error);
        let mut file = File::open(path).map_err(io)?;
        let mut start = Vec::new();
        file.by_ref().take(16).read_to_end(&mut start).map_err(io)?;
        file.rewind().map_err(io)?;
        // A safetensors file begins with the length of its JSON header in eight bytes. These may spell PK, so this check
        // comes before the one for zip archives, where the same bytes would be an unknown compression method.
        if start.get(8) == Some(&b'{') {
            return Pretrained::open_incomplete(path).map(Self::Files);
        }
        if start.starts_with(b"PK") {
            let tensors = candle_ddp_pickle::read(file, key).map_err(|error| match error {
                candle_ddp_pickle::Error::Io(error) => io(error),
                error => unreadable(path, error.to_string()),
            });
            return tensors.map(Self::Tensors);
        }
        let reason = if start.is_empty() {
            "it is empty"
        } else if start.starts_with(&[0x80]) {
            "it is in the format of PyTorch before 1.6: load it in PyTorch and write it again with torch.save, or as safetensors"
        } else if start.starts_with(b"version https:/") {
            "it is a Git LFS pointer, not the file itself: run `git lfs pull`"
        } else {
            "it is neither a safetensors file nor a file of torch.save, or its beginning is damaged: load another file, or write \
             this one again"
        };
        Err(unreadable(path, reason))
    }

    /// The names of the tensors, in any order.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Files(files) => files.names().map(str::to_string).collect(),
            Self::Tensors(tensors) => tensors.keys().cloned().collect(),
        }
    }

    /// The dtype and the shape of a tensor, or the reason why it cannot be read.
    pub fn entry(&self, name: &str) -> std::result::Result<(DType, Shape), String> {
        let entry = match self {
            Self::Files(files) => {
                let entry = files.file_of(name).and_then(|file| file.entry(name));
                entry.map(|entry| entry.map(|(dtype, shape)| (dtype, Shape::from(shape))))
            }
            Self::Tensors(tensors) => tensors.get(name).map(|tensor| {
                tensor.as_ref().map_err(Clone::clone).map(|tensor| (tensor.dtype(), tensor.shape().clone()))
            }),
        };
        entry.unwrap_or_else(|| Err("it is missing".to_string()))
    }

    /// The values of variables, by the names of the tensors from which they come, whose shapes are right. No more than one tensor of a
    /// file is in memory besides the values. `hashed` says what is hashed; the hashes are still to be checked.
    pub(super) fn into_values(
        self,
        path: &Path,
        mut wanted: HashMap<String, Wanted>,
        hashed: Hashed,
    ) -> Result<(Values, Hashes)> {
        let mut values = Vec::with_capacity(wanted.len());
        let mut add = |Wanted { name, var, range }: Wanted, tensor: std::result::Result<Tensor, String>| {
            let value = tensor.and_then(|tensor| of_variable(tensor, &var, range).map_err(|error| error.to_string()));
            let value = value.map_err(|reason| unreadable(path, format!("{name}: {reason}")))?;
            values.push((name, var, value));
            Ok(())
        };
        let mut hashes = Vec::new();
        match self {
            Self::Files(files) => {
                let ranges: HashMap<String, Range<usize>> =
                    wanted.iter().map(|(name, wanted)| (name.clone(), wanted.range.clone())).collect();
                let range = |name: &str, _: &[usize]| ranges.get(name).cloned();
                for file in files.into_files() {
                    let of_file = file.scan(hashed, range, |name, _, elements| match wanted.remove(name) {
                        Some(wanted) => add(Wanted { range: 0..wanted.range.len(), ..wanted }, elements),
                        None => Ok(()),
                    })?;
                    hashes.push((file, of_file));
                }
            }
            Self::Tensors(mut tensors) => {
                for (name, wanted) in wanted {
                    add(wanted, tensors.remove(&name).unwrap_or_else(|| Err("it is missing".to_string())))?;
                }
            }
        }
        Ok((values, Hashes(hashes)))
    }

    /// All tensors.
    pub(super) fn into_tensors(self) -> Result<HashMap<String, Readable>> {
        match self {
            Self::Files(files) => files.read_all(),
            Self::Tensors(tensors) => Ok(tensors),
        }
    }
}

/// The value of a variable: these elements of a tensor, in the variable's dtype and shape.
fn of_variable(tensor: Tensor, var: &Var, range: Range<usize>) -> candle_core::Result<Tensor> {
    let tensor = match range.len() == tensor.elem_count() {
        true => tensor,
        // A copy, so that the whole tensor is freed.
        false => tensor.flatten_all()?.narrow(0, range.start, range.len())?.copy()?,
    };
    let tensor = converted(&tensor, var.dtype())?;
    if tensor.shape() == var.shape() { Ok(tensor) } else { tensor.reshape(var.shape()) }
}
