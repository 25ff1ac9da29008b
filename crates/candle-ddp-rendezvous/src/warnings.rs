//! Warnings that nobody may miss, and rate-limited warnings about events that outsiders can cause, for example by
//! connecting to a port: they must not flood the log.
use std::fmt::Arguments;
use std::io::Write;
use std::time::{Duration, Instant};

/// Warns on standard error even if the program does not show its log: hours of work may be at stake.
pub fn warn_aloud(warning: Arguments<'_>) {
    if log::log_enabled!(log::Level::Warn) {
        log::warn!("{warning}");
    } else {
        // If standard error is closed, there is nobody else to tell.
        let _ = writeln!(std::io::stderr(), "candle-ddp: {warning}");
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
    pub fn new(source: impl Into<String>) -> Self {
        Self { source: source.into(), start: None, written: 0, suppressed: 0 }
    }

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
