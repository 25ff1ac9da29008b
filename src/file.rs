//! Files of tensors that are there as a whole or not at all.
use crate::process_group::panic_message;
use crate::{Error, Result};
use candle_core::safetensors::{Load, SliceSafetensors};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// A tensor of a file, or why it cannot be read.
pub(crate) type Readable = std::result::Result<Tensor, String>;

/// Writes `tensors` as a safetensors file: to a temporary one in the same folder, which then takes its name. Symbolic
/// links are followed, and an existing file's permissions are kept.
pub(crate) fn write_safetensors(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<()> {
    let io = |source: io::Error| Error::io(format!("writing {}", path.display()), source);
    let target = follow_links(path).map_err(io)?;
    if target.file_name().is_none() {
        return Err(Error::invalid("path", format!("{} does not name a file", path.display())));
    }
    for (name, tensor) in tensors {
        if matches!(tensor.dtype(), DType::F6E2M3 | DType::F6E3M2 | DType::F4 | DType::F8E8M0) {
            return Err(Error::parameter(name, format!("candle cannot write dtype {}", tensor.dtype().as_str())));
        }
    }
    let permissions = match target.metadata() {
        Ok(existing) if existing.is_file() => Some(existing.permissions()),
        Ok(_) => return Err(io(io::Error::other("it is there, and is not a regular file"))),
        Err(_) => None,
    };
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Processes on other hosts write to the same folder: a process's number would not tell them apart.
    let temporary = folder.join(format!(".{:016x}.tmp", RandomState::new().build_hasher().finish()));
    let new = File::create_new(&temporary).map_err(io)?;
    let write = || -> Result<()> {
        // Otherwise those that a new file has here: what writes the tensors would let only their owner read them.
        let permissions = permissions.map_or_else(|| new.metadata().map(|new| new.permissions()), Ok).map_err(io)?;
        // candle panics where it cannot copy a tensor from its device.
        catch_unwind(AssertUnwindSafe(|| candle_core::safetensors::save(tensors, &temporary)))
            .map_err(|panic| panic_message(&*panic))
            .and_then(|saved| saved.map_err(|error| error.to_string()))
            .map_err(|reason| io(io::Error::other(reason)))?;
        let file = File::options().write(true).open(&temporary).map_err(io)?;
        file.set_permissions(permissions).and_then(|()| file.sync_all()).map_err(io)?;
        std::fs::rename(&temporary, &target).map_err(io)?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
    };
    write().inspect_err(|_| {
        // What is left of it is of no use to anybody; if it was never there, so much the better.
        let _ = std::fs::remove_file(&temporary);
    })
}

/// The file that `path` stands for, which need not be there.
fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    // As many as Linux follows.
    for _ in 0..40 {
        let Ok(target) = path.read_link() else { return Ok(path) };
        path.pop();
        path.push(target);
    }
    Err(io::Error::other("there are too many symbolic links"))
}

/// Reads a safetensors file, all of it.
pub(crate) fn read_safetensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    let bytes = std::fs::read(path).map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    let tensors = parse_safetensors(&bytes)
        .map_err(|reason| Error::invalid("path", format!("{} is not a safetensors file: {reason}", path.display())))?;
    require_all(tensors).map_err(|reason| Error::invalid("path", format!("{}: {reason}", path.display())))
}

/// The tensors, if all of them can be read; otherwise the first that cannot, and why.
pub(crate) fn require_all(tensors: HashMap<String, Readable>) -> std::result::Result<HashMap<String, Tensor>, String> {
    let first = tensors.iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref().err()?))).min();
    match first {
        Some((name, reason)) => Err(format!("{name}: {reason}")),
        None => Ok(tensors.into_iter().filter_map(|(name, tensor)| Some((name, tensor.ok()?))).collect()),
    }
}

/// The tensors of a safetensors file, or why it is none.
pub(crate) fn parse_safetensors(bytes: &[u8]) -> std::result::Result<HashMap<String, Readable>, String> {
    let file = SliceSafetensors::new(bytes).map_err(|error| error.to_string())?;
    let mut tensors = HashMap::new();
    for (name, view) in file.tensors() {
        // candle multiplies dimensions without looking, also where one of them is zero.
        let size = view.shape().iter().try_fold(1usize, |size, dim| size.checked_mul((*dim).max(1)));
        let tensor = if size.is_none() {
            Err(format!("its shape {:?} is too large", view.shape()))
        } else if view.dtype().to_string() == "BOOL" {
            Tensor::from_raw_buffer(view.data(), DType::U8, view.shape(), &Device::Cpu)
                .map_err(|error| error.to_string())
        } else {
            view.load(&Device::Cpu).map_err(|error| match error {
                candle_core::Error::UnsupportedSafeTensorDtype(dtype) => format!("candle has no dtype for {dtype}"),
                error => error.to_string(),
            })
        };
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the state of an optimizer, everything is wanted.
    #[test]
    fn a_tensor_that_cannot_be_read_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let header = br#"{"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"BOOL","shape":[1],"data_offsets":[1,2]}}"#;
        std::fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header, &[7, 1]].concat()).unwrap();
        match read_safetensors(file.path()) {
            Err(Error::InvalidArgument { argument: "path", reason }) => {
                assert_eq!(reason, format!("{}: b: candle has no dtype for I8", file.path().display()));
            }
            other => panic!("{other:?}"),
        }
    }
}
