//! The messages between the agents of a run and its coordinator. They travel as JSON through the store.
use crate::check::Fitness;
use crate::command::{Layout, Terms, older};
use crate::supervise::worker::Exit;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};

/// The number of a node, in the order in which the agents of a run have joined. A node that comes back gets a new one.
pub(crate) type Slot = u64;

/// A node, as its agent introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) host: String,
    /// The rank that its user gave it, if the number of nodes is fixed.
    pub(crate) node_rank: Option<usize>,
    /// Whether it hosts the store.
    pub(crate) hosts: bool,
    pub(crate) terms: Terms,
    /// The number of its workers. A node of another version, which says none, is refused.
    #[serde(default)]
    pub(crate) workers: usize,
    /// Its speed, if its user wants it to be compared with that of others.
    pub(crate) fitness: Option<Fitness>,
    /// Why it takes no part, for those that wait for it: it has failed its own check.
    #[serde(default)]
    pub(crate) unfit: Option<String>,
}

/// A message of an agent to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// It takes part in the run.
    Join(Node),
    /// A worker has ended.
    Exited(Exited),
    /// All its workers have exited with 0.
    Finished,
    /// None of its workers remains; it waits for the next round. With the verdict on them, if any has failed by itself.
    Ended(Option<Verdict>),
    /// It no longer waits for the others, or was told to end, perhaps by a signal.
    Leave { reason: String, signal: Option<i32> },
    /// The verdict on its workers, after all of them have ended; `None` if only others have failed.
    Report(Option<Verdict>),
    /// It no longer needs the store.
    Bye,
    /// Its connection has closed. The store sends this in its name, as its last will. After a goodbye, it means
    /// nothing.
    Gone,
}

/// How the process of a rank has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exited {
    pub(crate) rank: usize,
    pub(crate) exit: Exit,
}

/// An entry of the coordinator's log, which all agents read in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// All start their workers.
    Start(Round),
    /// All end their workers, to restart them.
    Restart { reason: String },
    /// A failure after which the run continues.
    Failure(Box<Verdict>),
    /// In an elastic run, a process takes the place of one that has ended, and all others continue.
    Replace(Replacement),
    /// In an elastic run, the others continue without the process of this rank, or without the whole node.
    ScaleDown { slot: Slot, rank: Option<usize>, reason: String },
    /// In an elastic run, a node starts its workers, and the others continue with them.
    Admit(Admission),
    /// A node that was welcome cannot take part: others that have joined since are faster.
    Refuse { slot: Slot, reason: String },
    /// All have finished.
    Done,
    /// The run has failed, or a signal to one of the nodes has ended it.
    Failed { reason: String, code: u8, signal: Option<i32> },
    /// The node that hosts the store leaves; the others continue by themselves.
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
pub(crate) struct Round {
    /// How often all workers were started before.
    pub(crate) attempt: u64,
    /// How often any worker was restarted.
    pub(crate) restart_count: u32,
    /// The workers of the nodes.
    pub(crate) layout: Layout,
    /// Whether the workers are those of the check that comes before the run (`--check`).
    pub(crate) is_check: bool,
    /// The rank of the node that reads this, if it takes part. Each node's rank has a key of its own in the store, so that what
    /// a node reads does not grow with their number.
    #[serde(skip)]
    pub(crate) node_rank: Option<usize>,
}

/// A process that takes the place of one that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replacement {
    pub(crate) slot: Slot,
    pub(crate) rank: usize,
    pub(crate) incarnation: u64,
    pub(crate) restart_count: u32,
    pub(crate) reason: String,
}

/// The workers of a node that joins an elastic run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Admission {
    pub(crate) slot: Slot,
    pub(crate) node_rank: usize,
    /// The workers of all nodes that the run has had at the same time.
    pub(crate) layout: Layout,
    pub(crate) attempt: u64,
    pub(crate) restart_count: u32,
    /// Of each worker.
    pub(crate) incarnations: Vec<u64>,
    pub(crate) reason: String,
}

/// The reply to an agent that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Welcome {
    /// It takes part from this entry of the log on.
    From {
        entry: u64,
        /// Whether it is a spare: the run has all nodes that it needs, and works.
        #[serde(default)]
        is_spare: bool,
        /// The version of ddprun that hosts the store.
        #[serde(default = "older")]
        version: String,
    },
    Refused {
        reason: String,
    },
}
