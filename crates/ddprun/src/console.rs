//! ddprun's own stdout and stderr, where the output of all ranks comes together.
pub(crate) use crate::printer::{NoReader, Target};
use crate::printer::{Piece, Printer};
use crate::tail::plain;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// The two standard streams, by [`Target`]. Each is written by a thread, so that nothing else blocks on a slow reader.
#[derive(Debug)]
pub(crate) struct Console {
    terminal: [bool; 2],
    /// One and the same if both streams go to one place.
    printers: [Arc<Printer>; 2],
}

static CONSOLE: LazyLock<Console> = LazyLock::new(|| {
    let same = identity(io::stdout().as_fd()).is_some_and(|out| identity(io::stderr().as_fd()) == Some(out));
    let terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
    let stdout = Printer::start(Target::Stdout, terminal[0], |text| message(text));
    let stderr =
        if same { Arc::clone(&stdout) } else { Printer::start(Target::Stderr, terminal[1], |text| message(text)) };
    Console { terminal, printers: [stdout, stderr] }
});

impl Console {
    /// Returns the console of this process's stdout and stderr.
    pub(crate) fn get() -> &'static Self {
        &CONSOLE
    }

    fn printer(&self, target: Target) -> &Printer {
        &self.printers[target as usize]
    }

    /// Returns whether `target` is a terminal.
    pub(crate) fn is_terminal(&self, target: Target) -> bool {
        self.terminal[target as usize]
    }

    /// Returns whether stdout and stderr are the same terminal, file or pipe.
    pub(crate) fn is_one(&self) -> bool {
        Arc::ptr_eq(&self.printers[0], &self.printers[1])
    }

    /// Shows `bytes` from `source`, in order. Blocks while too much is unwritten, so that a slow reader slows the
    /// workers down. If the output cannot be written, for example because a disk is full, it is lost; this is reported
    /// once and does not end the training.
    pub(crate) fn show(&self, source: usize, target: Target, bytes: Vec<u8>) -> Result<(), NoReader> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.printer(target).push(Piece::Output { source, target, bytes })
    }

    /// Stops [`Self::show`] from blocking; the output that remains is bounded.
    pub(crate) fn stop_waiting(&self) {
        self.printers.iter().for_each(|printer| printer.stop_waiting());
    }

    /// Waits until everything is written. Gives up if nothing was read for `patience`, or if `interrupted`, which is
    /// polled, returns true; unwritten output is then lost.
    pub(crate) fn finish(&self, patience: Duration, mut interrupted: impl FnMut() -> bool) {
        /// The interval at which `interrupted` is polled.
        const TICK: Duration = Duration::from_millis(50);
        /// How long the last message may take. On a slow machine, its reader may be slow too.
        const LAST_MESSAGE: Duration = Duration::from_secs(30);
        let (mut least, mut since) = (usize::MAX, Instant::now());
        loop {
            let left = [Target::Stdout, Target::Stderr].map(|target| self.printer(target).wait(TICK));
            let lost = left[0] + if self.is_one() { 0 } else { left[1] };
            if lost == 0 {
                return;
            }
            if lost < least {
                (least, since) = (lost, Instant::now());
            }
            if interrupted() || since.elapsed() >= patience {
                message(format_args!("the output is not being read: {lost} bytes are lost"));
                if left[1] == 0 {
                    // Stderr is being read, even if its thread rarely gets a processor.
                    self.printer(Target::Stderr).wait(LAST_MESSAGE);
                }
                return;
            }
        }
    }
}

/// Returns device and inode, which are equal if two file descriptors refer to the same file.
fn identity(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Shows a message of ddprun to the user. Never blocks. Control characters are left out, since names and errors in it
/// may come from elsewhere; for the same reason, no further line looks like another message.
pub(crate) fn message(text: impl std::fmt::Display) {
    let text = plain(&text.to_string()).replace("\nddprun: ", "\n  ddprun: ");
    // The message is lost if stderr has no reader.
    let _ = Console::get().printer(Target::Stderr).push(Piece::Message(format!("ddprun: {text}\n")));
}

/// Shows the library's warnings to the user, for example about foreign connections to the store or a secret that others
/// can read.
pub(crate) fn show_warnings() {
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
}

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            message(record.args());
        }
    }

    fn flush(&self) {}
}
