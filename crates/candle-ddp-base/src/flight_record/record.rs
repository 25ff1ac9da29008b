//! The records that a rank writes: its groups, and their last calls.
use serde::{Deserialize, Serialize};

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CallState {
    /// The call waits for the calls before it.
    Scheduled,
    /// The call is running; on a GPU, it is on the stream.
    Started,
    /// The call has completed.
    Completed,
    /// The call, or its group, has failed.
    Failed,
}

/// Calls are numbered within a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChannelKind {
    /// The collectives of a group.
    Collectives,
    /// The messages to one peer.
    Send,
    /// The messages from one peer.
    Recv,
}

/// One call. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRecord {
    /// The channel.
    pub channel: ChannelKind,
    /// The call's number in its channel.
    pub sequence: u64,
    /// The operation's name.
    pub operation: String,
    /// The dtype of its tensor.
    pub dtype: Option<String>,
    /// The number of elements, counted as in the message of a mismatch.
    pub count: u64,
    /// The reduction, if the operation has one.
    pub reduction: Option<String>,
    /// The root, if the operation has one.
    pub root: Option<usize>,
    /// The rank, in this group, to or from which a message goes.
    pub peer: Option<usize>,
    /// What the call is for.
    pub label: Option<String>,
    /// The shape, without dimensions of size 1, of a tensor with at least two others: `2, 3`.
    #[serde(default)]
    pub shape: Option<String>,
    /// Where in the program the call is: the file, the line and the column.
    #[serde(default)]
    pub place: Option<String>,
    /// How far it has come.
    pub state: CallState,
    /// When the program made the call.
    pub scheduled_ns: u64,
    /// When it began.
    pub started_ns: Option<u64>,
    /// When it completed or failed, as far as the engine has noticed.
    pub completed_ns: Option<u64>,
    /// How long a collective waited for the last of the other ranks, if the engine knows. The rank that came last has waited
    /// least.
    #[serde(default)]
    pub waited_ns: Option<u64>,
}

/// One group, as seen by one of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// The group's name, the same on all ranks; `world` for the group of all ranks.
    pub name: String,
    /// The group's ranks, as numbered in the group of all ranks.
    pub ranks: Vec<usize>,
    /// Why the group has failed, if it has.
    pub failure: Option<String>,
    /// The calls, channel by channel, the oldest first.
    pub calls: Vec<CallRecord>,
}

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRecord {
    /// The version of this format.
    pub version: u32,
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The name of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Why the file was written.
    pub reason: String,
    /// When the file was written.
    pub written_ns: u64,
    /// When the group of all ranks was made. Early files of version 1 do not have it.
    #[serde(default)]
    pub started_ns: u64,
    /// The groups of which the rank is a member.
    pub groups: Vec<GroupRecord>,
}

impl CallRecord {
    /// Whether the call agrees with another rank's call in everything that must be equal on all ranks.
    pub fn is_like(&self, other: &Self) -> bool {
        let agree = matches!((&self.shape, &other.shape), (None, _) | (_, None)) || self.shape == other.shape;
        agree
            && self.operation == other.operation
            && self.dtype == other.dtype
            && self.count == other.count
            && self.reduction == other.reduction
            && self.root == other.root
            && self.label == other.label
    }

    /// Whether it has completed.
    pub fn is_over(&self) -> bool {
        self.state == CallState::Completed
    }

    /// Returns, for example, `reduce(f32[4], sum, root 0) for save_distributed`.
    pub fn in_words(&self) -> String {
        let mut text = self.operation.clone();
        text += "(";
        if let Some(dtype) = &self.dtype {
            let size = self.shape.clone().unwrap_or_else(|| self.count.to_string());
            text += &format!("{dtype}[{size}]");
        }
        // Nearly every reduction is a sum.
        if let Some(reduction) = self.reduction.as_ref().filter(|reduction| *reduction != "sum") {
            text += &format!(", {reduction}");
        }
        if let Some(root) = self.root {
            text += &format!(", root {root}");
        }
        text += ")";
        if let Some(label) = &self.label {
            text += &format!(" for {label}");
        }
        text
    }
}
