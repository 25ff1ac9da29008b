//! Temporary shortages of the operating system.

/// Whether the error is a temporary shortage (file descriptors, memory), worth a retry.
pub fn is_shortage(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

/// What to do about a shortage.
pub const SHORTAGE_HINT: &str =
    "`ulimit -n` limits the files and connections of a process: raise it, or find out who connects";
