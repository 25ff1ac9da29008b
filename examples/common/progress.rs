//! The progress bar of rank 0. It also works under the launcher, which gives its workers a terminal if its own output
//! goes to one.
use candle_ddp::ProcessGroup;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Instant;

pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
    /// The unit of the count, such as "images".
    unit: &'static str,
    samples: usize,
    world_size: usize,
}

impl Progress {
    /// A bar of `steps` steps. It is hidden on ranks other than 0 and, by indicatif, if standard error is not a
    /// terminal.
    pub(crate) fn new(pg: &ProcessGroup, title: String, steps: usize, unit: &'static str) -> Self {
        let target = if pg.rank() == 0 { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
        let mut bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_prefix(title);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len}, {msg}, {eta} left") {
            bar = bar.with_style(style.progress_chars("=> "));
        }
        Self { bar, started: Instant::now(), unit, samples: 0, world_size: pg.world_size() }
    }

    /// Advances by one step, in which this rank saw `samples` samples with the given mean loss.
    pub(crate) fn step(&mut self, samples: usize, loss: f64) {
        self.samples += samples;
        if !self.bar.is_hidden() {
            let rate = (self.samples * self.world_size) as f64 / self.started.elapsed().as_secs_f64();
            self.bar.set_message(format!("loss {loss:.4}, {rate:.0} {}/s", self.unit));
        }
        self.bar.inc(1);
    }

    /// Removes the bar.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
