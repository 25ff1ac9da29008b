//! Setup of a child process between fork and exec.
#![allow(unsafe_code)]
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the child when this process ends, for whatever reason.
///
/// The kernel watches the forking thread, not the process, so call `spawn` on a thread that lives as long as the
/// process: the main thread. The standard library resets the signal mask and SIGPIPE to their defaults.
pub(super) fn bind_to_launcher(command: &mut Command) {
    use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
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

/// Lets the child run only on the processors of `cpus`.
pub(super) fn bind_to_cpus(command: &mut Command, cpus: rustix::thread::CpuSet) {
    // SAFETY: as above. The closure makes one system call with a value that it owns.
    unsafe {
        command.pre_exec(move || Ok(rustix::thread::sched_setaffinity(None, &cpus)?));
    }
}
