//! ddprun's own stdout and stderr, as the one place where the output of all ranks comes together.
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

/// One of the two standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Stdout,
    Stderr,
}

/// An unfinished line: who wrote it, and whether it is a progress bar, which will be drawn again.
#[derive(Debug, Clone, Copy)]
struct Open {
    source: usize,
    in_place: bool,
}

/// Writes pieces of output so that no source's line is continued by another.
#[derive(Debug)]
pub(super) struct Console {
    terminal: [bool; 2],
    same: bool,
    open: [Option<Open>; 2],
    /// Whether it was said that the stream cannot be written.
    complained: [bool; 2],
}

/// Nobody reads a stream of ours any more, as after `ddprun … | head`.
#[derive(Debug)]
pub(super) struct NoReader;

impl Console {
    /// Looks at where this process's stdout and stderr go.
    pub(super) fn detect() -> Self {
        Self {
            terminal: [io::stdout().is_terminal(), io::stderr().is_terminal()],
            same: identity(io::stdout().as_fd()).is_some_and(|out| identity(io::stderr().as_fd()) == Some(out)),
            open: [None; 2],
            complained: [false; 2],
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
        self.same
    }

    /// Whether the last line on stderr is an unfinished one.
    pub(super) fn is_open(&self) -> bool {
        self.open[if self.same { 0 } else { 1 }].is_some()
    }

    /// Shows `bytes`, which came from `source`. What a full disk does not take is missing, which is said once: it does not
    /// end the training.
    pub(super) fn show(&mut self, source: usize, target: Target, bytes: &[u8]) -> Result<(), NoReader> {
        let Err(error) = self.write(source, target, bytes) else { return Ok(()) };
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Err(NoReader);
        }
        let (name, complained) = match target {
            Target::Stdout => ("stdout", &mut self.complained[0]),
            Target::Stderr => ("stderr", &mut self.complained[1]),
        };
        if !std::mem::replace(complained, true) {
            super::message(format_args!("cannot write the workers' output to {name}: {error}. Some of it is missing"));
        }
        Ok(())
    }

    /// Writes `bytes`, which came from `source`, at once.
    fn write(&mut self, source: usize, target: Target, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let terminal = self.is_terminal(target);
        let open = match target {
            Target::Stderr if !self.same => &mut self.open[1],
            _ => &mut self.open[0],
        };
        let start: &[u8] = match open {
            Some(open) if open.source == source => b"",
            Some(open) if open.in_place && terminal => b"\r\x1b[2K",
            Some(_) => b"\n",
            None => b"",
        };
        let before = open.filter(|open| open.source == source).is_some_and(|open| open.in_place);
        let last_line = bytes.rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
        let returns = last_line.contains(&b'\r') || (before && last_line.len() == bytes.len());
        *open = (!last_line.is_empty()).then_some(Open { source, in_place: returns });
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let fd = if target == Target::Stdout { stdout.as_fd() } else { stderr.as_fd() };
        if start.is_empty() { write_all(fd, bytes) } else { write_all(fd, &[start, bytes].concat()) }
    }
}

/// Device and inode: what makes two file descriptors the same place.
fn identity(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let metadata = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Writes all of `bytes`, past interruptions, and also where somebody made the file non-blocking.
fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None).or_else(|errno| match errno {
                    Errno::INTR => Ok(0),
                    errno => Err(errno),
                })?;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
