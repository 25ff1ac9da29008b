//! The files of a run, by their names.
use crate::error::{Error, Result};
use crate::verdict::VERDICT;
use crate::view::status::RECORD;
use candle_ddp_base::file::{open_left, rank_in};
use candle_ddp_base::flight_record::SUFFIX;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// A run's files lie at most so deep: `LOG_DIR/RUN_ID/attempt_0/0`.
const DEPTH: usize = 6;
/// The most entries that are looked at: a folder may be that of another program.
const ENTRIES: usize = 200_000;

#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) metrics: Vec<PathBuf>,
    /// For each folder, the ranks' files.
    pub(super) traces: Vec<Vec<(usize, PathBuf)>>,
    /// The folders of attempts, of which each run has one and one more for each restart.
    pub(super) attempts: Vec<(u32, PathBuf)>,
    /// The files in which ddprun has recorded the ranks of each run.
    pub(super) records: Vec<PathBuf>,
    /// The verdicts on runs.
    pub(super) verdicts: Vec<PathBuf>,
    /// The folders of flight records.
    pub(super) flights: BTreeSet<PathBuf>,
    /// What could not be read.
    pub(super) notes: Vec<String>,
}

/// Looks for a run's files below `folder`, and does not follow links.
pub(super) fn find(folder: &Path) -> Result<Found> {
    let (mut found, mut traces) = (Found::default(), BTreeMap::new());
    let mut entries = 0;
    let mut open = vec![(folder.to_path_buf(), 0)];
    while let Some((path, depth)) = open.pop() {
        let listed = std::fs::read_dir(&path).and_then(|entries| entries.take(ENTRIES).collect::<Result<Vec<_>, _>>());
        let mut listed = match listed {
            Ok(listed) => listed,
            Err(error) if depth == 0 => return Err(Error::io(format!("reading {}", path.display()), error)),
            Err(error) => {
                found.notes.push(format!("{} cannot be read: {error}", path.display()));
                continue;
            }
        };
        entries += listed.len();
        if entries > ENTRIES {
            found.notes.push(format!("more than {ENTRIES} files: not all of them were looked at"));
            break;
        }
        listed.sort_by_key(std::fs::DirEntry::file_name);
        for entry in listed {
            let (path, name) = (entry.path(), entry.file_name());
            let (Some(name), Ok(kind)) = (name.to_str(), entry.file_type()) else { continue };
            if kind.is_dir() {
                if let Some(number) = name.strip_prefix("attempt_").and_then(|number| number.parse().ok()) {
                    found.attempts.push((number, path));
                } else if depth < DEPTH {
                    open.push((path, depth + 1));
                }
            } else if let Some(rank) = rank_in(name, ".trace.json") {
                traces.entry(entry.path().parent().map(Path::to_path_buf)).or_insert_with(Vec::new).push((rank, path));
            } else if rank_in(name, SUFFIX).is_some() {
                found.flights.extend(path.parent().map(Path::to_path_buf));
            } else if name == VERDICT {
                found.verdicts.push(path);
            } else if name == RECORD {
                found.records.push(path);
            } else if name.ends_with(".jsonl") {
                found.metrics.push(path);
            }
        }
    }
    found.metrics.sort();
    found.records.sort();
    found.verdicts.sort();
    found.attempts.sort_by(|(a, left), (b, right)| (left.parent(), a).cmp(&(right.parent(), b)));
    found.traces = traces.into_values().collect();
    found.traces.iter_mut().for_each(|files| files.sort());
    Ok(found)
}

/// Passes on the lines of a file, in pieces of `longest` bytes: a file that is something else takes no more memory.
pub(super) fn lines(file: &Path, longest: u64, mut each: impl FnMut(&[u8])) -> std::io::Result<()> {
    let mut file = BufReader::new(open_left(file)?);
    let mut line = Vec::new();
    while file.by_ref().take(longest).read_until(b'\n', &mut line)? > 0 {
        each(&line);
        line.clear();
    }
    Ok(())
}
