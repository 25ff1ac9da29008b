//! Warnings whose number strangers determine, for example by connecting to a port, of which a log must not get too many.
use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// The most warnings in each [`PERIOD`].
const BURST: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Writes warnings to the log, at most [`BURST`] in each [`PERIOD`], and then how many it left out.
pub(crate) struct Warnings {
    /// Whose warnings these are, for the log.
    source: String,
    /// When the period began.
    start: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Warnings {
    pub(crate) fn new(source: impl Into<String>) -> Self {
        Self { source: source.into(), start: None, written: 0, left_out: 0 }
    }

    pub(crate) fn warn(&mut self, warning: Arguments<'_>) {
        if self.start.is_none_or(|start| start.elapsed() >= PERIOD) {
            if self.left_out > 0 {
                log::warn!("{} had {} more warnings, which were left out", self.source, self.left_out);
            }
            (self.start, self.written, self.left_out) = (Some(Instant::now()), 0, 0);
        }
        if self.written < BURST {
            self.written += 1;
            log::warn!("{warning}");
        } else {
            self.left_out += 1;
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
        assert_eq!((warnings.written, warnings.left_out), (10, 15));
        // After the period the log hears of them.
        warnings.start = Instant::now().checked_sub(PERIOD);
        warnings.warn(format_args!("once more"));
        assert_eq!((warnings.written, warnings.left_out), (1, 0));
    }
}
