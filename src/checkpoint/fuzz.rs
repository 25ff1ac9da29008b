//! Reads arbitrary bytes as files of weights; run by `crate::fuzzing`.
use super::read;
use candle_core::{DType, Tensor};
use std::io::{Cursor, Result, Write};
use std::path::PathBuf;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A whole file: safetensors, or an archive of `torch.save`.
pub(crate) fn checkpoint_file(data: &[u8]) {
    load(data);
}

/// The pickle in an archive of `torch.save`, whose checksums are right, with two storages of 64 and 1024 bytes.
pub(crate) fn pickle(data: &[u8]) {
    let archive = archive(&[
        ("data.pkl", data),
        ("byteorder", b"little"),
        ("data/0", &[1; 64]),
        ("data/1", &[2; 1024]),
        ("version", b"3\n"),
    ]);
    load(&archive.expect("an archive in memory can be written"));
}

fn archive(parts: &[(&str, &[u8])]) -> Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in parts {
        zip.start_file(format!("archive/{name}"), options)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish()?.into_inner())
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
