//! How many files and connections this process may have open.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit is not raised beyond this, since some programs close every descriptor up to the limit that they might have
/// inherited.
const ENOUGH: u64 = 1 << 16;
/// The least number of other descriptors of a process: its output, a few files, and connections to the store.
const OTHERS: usize = 16;

/// The limit that [`raise_limit`] can reach; `None` if there is none.
pub fn limit() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = current?.max(maximum.unwrap_or(ENOUGH).min(ENOUGH));
    Some(usize::try_from(raised).unwrap_or(usize::MAX))
}

/// Raises the soft limit (`ulimit -Sn`, often 1024) towards the hard one, so that connections to very many ranks fit.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let Some(wanted) = limit().map(|limit| limit as u64).filter(|limit| current.is_some_and(|now| now < *limit)) else {
        return;
    };
    match setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }) {
        Ok(()) => log::debug!("`ulimit -n` is {wanted} now, instead of {}", current.unwrap_or_default()),
        Err(error) => log::debug!("`ulimit -n` stays {}: {error}", current.unwrap_or_default()),
    }
}

/// The number of open descriptors.
pub fn open() -> usize {
    // Where the system does not report it, assume standard input, output and error.
    std::fs::read_dir("/proc/self/fd").map_or(3, |open| open.count())
}

/// Raises the limit. Returns an error message if it is still too low for `more` connections in addition to `open`
/// descriptors. `purpose` says what the connections are for.
pub fn check_limit(open: usize, more: usize, purpose: &str) -> Result<(), String> {
    raise_limit();
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let needed = open.max(OTHERS).saturating_add(more);
    if needed as u64 <= limit {
        return Ok(());
    }
    let use_of_them = match more {
        0 => format!("has {open} files and connections open already"),
        _ => format!("needs {more} for {purpose}"),
    };
    Err(format!(
        "it is {limit} on host {}, even after it was raised to the hard limit, but must be at least {needed}: this \
         process {use_of_them}. Raise the hard limit (`ulimit -Hn`, limits.conf, the container's or \
         Slurm's settings)",
        crate::host::host_name()
    ))
}

/// Whether the error is a temporary shortage (file descriptors, memory), worth a retry.
pub fn is_shortage(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

/// The remedy for a shortage.
pub const SHORTAGE_HINT: &str =
    "`ulimit -n` limits the files and connections of a process: raise it, or find out who connects";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_or_the_needed_number_is_told() {
        check_limit(3, 0, "nothing").unwrap();
        let now = getrlimit(Resource::Nofile).current;
        assert!(now.is_none_or(|now| now >= ENOUGH || Some(now) == getrlimit(Resource::Nofile).maximum), "{now:?}");
        assert_eq!(limit().map(|limit| limit as u64), now);
        let text = check_limit(3, usize::MAX / 2, "a test").unwrap_err();
        assert!(text.contains(&format!("it is {}", now.unwrap())) && text.contains("for a test"), "{text}");
        let text = check_limit(usize::MAX, 0, "no connections").unwrap_err();
        assert!(
            text.contains("this process has 18446744073709551615 files and connections open already. Raise"),
            "{text}"
        );
    }
}
