//! Names and numbers of signals, and whether they are ignored.
use rustix::process::{Pid, Signal};
use signal_hook::consts::{FORBIDDEN, SIGCHLD, SIGCONT, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH, SIGXFSZ};
use signal_hook::low_level::signal_name;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Returns the name, such as `SIGTERM`, or `signal 35` for a signal without a name.
pub(crate) fn name(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// The numbers of signals.
pub(crate) type Signals = Vec<i32>;

/// Parses a list of signals, such as `SIGTERM,SIGINT`.
pub(crate) fn parse_list(list: &str) -> Result<Signals, String> {
    let may_end = |signal: &i32| !FORBIDDEN.contains(signal) && ![SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH].contains(signal);
    let signal = |word: &str| {
        let signal = (1..32).find(|&signal| signal_name(signal) == Some(word)).filter(may_end);
        signal.ok_or_else(|| format!("{word} is not a signal that can end a run: use names, as in SIGTERM,SIGINT"))
    };
    list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(signal).collect()
}

/// The signal of this name.
pub(crate) fn of_name(name: &str) -> Option<Signal> {
    (1..32).find(|&signal| signal_name(signal) == Some(name.trim())).and_then(Signal::from_named_raw)
}

/// Signals that programs use for their own purposes, such as Slurm's warning before a job ends: they are forwarded to
/// the workers, and do not end the run.
pub(crate) const FOR_WORKERS: [i32; 2] = [SIGUSR1, SIGUSR2];

/// Makes a file that would exceed its limit, `ulimit -f`, an error of that write instead of the end of this process. A handler does
/// that, unlike an ignored signal, for this process alone.
pub(crate) fn survive_file_limits() {
    if !is_ignored(SIGXFSZ)
        && let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))
    {
        log::warn!("the limit on files, `ulimit -f`, may end ddprun: {error}");
    }
}

/// Returns whether this process was started with `signal` ignored, as `nohup` does for SIGHUP. The signal must then
/// stay ignored.
pub(crate) fn is_ignored(signal: i32) -> bool {
    is_in_mask("self", "SigIgn:", signal)
}

/// Returns whether a process has a handler for `signal`.
pub(crate) fn is_handled_by(process: Pid, signal: i32) -> bool {
    is_in_mask(&process.to_string(), "SigCgt:", signal)
}

fn is_in_mask(process: &str, mask: &str, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(mask));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    u32::try_from(signal - 1).ok().and_then(|bit| mask.checked_shr(bit)).is_some_and(|rest| rest & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        assert_eq!(parse_list("SIGTERM, SIGINT,").unwrap(), [15, 2]);
        assert_eq!(name(9), "SIGKILL");
        assert_eq!(name(40), "signal 40");
    }

    #[test]
    fn the_standard_library_ignores_sigpipe() {
        assert!(is_ignored(signal_hook::consts::SIGPIPE));
        assert!(!is_ignored(signal_hook::consts::SIGTERM));
    }
}
