use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// The maximum number of warnings per [`PERIOD`].
const BURST: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// Rate-limited warnings, because foreign connections must not flood the log.
#[derive(Default)]
pub(super) struct Warnings {
    /// The start of the period.
    start: Option<Instant>,
    said: u32,
    left_out: u64,
}

impl Warnings {
    pub(super) fn say(&mut self, warning: Arguments<'_>) {
        if self.start.is_none_or(|start| start.elapsed() >= PERIOD) {
            if self.left_out > 0 {
                log::warn!("the store's server suppressed {} more warnings", self.left_out);
            }
            *self = Self { start: Some(Instant::now()), said: 0, left_out: 0 };
        }
        if self.said < BURST {
            self.said += 1;
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
        let mut warnings = Warnings::default();
        (0..25).for_each(|_| warnings.say(format_args!("again")));
        assert_eq!((warnings.said, warnings.left_out), (10, 15));
        // After the period, the suppressed warnings are reported.
        warnings.start = Instant::now().checked_sub(PERIOD);
        warnings.say(format_args!("once more"));
        assert_eq!((warnings.said, warnings.left_out), (1, 0));
    }
}
