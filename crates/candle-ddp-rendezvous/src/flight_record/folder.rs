//! The files of all ranks in a folder.
use super::explain::explain;
use super::record::RankRecord;
use super::{SUFFIX, VERSION};
use crate::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};

/// Explains the files `rank*.flight.json` in `folder`: why a run stopped, in plain sentences, one per line.
///
/// # Errors
/// Returns an error if the folder has no such files, or if one of them cannot be read.
pub fn explain_folder(folder: &Path) -> Result<String> {
    let reading = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| Error::io(format!("reading {path}"), error)
    };
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(reading(folder))? {
        let path = entry.map_err(reading(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("rank") && name.ends_with(SUFFIX) {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        let reason = format!(
            "{} contains no rank*{SUFFIX}: set {}=FOLDER in the environment of the run; each rank writes its file when its \
             group fails",
            folder.display(),
            super::FOLDER_VARIABLE
        );
        return Err(Error::invalid("folder", reason));
    }
    let mut records = Vec::new();
    for path in &paths {
        let text = std::fs::read(path).map_err(reading(path))?;
        records.push(parse(&text).map_err(reading(path))?);
    }
    records.sort_by_key(|record| record.rank);
    Ok(explain(&records))
}

fn parse(text: &[u8]) -> io::Result<RankRecord> {
    let record: RankRecord = serde_json::from_slice(text)?;
    if record.version != VERSION {
        let reason = format!("it has version {} of the format, but only version {VERSION} is known", record.version);
        return Err(io::Error::other(reason));
    }
    Ok(record)
}

/// Explains the files of several ranks, which are separated by zeros.
#[cfg(any(test, fuzzing))]
pub fn fuzz_records(data: &[u8]) {
    let mut records: Vec<RankRecord> = data.split(|byte| *byte == 0).filter_map(|text| parse(text).ok()).collect();
    records.sort_by_key(|record| record.rank);
    if !records.is_empty() {
        assert!(!explain(&records).is_empty());
    }
}
