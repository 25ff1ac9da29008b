//! Tests that cannot run on this machine.
use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// The file that collects the names of skipped tests, for `.ci/run`.
const COLLECTED: &str = "CANDLE_DDP_SKIPPED";

/// Reports that `test`, or a part of it, is skipped. The test then passes.
///
/// The line goes to the real standard error, since the test harness would capture `eprintln!`, and to the file that
/// `CANDLE_DDP_SKIPPED` names.
#[track_caller]
pub fn skip(test: &str, reason: impl Display) {
    let line = format!("{test}: {reason}").replace('\n', " ");
    let _ = std::io::stderr().lock().write_all(format!("SKIPPED {line}\n").as_bytes());
    if let Some(path) = std::env::var_os(COLLECTED) {
        let collected = File::options().create(true).append(true).open(&path);
        collected.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).unwrap_or_else(|error| {
            panic!("{COLLECTED}={}: {error}", path.display());
        });
    }
}

/// Like [`skip`], but fails if the variable `require` is set.
#[track_caller]
pub fn skip_unless(require: &str, test: &str, reason: impl Display) {
    assert!(std::env::var_os(require).is_none(), "{test}: {reason}, and {require} is set");
    skip(test, reason);
}
