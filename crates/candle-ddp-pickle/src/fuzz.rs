//! Reads arbitrary bytes as the pickle of a file.
use crate::read;
use candle_core::{DType, Tensor};
use std::io::{Cursor, Result, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// The pickle in an archive of `torch.save`, whose checksums are right, with two storages of 64 and 1024 bytes. Reads every element of
/// its tensors.
pub fn pickle(data: &[u8]) {
    let archive = archive(&[
        ("data.pkl", data),
        ("byteorder", b"little"),
        ("data/0", &[1; 64]),
        ("data/1", &[2; 1024]),
        ("version", b"3\n"),
    ]);
    let bytes = archive.expect("an archive in memory can be written");
    let Ok(tensors) = read(Cursor::new(&bytes), None) else { return };
    let tensors: Vec<Tensor> = tensors.into_values().filter_map(|tensor| tensor.ok()).collect();
    // As many as the limit allows, and the map's own.
    let held: usize = tensors.iter().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum();
    assert!(held <= 64 * bytes.len() + (4 << 20), "{} bytes became tensors of {held}", bytes.len());
    for tensor in tensors {
        // Some dtypes of candle cannot be converted.
        let _ = tensor.flatten_all().and_then(|flat| flat.to_dtype(DType::F64)?.sum_all());
    }
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

/// The seeds that the fuzzer starts from, and the inputs that it has found since.
#[test]
fn no_seed_fails() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/pickle");
    let seeds: Vec<_> = folder.read_dir().unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
    assert!(!seeds.is_empty(), "{} is empty", folder.display());
    seeds.iter().for_each(|seed| pickle(seed));
}
