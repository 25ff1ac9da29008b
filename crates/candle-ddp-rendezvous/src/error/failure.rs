//! Why a group of ranks failed.
use super::text::{Printable, Uneven};
use crate::wire::{Reader, Writer};
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
    #[doc(hidden)]
    pub fn name(&self) -> &'static str {
        match self {
            Self::PeerGone { .. } => "PeerGone",
            Self::PeerLeft { .. } => "PeerLeft",
            Self::PeerFailed { .. } => "PeerFailed",
            Self::Desync { .. } => "Desync",
            Self::TimedOut { .. } => "TimedOut",
        }
    }
}

impl Failure {
    #[doc(hidden)]
    pub fn encode(&self, writer: &mut Writer) {
        match self {
            Self::PeerGone { rank, peer, call } => {
                writer.u8(0).u32(*rank as u32).u32(*peer as u32).text(call);
            }
            Self::PeerLeft { peer, left_after, call, sequence } => {
                writer.u8(1).u32(*peer as u32).u64(*left_after).text(call).u64(*sequence);
            }
            Self::PeerFailed { peer, reason } => {
                writer.u8(2).u32(*peer as u32).text(reason);
            }
            Self::Desync { sequence, rank_a, call_a, rank_b, call_b } => {
                writer.u8(3).u64(*sequence).u32(*rank_a as u32).text(call_a).u32(*rank_b as u32).text(call_b);
            }
            Self::TimedOut { rank, call, sequence, timeout, waiting_for, reason } => {
                let milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                writer.u8(4).u32(*rank as u32).text(call).u64(*sequence).u64(milliseconds).text(reason);
                writer.ranks(waiting_for);
            }
        }
    }

    #[doc(hidden)]
    pub fn decode(reader: &mut Reader) -> Option<Self> {
        Some(match reader.u8()? {
            0 => Self::PeerGone { rank: reader.rank()?, peer: reader.rank()?, call: reader.text()? },
            1 => Self::PeerLeft {
                peer: reader.rank()?,
                left_after: reader.u64()?,
                call: reader.text()?,
                sequence: reader.u64()?,
            },
            2 => Self::PeerFailed { peer: reader.rank()?, reason: reader.text()? },
            3 => Self::Desync {
                sequence: reader.u64()?,
                rank_a: reader.rank()?,
                call_a: reader.text()?,
                rank_b: reader.rank()?,
                call_b: reader.text()?,
            },
            4 => Self::TimedOut {
                rank: reader.rank()?,
                call: reader.text()?,
                sequence: reader.u64()?,
                timeout: Duration::from_millis(reader.u64()?),
                reason: reader.text()?,
                waiting_for: reader.ranks()?,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_can_be_encoded_and_decoded() {
        let call = || "all_reduce(f32[3])".to_string();
        for failure in [
            Failure::PeerGone { rank: 1, peer: 2, call: call() },
            Failure::PeerLeft { peer: 3, left_after: 9, call: call(), sequence: 10 },
            Failure::PeerFailed { peer: 4, reason: "Grüße".repeat(3) },
            Failure::Desync { sequence: 1 << 33, rank_a: 1, call_a: call(), rank_b: 0, call_b: call() },
            Failure::TimedOut {
                rank: 0,
                call: call(),
                sequence: 2,
                timeout: Duration::from_millis(1500),
                waiting_for: vec![3, 1],
                reason: call(),
            },
        ] {
            let mut writer = Writer::default();
            failure.encode(&mut writer);
            assert_eq!(Failure::decode(&mut Reader(&writer.0)), Some(failure));
            for cut in 0..writer.0.len() {
                assert_eq!(Failure::decode(&mut Reader(&writer.0[..cut])), None, "cut at {cut}");
            }
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let failure = Failure::PeerFailed { peer: 0, reason: "é".repeat(20_000) + "x" };
        let mut writer = Writer::default();
        failure.encode(&mut writer);
        let Some(Failure::PeerFailed { reason, .. }) = Failure::decode(&mut Reader(&writer.0)) else { panic!() };
        assert_eq!(reason, "é".repeat(8192));
    }
}
