//! How many files and connections this process may have open.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// More are not asked for: programs that close all descriptors they might have inherited count up to the limit.
const ENOUGH: u64 = 1 << 16;
/// What a process opens otherwise, at least: its output, a few files, and connections to the store.
const OTHERS: usize = 16;

/// The limit that [`raise_limit`] can reach; `None` if there is none.
pub fn limit() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = current?.max(maximum.unwrap_or(ENOUGH).min(ENOUGH));
    Some(usize::try_from(raised).unwrap_or(usize::MAX))
}

/// Raises the soft limit (`ulimit -Sn`, often 1024) towards the hard one, as far as connections to very many ranks need it.
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

/// How many are open.
pub fn open() -> usize {
    // Where the system does not tell, it is at least standard input, output and error.
    std::fs::read_dir("/proc/self/fd").map_or(3, |open| open.count())
}

/// Raises the limit, and says why it is too low nevertheless for `more` connections beside `open` descriptors. `purpose` is
/// what the connections are for.
pub fn check_limit(open: usize, more: usize, purpose: &str) -> Result<(), String> {
    raise_limit();
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let needed = open.max(OTHERS) + more;
    if needed as u64 <= limit {
        return Ok(());
    }
    Err(format!(
        "it is {limit} on host {}, also after raising it to the hard limit, and this process needs {needed}: {more} for \
         {purpose}. Raise the hard limit (`ulimit -Hn`, limits.conf, the container's or Slurm's settings)",
        crate::host::host_name()
    ))
}

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
    }
}
