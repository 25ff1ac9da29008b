//! Why a run has failed: the verdict that ddprun has recorded, and flight records.
use super::html;
use crate::time;
use crate::verdict::{Outcome, Record, Verdict};
use candle_ddp_base::flight_record::{explain, read_folder};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// The most letters of a text.
const LETTERS: usize = 20_000;

/// The section about the verdict in `file`; "" if it cannot be read.
pub(super) fn html(folder: &Path, file: &Path, notes: &mut Vec<String>) -> String {
    let Record { outcome, restarts, last, earlier, .. } = match Record::read(file) {
        Ok(record) => record,
        Err(error) => {
            notes.push(format!("{} cannot be read: {error}", file.display()));
            return String::new();
        }
    };
    let place = html::place(folder, file.parent().unwrap_or(folder));
    let title = match outcome {
        Outcome::Failed => "Why it failed",
        Outcome::Continues => "The last failure, after which it continued",
        Outcome::Succeeded => "The last failure; the run ended well",
    };
    let evidence = &last.evidence;
    let facts = [
        ("what", last.text.clone()),
        ("how", last.how.name()),
        ("cause", last.cause.clone().unwrap_or_default()),
        ("shown by", last.summary()),
        ("last calls", evidence.calls.join("\n")),
        ("files", evidence.files.join("\n")),
        ("restarts", restarts.to_string()),
    ];
    let facts = facts.into_iter().filter(|(_, text)| !text.is_empty());
    let rows: Vec<_> =
        [("when", when(&last))].into_iter().chain(facts).map(|(name, text)| [name.to_string(), cut(&text)]).collect();
    let mut text = html::table(["", "the verdict"], &rows);
    if !earlier.is_empty() {
        let rows: Vec<_> = earlier.iter().map(|verdict| [when(verdict), cut(&verdict.text)]).collect();
        text += &html::table(["when", "earlier failures, after which it continued"], &rows);
    }
    html::section(&format!("{title}: {place}"), &text)
}

fn when(verdict: &Verdict) -> String {
    time::readable(UNIX_EPOCH + Duration::from_millis(verdict.at))
}

fn cut(text: &str) -> String {
    text.chars().take(LETTERS).collect()
}

/// The section about the flight records in a folder, which say where the ranks parted, and who came last; "" if they cannot be read.
pub(super) fn flights(folder: &Path, of: &Path, notes: &mut Vec<String>) -> String {
    let name = html::place(folder, of);
    match read_folder(of) {
        Ok(records) => {
            let lines: Vec<[String; 1]> = explain(&records).lines().map(|line| [line.to_string()]).collect();
            html::section(&format!("Flight records: {name}"), &html::table(["the last collectives"], &lines))
        }
        Err(error) => {
            notes.push(error.to_string());
            String::new()
        }
    }
}
