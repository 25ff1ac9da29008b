//! The progress bar of rank 0. It also works under the launcher, which gives its workers a terminal if its own output
//! goes to one.
use super::summary::Summary;
use candle_ddp::ProcessGroup;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `steps` steps. It is hidden on ranks other than 0 and, by indicatif, if standard error is not a
    /// terminal.
    pub(crate) fn new(pg: &ProcessGroup, title: String, steps: usize) -> Self {
        let target = if pg.rank() == 0 { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
        let mut bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_prefix(title);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len}, {msg}, {eta} left") {
            bar = bar.with_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// Advances by one step, with the given mean loss.
    pub(crate) fn step(&mut self, loss: f64, summary: &Summary) {
        if !self.bar.is_hidden() {
            self.bar.set_message(format!("loss {loss:.4}, {}", summary.speed()));
        }
        self.bar.inc(1);
    }

    /// Removes the bar.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
