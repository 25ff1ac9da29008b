//! Files of tokens.
use std::path::{Path, PathBuf};

/// Writes a file into `folder`.
pub(crate) fn file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

pub(crate) fn u16s(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
    tokens.into_iter().flat_map(u16::to_le_bytes).collect()
}

pub(crate) fn u32s(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
    tokens.into_iter().flat_map(u32::to_le_bytes).collect()
}
