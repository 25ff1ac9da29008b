//! Pseudo-terminals: a worker whose output finally reaches a terminal sees one, so that its colours, its line
//! buffering and its progress bar are as if it had been started by hand.
use rustix::pty::{OpenptFlags, grantpt, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use std::os::fd::{AsFd, OwnedFd};

/// A pseudo-terminal as large as the terminal that ddprun writes to: our end and the worker's.
pub(super) fn open() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    // Bytes go through as they are: line ends are the outer terminal's business.
    let mut attributes = tcgetattr(&theirs)?;
    attributes.make_raw();
    tcsetattr(&theirs, OptionalActions::Now, &attributes)?;
    if let Some(size) = size() {
        tcsetwinsize(&ours, size)?;
    }
    Ok((ours, theirs))
}

/// Gives pseudo-terminals the present size of the one that ddprun writes to.
pub(super) fn resize(terminals: &[OwnedFd]) {
    if let Some(size) = size() {
        for terminal in terminals {
            // The worker may have ended: then it does not matter.
            let _ = tcsetwinsize(terminal, size);
        }
    }
}

fn size() -> Option<Winsize> {
    tcgetwinsize(std::io::stderr().as_fd()).or_else(|_| tcgetwinsize(std::io::stdout().as_fd())).ok()
}
