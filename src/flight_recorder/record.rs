//! The records that a rank writes: its groups, and their last calls.
use serde::{Deserialize, Serialize};

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CallState {
    /// The call waits for the calls before it.
    Scheduled,
    /// The call is running; on a GPU, it is on the stream.
    Started,
    Completed,
    Failed,
}

/// Calls are numbered within a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChannelKind {
    Collectives,
    Send,
    Recv,
}

/// One call. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallRecord {
    pub(crate) channel: ChannelKind,
    pub(crate) sequence: u64,
    pub(crate) operation: String,
    pub(crate) dtype: Option<String>,
    /// The number of elements, as the message of a mismatch counts them.
    pub(crate) count: u64,
    pub(crate) reduction: Option<String>,
    pub(crate) root: Option<usize>,
    /// The rank, in this group, to or from which a message goes.
    pub(crate) peer: Option<usize>,
    /// What the call is for.
    pub(crate) label: Option<String>,
    pub(crate) state: CallState,
    pub(crate) scheduled_ns: u64,
    pub(crate) started_ns: Option<u64>,
    /// When it completed or failed, as far as the engine has noticed.
    pub(crate) completed_ns: Option<u64>,
}

/// One group, as seen by one of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupRecord {
    /// The group's name, the same on all ranks: `world` for the group of all.
    pub(crate) name: String,
    /// The group's ranks, as they are numbered in the group of all.
    pub(crate) ranks: Vec<usize>,
    pub(crate) failure: Option<String>,
    /// The calls, channel by channel, the oldest first.
    pub(crate) calls: Vec<CallRecord>,
}

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankRecord {
    /// The version of this format.
    pub(crate) version: u32,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Why the file was written.
    pub(crate) reason: String,
    pub(crate) written_ns: u64,
    /// When the group of all was made. Version 1 of the format did not have it at first.
    #[serde(default)]
    pub(crate) started_ns: u64,
    pub(crate) groups: Vec<GroupRecord>,
}

#[cfg(any(test, fuzzing, feature = "launcher"))]
impl CallRecord {
    /// Whether the call agrees with one of another rank in all that ranks must have in common.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.operation == other.operation
            && self.dtype == other.dtype
            && self.count == other.count
            && self.reduction == other.reduction
            && self.root == other.root
            && self.label == other.label
    }

    pub(crate) fn is_over(&self) -> bool {
        self.state == CallState::Completed
    }

    /// Returns, for example, `reduce(f32[4], sum, root 0) for save_distributed`.
    pub(crate) fn in_words(&self) -> String {
        let mut text = self.operation.clone();
        text += "(";
        if let Some(dtype) = &self.dtype {
            text += &format!("{dtype}[{}]", self.count);
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
