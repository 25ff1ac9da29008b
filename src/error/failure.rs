//! Why a group of ranks failed.
use super::text::{Printable, Uneven};
use std::time::Duration;

/// Why a group failed: the first cause. Every rank gets it, now and from every later call.
///
/// To continue without the rank that is lost, or with one that takes its place, make a new group, as
/// `candle_ddp::elastic::run` does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A peer's process ended while this rank still needed data from it.
    #[error(
        "rank {peer} is gone: its connection to rank {rank} closed during {}. \
         Look for the first error in the output of rank {peer}",
        Printable(call)
    )]
    PeerGone {
        /// The rank that noticed.
        rank: usize,
        /// The rank whose process ended.
        peer: usize,
        /// What was going on.
        call: String,
    },

    /// A peer left the group in good order before it took part in a collective, or in a message.
    #[error(
        "rank {peer} left the group after sequence {left_after}, and cannot take part in {}, sequence {sequence}: \
         if rank {peer} failed, its output has the reason; otherwise make as many calls on all ranks of the group{}",
        Printable(call),
        Uneven(call, "")
    )]
    PeerLeft {
        /// The rank that left.
        peer: usize,
        /// Its last collective, or message of this kind.
        left_after: u64,
        /// What the others are doing.
        call: String,
        /// The sequence number of it.
        sequence: u64,
    },

    /// A rank, this one or another, reported an error of its own that ends the group.
    #[error("rank {peer} ended the group: {}", Printable(reason))]
    PeerFailed {
        /// The rank that failed first.
        peer: usize,
        /// Its own error.
        reason: String,
    },

    /// Ranks called different collectives, or the same one with different arguments.
    #[error(
        "rank {rank_a} called {} where rank {rank_b} called {}, sequence {sequence}: \
         all ranks of a group must make the same calls in the same order{}",
        Printable(call_a),
        Printable(call_b),
        Uneven(call_a, call_b)
    )]
    Desync {
        /// The group's sequence number of the call.
        sequence: u64,
        /// One of the ranks.
        rank_a: usize,
        /// What it called.
        call_a: String,
        /// The other rank.
        rank_b: usize,
        /// What that one called.
        call_b: String,
    },

    /// A collective or a message was not over within the group's time-out.
    #[error(
        "rank {rank}: {}, sequence {sequence}, timed out after {timeout:?}: {}{}",
        Printable(call),
        Printable(reason),
        Uneven(if reason.contains("has not started") { call } else { "" }, "")
    )]
    TimedOut {
        /// The rank that gave up.
        rank: usize,
        /// What it was doing.
        call: String,
        /// The group's sequence number of it.
        sequence: u64,
        /// The group's time-out.
        timeout: Duration,
        /// The ranks because of which it did not end, where that is known.
        waiting_for: Vec<usize>,
        /// What these ranks were doing.
        reason: String,
    },
}

impl Failure {
    /// The variant's name.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::PeerGone { .. } => "PeerGone",
            Self::PeerLeft { .. } => "PeerLeft",
            Self::PeerFailed { .. } => "PeerFailed",
            Self::Desync { .. } => "Desync",
            Self::TimedOut { .. } => "TimedOut",
        }
    }
}
