//! The file of a rank.
use crate::{Error, Result};
use candle_ddp_base::file::{PreparedFile, Progress};
use candle_ddp_base::flight_record::{RankRecord, SUFFIX};
use std::io;
use std::path::{Path, PathBuf};

/// Creates the folder.
pub(super) fn prepare(folder: &Path) -> Result<()> {
    let context = || format!("creating the folder of flight records {}", folder.display());
    std::fs::create_dir_all(folder).map_err(|error| Error::io(context(), error))
}

/// Writes a rank's file atomically.
pub(super) fn write(folder: &Path, record: &RankRecord) -> Result<PathBuf> {
    let path = folder.join(format!("rank{}{SUFFIX}", record.rank));
    prepare(folder)?;
    let prepared = PreparedFile::create_over_links(&path)?;
    prepared.fill(&Progress::default(), |file| {
        let text = serde_json::to_vec(record).map_err(io::Error::other)?;
        file.write_all(&text)
    })?;
    prepared.commit()?;
    Ok(path)
}
