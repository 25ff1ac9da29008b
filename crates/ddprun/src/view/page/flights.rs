//! The explanation of flight records: where the ranks parted, and who came last.
use super::html;
use candle_ddp_base::flight_record::{explain, read_folder};
use std::path::Path;

/// The section about the flight records in a folder; "" if they cannot be read.
pub(super) fn html(folder: &Path, of: &Path, notes: &mut Vec<String>) -> String {
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
