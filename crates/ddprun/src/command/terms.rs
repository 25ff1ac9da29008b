//! The parameters that all nodes of a run must have in common.
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The parts of the command line that must be the same on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) run_id: String,
    pub(crate) min_nodes: usize,
    pub(crate) max_nodes: usize,
    pub(crate) max_restarts: u32,
    /// The version of ddprun. One that says none is older than these lines.
    #[serde(default = "older")]
    pub(crate) version: String,
}

pub(crate) fn older() -> String {
    "an older one".to_string()
}

/// The version of this ddprun.
pub(crate) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_string()
}

/// The option that says to which run a node belongs.
const RUN_ID: &str = "--rdzv-id";
/// The longest time that can be set, about thirty years: no clock goes far enough for some times beyond.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

impl Terms {
    /// The first difference between these terms, which are the run's, and those of a node that joins.
    pub(crate) fn difference(&self, other: &Self) -> Option<Difference> {
        let range = |terms: &Self| match terms.min_nodes == terms.max_nodes {
            true => terms.min_nodes.to_string(),
            false => format!("{}:{}", terms.min_nodes, terms.max_nodes),
        };
        let pairs = [
            (RUN_ID, self.run_id.clone(), other.run_id.clone()),
            ("the version of ddprun", self.version.clone(), other.version.clone()),
            ("--nnodes", range(self), range(other)),
            ("--max-restarts", self.max_restarts.to_string(), other.max_restarts.to_string()),
        ];
        let (option, ours, theirs) = pairs.into_iter().find(|(_, ours, theirs)| ours != theirs)?;
        Some(Difference { option, ours, theirs })
    }
}

/// An option whose value on a node differs from the value on the node that hosts the store.
pub(crate) struct Difference {
    option: &'static str,
    ours: String,
    theirs: String,
}

impl Difference {
    /// Whether the other node belongs to another run, and is here by mistake.
    pub(crate) fn is_of_another_run(&self) -> bool {
        self.option == RUN_ID
    }

    /// For the node that joins, or for the others.
    pub(crate) fn text(&self, place: &str) -> String {
        let Self { option, ours, theirs } = self;
        format!("{option} is {theirs} {place}, but {ours} on the node that hosts the store: give all nodes the same")
    }
}

/// Times of the rendezvous: torchrun's `--rdzv-conf`, as far as it applies here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pace {
    /// How long the first nodes wait for the others.
    pub(crate) join_timeout: Duration,
    /// How long nodes wait for more, up to the largest number, once the smallest number has joined.
    pub(crate) last_call_timeout: Duration,
    /// The time between two signs of life.
    pub(crate) keep_alive_interval: Duration,
    /// A node that has missed this many is considered dead.
    pub(crate) keep_alive_max_attempt: u32,
    /// How long a node whose workers have finished waits for the others.
    pub(crate) exit_barrier_timeout: Duration,
    /// Whether this node hosts the store; `None`: if the endpoint's host is this machine.
    pub(crate) is_host: Option<bool>,
}

impl Default for Pace {
    /// torchelastic's times, except that a node is found to be dead after 5 s instead of 15.
    fn default() -> Self {
        Self {
            join_timeout: Duration::from_secs(600),
            last_call_timeout: Duration::from_secs(30),
            keep_alive_interval: Duration::from_millis(500),
            keep_alive_max_attempt: 10,
            exit_barrier_timeout: Duration::from_secs(300),
            is_host: None,
        }
    }
}

impl Pace {
    /// The time without a sign of life after which a node is considered dead.
    pub(crate) fn patience(&self) -> Duration {
        self.keep_alive_interval.saturating_mul(self.keep_alive_max_attempt)
    }

    /// Parses `key=value,key=value`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut pace = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let wrong = |reason: &str| Error::usage("--rdzv-conf", format!("{pair:?}: {reason}"));
            let (name, value) = pair.split_once('=').ok_or_else(|| wrong("it must be KEY=VALUE"))?;
            let seconds = || {
                let seconds = value.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                let seconds = seconds.filter(|time| !time.is_zero() && *time <= LONGEST);
                seconds.ok_or_else(|| wrong("it must be a positive number of seconds, at most 1000000000"))
            };
            match name.trim() {
                // `timeout` is the name in torchrun's static rendezvous.
                "join_timeout" | "timeout" => pace.join_timeout = seconds()?,
                "last_call_timeout" => pace.last_call_timeout = seconds()?,
                "keep_alive_interval" => pace.keep_alive_interval = seconds()?,
                "exit_barrier_timeout" => pace.exit_barrier_timeout = seconds()?,
                "keep_alive_max_attempt" => {
                    let attempts = value.parse().ok().filter(|attempts| *attempts > 0);
                    pace.keep_alive_max_attempt = attempts.ok_or_else(|| wrong("it must be a positive number"))?;
                }
                "is_host" => {
                    pace.is_host = Some(match value.to_ascii_lowercase().as_str() {
                        "true" | "1" | "yes" | "y" | "t" => true,
                        "false" | "0" | "no" | "n" | "f" => false,
                        _ => return Err(wrong("it must be true or false")),
                    });
                }
                _ => {
                    return Err(wrong(
                        "it is unknown: use join_timeout, last_call_timeout, keep_alive_interval, \
                         keep_alive_max_attempt, exit_barrier_timeout (seconds, or a number) or is_host",
                    ));
                }
            }
        }
        Ok(pace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed() {
        assert_eq!(Pace::parse("").unwrap(), Pace::default());
        let pace = Pace::parse("join_timeout=0.5, is_host=False,keep_alive_max_attempt=3").unwrap();
        assert_eq!((pace.join_timeout, pace.is_host), (Duration::from_millis(500), Some(false)));
        assert_eq!(pace.patience(), Duration::from_millis(1500));
        for wrong in [
            "join_timeout",
            "join_timeout=-1",
            "keep_alive_interval=1e19",
            "join_timeout=inf",
            "join_timeout=1e10",
            "join_timeout=",
            "last_call_timeout=0",
            "keep_alive_max_attempt=0",
            "port=1",
        ] {
            assert!(Pace::parse(wrong).unwrap_err().to_string().contains("--rdzv-conf"), "{wrong}");
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let text = r#"{"run_id":"a","min_nodes":1,"max_nodes":2,"max_restarts":0}"#;
        let old: Terms = serde_json::from_str(text).unwrap();
        let terms = Terms { version: version(), ..old.clone() };
        assert!(terms.difference(&terms).is_none());
        let other = Terms { max_restarts: 3, max_nodes: 1, ..terms.clone() };
        let text = terms.difference(&other).unwrap().text("here");
        assert!(text.starts_with("--nnodes is 1 here, but 1:2 on the node"), "{text}");
        let text = terms.difference(&old).unwrap().text("on host b");
        let expected = format!("the version of ddprun is an older one on host b, but {} on the node", version());
        assert!(text.starts_with(&expected), "{text}");
    }
}
