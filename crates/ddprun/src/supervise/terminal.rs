//! Pseudo-terminals: if a worker's output goes to a terminal in the end, the worker sees a terminal too, so that its
//! colours, line buffering and progress bar work as if it had been started by hand.
use rustix::pty::{OpenptFlags, grantpt, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use std::os::fd::{AsFd, OwnedFd};

/// Opens a pseudo-terminal with the size of ddprun's terminal, and returns the launcher's end and the worker's.
pub(crate) fn open() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    // Pass bytes through unchanged: the outer terminal converts line endings.
    let mut attributes = tcgetattr(&theirs)?;
    attributes.make_raw();
    tcsetattr(&theirs, OptionalActions::Now, &attributes)?;
    if let Some(size) = size() {
        tcsetwinsize(&ours, size)?;
    }
    Ok((ours, theirs))
}

/// Resizes pseudo-terminals to the current size of ddprun's terminal.
pub(crate) fn resize<'a>(terminals: impl Iterator<Item = &'a OwnedFd>) {
    if let Some(size) = size() {
        for terminal in terminals {
            // The worker may have exited; then the error does not matter.
            let _ = tcsetwinsize(terminal, size);
        }
    }
}

fn size() -> Option<Winsize> {
    tcgetwinsize(std::io::stderr().as_fd()).or_else(|_| tcgetwinsize(std::io::stdout().as_fd())).ok()
}
