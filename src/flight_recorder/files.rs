//! The file of a rank.
use super::record::RankRecord;
use crate::state::file::{PreparedFile, Progress};
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};

/// The version of the format.
pub(super) const VERSION: u32 = 1;
pub(super) const SUFFIX: &str = ".flight.json";

/// Writes a rank's file atomically.
pub(super) fn write(folder: &Path, record: &RankRecord) -> Result<PathBuf> {
    let path = folder.join(format!("rank{}{SUFFIX}", record.rank));
    std::fs::create_dir_all(folder).map_err(|error| Error::io(format!("creating {}", folder.display()), error))?;
    let prepared = PreparedFile::create_over_links(&path)?;
    prepared.fill(&Progress::default(), |file| {
        let text = serde_json::to_vec(record).map_err(io::Error::other)?;
        file.write_all(&text)
    })?;
    prepared.commit()?;
    Ok(path)
}
