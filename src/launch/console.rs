//! ddprun's own stdout and stderr, as the one place where the output of all ranks comes together.
pub(super) use super::printer::{NoReader, Target};
use super::printer::{Piece, Printer};
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// The two streams. Threads write them, so that nothing else has to wait for whoever reads them.
#[derive(Debug)]
pub(super) struct Console {
    terminal: [bool; 2],
    stdout: Arc<Printer>,
    /// The same one where both streams are one place.
    stderr: Arc<Printer>,
}

static CONSOLE: LazyLock<Console> = LazyLock::new(|| {
    let same = identity(io::stdout().as_fd()).is_some_and(|out| identity(io::stderr().as_fd()) == Some(out));
    let terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
    let stdout = Printer::start(Target::Stdout, terminal[0], |text| message(text));
    let stderr =
        if same { Arc::clone(&stdout) } else { Printer::start(Target::Stderr, terminal[1], |text| message(text)) };
    Console { terminal, stdout, stderr }
});

impl Console {
    /// Where this process's stdout and stderr go.
    pub(super) fn get() -> &'static Self {
        &CONSOLE
    }

    fn printer(&self, target: Target) -> &Printer {
        match target {
            Target::Stdout => &self.stdout,
            Target::Stderr => &self.stderr,
        }
    }

    /// Whether `target` is a terminal.
    pub(super) fn is_terminal(&self, target: Target) -> bool {
        match target {
            Target::Stdout => self.terminal[0],
            Target::Stderr => self.terminal[1],
        }
    }

    /// Whether stdout and stderr are the same terminal, file or pipe.
    pub(super) fn is_one(&self) -> bool {
        Arc::ptr_eq(&self.stdout, &self.stderr)
    }

    /// Shows `bytes`, which came from `source`, after what came before them. Waits as long as too much is unwritten, which
    /// is how a reader that is slow slows the workers down. What a full disk does not take is missing, which is said once:
    /// it does not end the training.
    pub(super) fn show(&self, source: usize, target: Target, bytes: Vec<u8>) -> Result<(), NoReader> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.printer(target).push(Piece::Output { source, target, bytes })
    }

    /// Shows a message of ddprun's on stderr, on a line of its own. Never waits.
    pub(super) fn message(&self, text: String) {
        // Nobody may be there to read it.
        let _ = self.printer(Target::Stderr).push(Piece::Message(text));
    }

    /// Makes [`Self::show`] wait no longer, since what is still to come is bounded.
    pub(super) fn stop_waiting(&self) {
        self.stdout.stop_waiting();
        self.stderr.stop_waiting();
    }

    /// Waits until everything was written. Gives up when nobody has read anything for `patience`, or when `interrupted`,
    /// which is asked now and then, says so: what is unwritten then will never be.
    pub(super) fn finish(&self, patience: Duration, mut interrupted: impl FnMut() -> bool) {
        /// How long a signal may go unnoticed.
        const TICK: Duration = Duration::from_millis(50);
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
                self.message(format!("nobody reads the output: {lost} bytes of it are lost"));
                self.printer(Target::Stderr).wait(TICK);
                return;
            }
        }
    }
}

/// Device and inode: what makes two file descriptors the same place.
fn identity(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let metadata = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Shows one message of ddprun's to the user. Never waits.
pub(super) fn message(text: impl std::fmt::Display) {
    Console::get().message(format!("ddprun: {text}\n"));
}
