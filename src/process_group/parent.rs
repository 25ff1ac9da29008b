//! Ties this process's life to its parent's.
use crate::{Error, Result};

/// Makes the kernel kill this process when its parent dies.
pub(super) fn die_with_parent() -> Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|errno| Error::io("setting the parent-death signal (InitOptions.die_with_parent)", errno))?;
    // A parent that died before the signal was set will not send it.
    if getppid() == parent {
        return Ok(());
    }
    Err(Error::io("the parent process has just died (InitOptions.die_with_parent)", rustix::io::Errno::SRCH))
}
