//! The document about its run that the ddprun that hosts the store keeps there, and updates with every change.
use crate::command::{Config, Layout};
use crate::verdict::Verdict;
use candle_ddp_base::host::host_name;
use serde::{Deserialize, Serialize};

/// The key of a run's [`RunStatus`].
pub(crate) const RUN_STATUS: &str = "candle_ddp/status/run";

/// A run, as its launcher knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunStatus {
    pub(crate) run_id: String,
    pub(crate) phase: Phase,
    /// How often all workers were restarted.
    pub(crate) attempt: u64,
    /// How many restarts were used.
    pub(crate) restarts: u32,
    pub(crate) max_restarts: u32,
    /// The workers of the nodes.
    pub(crate) layout: Layout,
    pub(crate) nodes: Vec<NodeStatus>,
    /// Without its evidence.
    pub(crate) last_failure: Option<Verdict>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    Meeting,
    Running,
    Restarting,
    Ending,
}

/// A node that takes part, has taken part since the last start, or waits until it can.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeStatus {
    pub(crate) host: String,
    /// `None` while it waits.
    pub(crate) node_rank: Option<usize>,
    pub(crate) is_alive: bool,
}

impl RunStatus {
    /// A run of two workers on each node.
    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        Self {
            run_id: "night".to_string(),
            phase: Phase::Running,
            attempt: 1,
            restarts: 1,
            max_restarts: 3,
            layout: Layout::even(2, 2),
            nodes: Vec::new(),
            last_failure: None,
        }
    }

    /// The initial status of a run. The nodes of a run on several machines have yet to join.
    pub(crate) fn of(config: &Config) -> Self {
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
            max_restarts: config.options.max_restarts,
            layout: config.topology.layout.clone(),
            nodes,
            last_failure: None,
        }
    }
}
