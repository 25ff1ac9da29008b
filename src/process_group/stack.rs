//! The stack of the main thread.
use super::spawn::STACK_BYTES;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets the main thread's stack grow to [`STACK_BYTES`], if the hard limit allows: candle walks and drops a graph recursively, once
/// per operation, and overflows the usual 8 MiB with some ten thousand of them. Linux looks at the limit whenever that stack grows.
/// Other threads keep their stacks.
pub(super) fn grow() {
    let Rlimit { current, maximum } = getrlimit(Resource::Stack);
    let wanted = maximum.map_or(STACK_BYTES as u64, |maximum| maximum.min(STACK_BYTES as u64));
    if current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Stack, Rlimit { current: Some(wanted), maximum })
    {
        log::debug!("`ulimit -s` stays as it is: {error}");
    }
}
