//! The progress bar of rank 0. It also works under the launcher, which gives its workers a terminal if its own output
//! goes to one.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Creates a bar of `steps` steps. It is hidden on ranks other than 0 and, by indicatif, if standard error is not a
/// terminal.
pub(crate) fn bar(epoch: usize, steps: usize, rank: usize) -> ProgressBar {
    let target = if rank == 0 { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_prefix(format!("epoch {epoch}"));
    match ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len}, {eta} left") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
