//! The texts of language models.
use candle_ddp::{Context, Result};
use std::path::{Path, PathBuf};

/// Reads a text file, or the `.md` files of a folder in the order of their names.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    for file in files(path)? {
        text += &std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    }
    Ok(text)
}

fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let reading = || format!("reading {}", path.display());
    let entries = std::fs::read_dir(path).with_context(reading)?;
    let mut files =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>().with_context(reading)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    Ok(files)
}
