//! The progress bar of rank 0, on the terminal: also when the terminal is at the far end of the launcher's pipe.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use std::io::{IsTerminal, Write};
use std::sync::Mutex;

/// A bar of `steps` steps; hidden on ranks other than 0, and where standard error does not end at a terminal.
pub(crate) fn bar(epoch: usize, steps: usize, rank: usize) -> ProgressBar {
    // The launcher reads its workers' output through pipes, and tells them by this variable where it puts it.
    let terminal = std::io::stderr().is_terminal()
        || std::env::var_os("CANDLE_DDP_STDERR_IS_TERMINAL").is_some_and(|value| value == "1");
    let target = if rank == 0 && terminal {
        ProgressDrawTarget::term_like_with_hz(Box::new(Terminal::default()), 10)
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target).with_prefix(format!("epoch {epoch}"));
    match ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len}, {eta} left") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// Standard error as a terminal of one line, whether or not it is one itself.
///
/// Each drawing is one write, from clearing the line to a carriage return, so that nothing tears on its way and
/// whatever is printed next starts at the line's beginning.
#[derive(Debug, Default)]
struct Terminal {
    drawing: Mutex<String>,
}

impl Terminal {
    fn add(&self, text: &str) -> std::io::Result<()> {
        if let Ok(mut drawing) = self.drawing.lock() {
            drawing.push_str(text);
        }
        Ok(())
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(80)
    }

    // A bar of one line never leaves it.
    fn move_cursor_up(&self, _n: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _n: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, n: usize) -> std::io::Result<()> {
        self.add(&format!("\x1b[{n}C"))
    }

    fn move_cursor_left(&self, n: usize) -> std::io::Result<()> {
        self.add(&format!("\x1b[{n}D"))
    }

    fn write_line(&self, text: &str) -> std::io::Result<()> {
        self.add(text)
    }

    fn write_str(&self, text: &str) -> std::io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> std::io::Result<()> {
        self.add("\x1b[2K")
    }

    fn flush(&self) -> std::io::Result<()> {
        let drawing = self.drawing.lock().map(|mut drawing| std::mem::take(&mut *drawing)).unwrap_or_default();
        if drawing.is_empty() {
            return Ok(());
        }
        let mut stderr = std::io::stderr().lock();
        stderr.write_all(format!("{}\r", drawing.trim_end()).as_bytes())?;
        stderr.flush()
    }
}
