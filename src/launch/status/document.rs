//! What the ddprun that hosts the store writes there about its run, whenever something changes.
use crate::host::host_name;
use crate::launch::config::Config;
use crate::rendezvous::milliseconds;
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// The key of a run's [`RunStatus`].
pub(in crate::launch) const RUN_STATUS: &str = "candle_ddp/status/run";

/// A run, as its launcher knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct RunStatus {
    pub(in crate::launch) run_id: String,
    pub(in crate::launch) phase: Phase,
    /// How often all workers were started again.
    pub(in crate::launch) attempt: u64,
    /// How many of the restarts are used up.
    pub(in crate::launch) restarts: u32,
    pub(in crate::launch) max_restarts: u32,
    /// The number of workers on each node.
    pub(in crate::launch) workers: usize,
    pub(in crate::launch) nodes: Vec<NodeStatus>,
    pub(in crate::launch) last_failure: Option<LastFailure>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) enum Phase {
    Meeting,
    Running,
    Restarting,
    Ending,
}

/// A node that takes part, has taken part since the last start, or waits until it can.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct NodeStatus {
    pub(in crate::launch) host: String,
    /// `None` while it waits.
    pub(in crate::launch) node_rank: Option<usize>,
    pub(in crate::launch) is_alive: bool,
}

/// The failure of a worker or a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct LastFailure {
    /// In milliseconds since 1970.
    pub(in crate::launch) at: u64,
    pub(in crate::launch) text: String,
}

impl LastFailure {
    pub(in crate::launch) fn now(text: impl Into<String>) -> Self {
        Self { at: milliseconds(SystemTime::now()), text: text.into() }
    }
}

impl RunStatus {
    /// The beginning of a run. The nodes of a run on several ones have yet to come.
    pub(in crate::launch) fn of(config: &Config) -> Self {
        let own = NodeStatus { host: host_name(), node_rank: Some(0), is_alive: true };
        let (phase, nodes) = match config.rendezvous {
            None => (Phase::Running, vec![own]),
            Some(_) => (Phase::Meeting, Vec::new()),
        };
        Self {
            run_id: config.run_id.clone(),
            phase,
            attempt: 0,
            restarts: 0,
            max_restarts: config.max_restarts,
            workers: config.topology.local_world_size,
            nodes,
            last_failure: None,
        }
    }
}
