//! The files of all ranks in a folder.
use super::record::RankRecord;
use super::{SUFFIX, VERSION};
use crate::file::{open_left, rank_in};
use crate::{Error, MOST_RANKS, Result};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Reads the files `rank*.flight.json` in `folder`, in the order of the ranks.
///
/// # Errors
/// Returns an error if the folder has no such files, if one of them cannot be read or is not a regular file, or if they are more,
/// or larger, than those of a run.
pub fn read_folder(folder: &Path) -> Result<Vec<RankRecord>> {
    let reading = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| Error::io(format!("reading {path}"), error)
    };
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(reading(folder))? {
        let path = entry.map_err(reading(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if rank_in(name, SUFFIX).is_some() {
            paths.push(path);
        }
        if paths.len() > FILES {
            return Err(too_much(folder, format!("at most {FILES} files rank*{SUFFIX}")));
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
    let (mut records, mut bytes) = (Vec::new(), 0);
    for path in &paths {
        let mut text = Vec::new();
        open_left(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut text)).map_err(reading(path))?;
        bytes += text.len() as u64;
        if bytes > MOST {
            return Err(too_much(folder, format!("at most {MOST} bytes in all files rank*{SUFFIX}")));
        }
        records.push(parse(&text).map_err(reading(path))?);
    }
    records.sort_by_key(|record| record.rank);
    Ok(records)
}

fn too_much(folder: &Path, limit: String) -> Error {
    Error::invalid("folder", format!("{} must have {limit}: move some of them to another folder", folder.display()))
}

/// The most files, and bytes in all of them. In memory, the records take a few times as much.
const FILES: usize = 1 << 14;
const MOST: u64 = 1 << 31;
/// The most bytes of a file. A call takes some hundred bytes, and programs remember some thousand calls.
const LONGEST: u64 = 1 << 28;

/// Reads a file, which may come from anywhere: whatever it says, it costs no more than its length and a run of [`MOST_RANKS`].
fn parse(text: &[u8]) -> io::Result<RankRecord> {
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("it must have at most {LONGEST} bytes: no rank writes as many")));
    }
    let record: RankRecord = serde_json::from_slice(text)?;
    let RankRecord { version, rank, world_size, .. } = record;
    if version != VERSION {
        let reason = format!("it has version {version} of the format, but only version {VERSION} is known");
        return Err(io::Error::other(reason));
    }
    if world_size > MOST_RANKS || rank >= world_size {
        let reason = format!(
            "it is of rank {rank} of {world_size}, but the world size must be at most {MOST_RANKS}, and the rank less than it: \
             it is damaged, or no rank has written it"
        );
        return Err(io::Error::other(reason));
    }
    Ok(record)
}

/// Explains the files of several ranks, which are separated by zeros.
#[cfg(any(test, fuzzing))]
pub fn fuzz_records(data: &[u8]) {
    use super::explain::explain;
    let mut records: Vec<RankRecord> = data.split(|byte| *byte == 0).filter_map(|text| parse(text).ok()).collect();
    records.sort_by_key(|record| record.rank);
    if !records.is_empty() {
        assert!(!explain(&records).is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::super::explain::explain;
    use super::*;
    use std::fs::File;

    fn text(rank: usize, world_size: usize) -> String {
        format!(
            r#"{{"version":{VERSION},"rank":{rank},"world_size":{world_size},"host":"a","pid":1,"reason":"","written_ns":0,
                "groups":[{{"name":"world","ranks":[],"failure":null,"calls":[]}}]}}"#
        )
    }

    #[test]
    fn absurd_numbers_are_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rank0.flight.json");
        for (rank, world_size) in
            [(0, usize::MAX), (0, 1_000_000_000_000), (0, MOST_RANKS + 1), (usize::MAX, 2), (2, 2), (0, 0)]
        {
            std::fs::write(&file, text(rank, world_size)).unwrap();
            let error = read_folder(folder.path()).unwrap_err().to_string();
            assert!(error.contains("rank0.flight.json") && error.contains("must be at most 1048576"), "{error}");
        }
        // The largest run has a short explanation.
        std::fs::write(&file, text(0, MOST_RANKS)).unwrap();
        let told = explain(&read_folder(folder.path()).unwrap());
        assert!(told.contains("there is no file of ranks 1, 2, 3") && told.contains("and 1048511 more"), "{told}");
        assert!(told.len() < 1000, "{} bytes", told.len());
        // A file without an end.
        File::create(&file).unwrap().set_len(LONGEST + 1).unwrap();
        let error = read_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("rank0.flight.json") && error.contains("at most 268435456 bytes"), "{error}");
    }

    #[test]
    fn more_files_than_a_run_leaves_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        // Links to one file are made much faster than files.
        let file = tempfile::NamedTempFile::new_in(&folder).unwrap();
        let link = |rank| std::fs::hard_link(&file, folder.path().join(format!("rank{rank}.flight.json"))).unwrap();
        (0..=FILES).for_each(link);
        let error = read_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("must have at most 16384 files rank*.flight.json: move some"), "{error}");
    }
}
