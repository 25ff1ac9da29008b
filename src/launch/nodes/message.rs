//! What the agents of a run tell its coordinator, and what it tells them. All of it travels as JSON through the store.
use super::terms::Terms;
use serde::{Deserialize, Serialize};

/// The number of a node, in the order in which the agents of a run have come. A node that comes back gets a new one.
pub(in crate::launch) type Slot = u64;

/// A node, as its agent introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Node {
    pub(in crate::launch) host: String,
    /// The rank that its user gave it, where the number of nodes is fixed.
    pub(in crate::launch) node_rank: Option<usize>,
    /// Whether it hosts the store.
    pub(in crate::launch) hosts: bool,
    pub(in crate::launch) terms: Terms,
}

/// What an agent tells the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) enum Message {
    /// It takes part in the run.
    Join(Node),
    /// A worker has ended.
    Exited(Exited),
    /// All its workers have exited with 0.
    Finished,
    /// None of its workers is left; it waits for the next round.
    Ended,
    /// It does not wait any longer for the others, or was told to end, perhaps by a signal.
    Leave { reason: String, signal: Option<i32> },
    /// What was the first failure among its workers, after all of them have ended; `None` if only others have failed.
    Report(Option<Report>),
    /// It needs the store no more.
    Bye,
    /// Its connection has closed: its last will, which the store sends in its name. It means nothing after a goodbye.
    Gone,
}

/// How the process of a rank has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Exited {
    pub(in crate::launch) rank: usize,
    /// How its process ended, as in "exited with code 1".
    pub(in crate::launch) how: String,
    /// The exit code that ddprun makes of it.
    pub(in crate::launch) code: u8,
}

/// How a worker failed, from the node on which it ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Report {
    pub(in crate::launch) rank: usize,
    /// It was killed, and so cannot have failed because of another.
    pub(in crate::launch) killed: bool,
    /// The rank on another node that its error names.
    pub(in crate::launch) elsewhere: Option<usize>,
    /// When it ended, in milliseconds since 1970.
    pub(in crate::launch) at: u64,
    /// The exit code of ddprun.
    pub(in crate::launch) code: u8,
    /// How it ended, and its last words.
    pub(in crate::launch) text: String,
}

/// An entry of the coordinator's log, which all agents read in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) enum Entry {
    /// All start their workers.
    Start(Round),
    /// All end their workers, to start them again.
    Restart { reason: String },
    /// In an elastic run, a process takes the place of one that has ended, and all others go on.
    Replace(Replacement),
    /// In an elastic run, the others go on without the process of this rank, or without the whole node.
    GoOnWithout { slot: Slot, rank: Option<usize>, reason: String },
    /// In an elastic run, a node starts its workers, and the others go on with them.
    Admit(Admission),
    /// All have finished.
    Done,
    /// The run has failed, or a signal to one of the nodes has ended it.
    Failed { reason: String, code: u8, signal: Option<i32> },
    /// The node that hosts the store leaves; the others go on by themselves.
    Unattended { reason: String },
}

impl Entry {
    /// Whether no more entries follow.
    pub(super) fn is_last(&self) -> bool {
        matches!(self, Self::Done | Self::Failed { .. } | Self::Unattended { .. })
    }
}

/// The nodes that run workers at the same time: torchelastic's rendezvous round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Round {
    /// How often all workers were started before.
    pub(in crate::launch) attempt: u64,
    /// How often any were started again.
    pub(in crate::launch) restart_count: u32,
    /// The nodes by their rank.
    pub(in crate::launch) slots: Vec<Slot>,
}

/// A process that takes the place of one that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Replacement {
    pub(in crate::launch) slot: Slot,
    pub(in crate::launch) rank: usize,
    pub(in crate::launch) incarnation: u64,
    pub(in crate::launch) restart_count: u32,
    pub(in crate::launch) reason: String,
}

/// The workers of a node that joins an elastic run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) struct Admission {
    pub(in crate::launch) slot: Slot,
    pub(in crate::launch) node_rank: usize,
    /// The number of nodes that the run has had at the same time.
    pub(in crate::launch) nodes: usize,
    pub(in crate::launch) attempt: u64,
    pub(in crate::launch) restart_count: u32,
    /// Of each worker.
    pub(in crate::launch) incarnations: Vec<u64>,
    pub(in crate::launch) reason: String,
}

/// What an agent learns when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::launch) enum Welcome {
    /// It takes part from this entry of the log on.
    From {
        entry: u64,
    },
    Refused {
        reason: String,
    },
}
