//! The attempts of a run, from ddprun's log folder.
use super::html;
use crate::verdict::{ERROR_FILE, read_error};
use std::path::{Path, PathBuf};

/// The most attempts that are listed.
const MOST: usize = 256;
/// The most workers of an attempt.
const WORKERS: usize = 1 << 12;
/// The most letters of an error.
const LETTERS: usize = 2000;

/// The section about the folders `LOG_DIR/RUN_ID/attempt_RESTARTS`, of which each has a folder for each worker; "" if there are none.
pub(super) fn html(folder: &Path, attempts: &[(u32, PathBuf)], notes: &mut Vec<String>) -> String {
    if attempts.is_empty() {
        return String::new();
    }
    if attempts.len() > MOST {
        notes.push(format!("only {MOST} of {} attempts are listed", attempts.len()));
    }
    let restarts = match attempts.iter().filter(|(number, _)| *number > 0).count() {
        0 => "<p>No restarts.</p>\n".to_string(),
        1 => "<p>1 restart.</p>\n".to_string(),
        many => format!("<p>{many} restarts.</p>\n"),
    };
    let rows: Vec<_> = attempts.iter().take(MOST).map(|(number, path)| row(folder, *number, path, notes)).collect();
    let table = html::table(["run", "attempt", "workers", "errors that workers wrote"], &rows);
    html::section("Restarts", &(restarts + &table))
}

/// The run, the number of the attempt, its workers, and its errors.
fn row(folder: &Path, number: u32, path: &Path, notes: &mut Vec<String>) -> [String; 4] {
    let run = path.parent().and_then(|run| run.strip_prefix(folder).ok()).unwrap_or(Path::new(""));
    let mut workers: Vec<(usize, PathBuf)> = match std::fs::read_dir(path) {
        Ok(entries) => {
            // A link may lead to a folder outside of the run's.
            let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let worker = |entry: std::fs::DirEntry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path()));
            folders.filter_map(worker).take(WORKERS).collect()
        }
        Err(error) => {
            notes.push(format!("{} cannot be read: {error}", path.display()));
            Vec::new()
        }
    };
    workers.sort();
    let mut errors = Vec::new();
    for (rank, path) in &workers {
        let file = path.join(ERROR_FILE);
        match read_error(&file) {
            Ok(None) => {}
            Ok(Some(error)) => {
                errors.push(format!("local rank {rank}: {}", error.message.chars().take(LETTERS).collect::<String>()));
            }
            Err(error) => notes.push(format!("{} cannot be read: {error}", file.display())),
        }
    }
    [run.display().to_string(), number.to_string(), workers.len().to_string(), errors.join("\n")]
}
