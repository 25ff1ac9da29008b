//! Reads arbitrary bytes as files of weights; run by `crate::fuzzing`.
use super::read;
use candle_core::{DType, Tensor};
use std::io::{Result, Write};
use std::path::PathBuf;

/// A whole file: safetensors, or an archive of `torch.save`.
pub(crate) fn checkpoint_file(data: &[u8]) {
    load(data);
}

/// Reads the file and every element of its tensors.
fn load(bytes: &[u8]) {
    let (path, _file) = memory_file(bytes).expect("there is memory for a small file");
    let Ok(tensors) = read(path) else { return };
    // As many as the limit allows, and the map's own.
    let held: usize = tensors.values().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum();
    assert!(held <= 64 * bytes.len() + (4 << 20), "{} bytes became tensors of {held}", bytes.len());
    for (name, tensor) in tensors {
        let elements = || -> candle_core::Result<Tensor> { tensor.flatten_all()?.to_dtype(DType::F64)?.sum_all() };
        // Some dtypes of candle cannot be converted.
        if let Err(error) = elements() {
            let text = error.to_string();
            assert!(!text.is_empty(), "{name}");
        }
    }
}

#[cfg(not(miri))]
fn memory_file(bytes: &[u8]) -> Result<(PathBuf, std::fs::File)> {
    use rustix::fd::AsRawFd;
    let file = rustix::fs::memfd_create("candle-ddp-fuzz", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    file.write_all(bytes)?;
    Ok((format!("/proc/self/fd/{}", file.as_raw_fd()).into(), file))
}

/// Miri has no files in memory.
#[cfg(miri)]
fn memory_file(bytes: &[u8]) -> Result<(PathBuf, tempfile::NamedTempFile)> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(bytes)?;
    Ok((file.path().to_path_buf(), file))
}
