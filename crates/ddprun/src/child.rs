//! The system calls around child processes that need `unsafe`: this process's signal mask, which they inherit, and what a child
//! does between fork and exec.
#![allow(unsafe_code)]
use rustix::process::{Signal, getpid, getppid, parent_process_death_signal, set_parent_process_death_signal};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets all signals reach this process, and those that it starts. Some schedulers and supervisors start their jobs with
/// signals blocked; a blocked SIGCHLD would never tell of the end of a worker. Call it before other threads start, since each
/// thread has its own mask, which it inherits from the thread that starts it.
pub(crate) fn unblock_signals() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set that it gets a valid pointer to. `pthread_sigmask` reads it, and takes a null
    // pointer for the old mask.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Whether [`bind_to_launcher`] works here: containers may forbid it, by a seccomp profile without prctl. Changes nothing.
pub(crate) fn can_bind_to_launcher() -> io::Result<()> {
    Ok(set_parent_process_death_signal(parent_process_death_signal()?)?)
}

/// Makes the kernel kill the child when this process ends, for whatever reason.
///
/// The kernel watches the forking thread, not the process, so call `spawn` on a thread that lives as long as the
/// process: the main thread.
pub(crate) fn bind_to_launcher(command: &mut Command) {
    let launcher = getpid();
    // SAFETY: between fork and exec only async-signal-safe calls are allowed, because other threads of the parent
    // may have held locks. The closure makes two system calls and, on failure, builds an `io::Error` from a number,
    // which does not allocate.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died before the call above; then no signal will come.
            if getppid() == Some(launcher) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
        });
    }
}
