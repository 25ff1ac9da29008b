//! Warnings that nobody may miss, and rate-limited warnings about events that outsiders can cause, for example by
//! connecting to a port: they must not flood the log.
//!
//! The subject of a warning decides how it is made:
//!
//! - [`warn_aloud`]: something changes the result of the run, has been lost, or needs the user's action.
//! - `log::warn!`: something is slower, is retried or has been worked around, or follows an error that a call returns.
//! - [`Warnings`]: strangers cause it.
use std::fmt::Arguments;
use std::io::Write;
use std::time::{Duration, Instant};

/// Warns of something that the user must learn of even if the program has no logger: it changes the result of the run (a
/// checkpoint that was passed over, gradients that were dropped), something has been lost, or the user has to act.
///
/// The warning goes to the program's logger if that shows warnings of the target `candle_ddp`, and otherwise to standard
/// error, as a line that begins with `candle-ddp: `. It never goes to both.
///
/// The caller makes sure that it is said once: on rank 0 alone if it concerns all ranks, and otherwise on the rank that
/// it concerns, which the text then names; not again in every step.
pub fn warn_aloud(warning: Arguments<'_>) {
    const TARGET: &str = "candle_ddp";
    if log::log_enabled!(target: TARGET, log::Level::Warn) {
        log::warn!(target: TARGET, "{warning}");
    } else {
        // In one piece, since other processes write to it as well. If it is closed, there is nobody else to tell.
        let _ = std::io::stderr().write_all(format!("candle-ddp: {warning}\n").as_bytes());
    }
}

/// The maximum number of warnings per [`PERIOD`].
const BURST: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Writes warnings to the log, at most 10 in 10 seconds, and then the number of those that it suppressed.
#[derive(Debug)]
pub struct Warnings {
    /// The source of these warnings, for the log.
    source: String,
    /// The start of the period.
    start: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl Warnings {
    /// Warnings about `source`.
    pub fn new(source: impl Into<String>) -> Self {
        Self { source: source.into(), start: None, written: 0, suppressed: 0 }
    }

    /// Writes a warning, or counts it.
    pub fn warn(&mut self, warning: Arguments<'_>) {
        if self.start.is_none_or(|start| start.elapsed() >= PERIOD) {
            if self.suppressed > 0 {
                log::warn!("{} suppressed {} more warnings", self.source, self.suppressed);
            }
            (self.start, self.written, self.suppressed) = (Some(Instant::now()), 0, 0);
        }
        if self.written < BURST {
            self.written += 1;
            log::warn!("{warning}");
        } else {
            self.suppressed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted() {
        let mut warnings = Warnings::new("a test");
        (0..25).for_each(|_| warnings.warn(format_args!("again")));
        assert_eq!((warnings.written, warnings.suppressed), (10, 15));
        // After the period, the suppressed warnings are reported.
        warnings.start = Instant::now().checked_sub(PERIOD);
        warnings.warn(format_args!("once more"));
        assert_eq!((warnings.written, warnings.suppressed), (1, 0));
    }
}
