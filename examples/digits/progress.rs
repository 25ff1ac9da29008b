//! The progress bar of rank 0. Under the launcher, too, it ends at a terminal if the launcher's output does: it gives
//! its workers one.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar of `steps` steps; hidden on ranks other than 0, and (as indicatif does by itself) where standard error is no
/// terminal.
pub(crate) fn bar(epoch: usize, steps: usize, rank: usize) -> ProgressBar {
    let target = if rank == 0 { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_prefix(format!("epoch {epoch}"));
    match ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len}, {eta} left") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
