//! Why a group of ranks failed.
use super::text::{Parted, Places, Uneven};
use candle_ddp_base::text::Printable;
use candle_ddp_base::wire::cut;
use serde::{Deserialize, Serialize, Serializer};
use std::time::Duration;

/// Why a group failed: the first cause. Every rank gets it, now and from every later call.
///
/// Ranks are numbered as in the group. Where they have other numbers in the group of all ranks, the text names the group.
///
/// To continue without the lost rank, or with a replacement, make a new group, as `candle_ddp::elastic::run` does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A peer's process ended while this rank still needed data from it.
    #[error(
        "rank {peer} is gone: its connection to rank {rank} closed during {}. Look for the first error in the output \
         of rank {peer}; if there is none, it ended early or was killed, often for lack of memory",
        Printable(call)
    )]
    PeerGone {
        /// The rank that noticed.
        rank: usize,
        /// The rank whose process ended.
        peer: usize,
        /// What the rank that noticed was doing.
        #[serde(serialize_with = "cut_text")]
        call: String,
    },

    /// A peer left the group in good order, although a collective or a message still needed it.
    #[error(
        "rank {peer} left the group after sequence {left_after}, so it cannot take part in {}, sequence {sequence}: \
         if rank {peer} failed, its output has the reason; otherwise, all ranks of the group must make the same number \
         of calls{}",
        Printable(call),
        Uneven(call, "")
    )]
    PeerLeft {
        /// The rank that left.
        peer: usize,
        /// Its last collective, or message of this kind.
        left_after: u64,
        /// The call that needs it.
        #[serde(serialize_with = "cut_text")]
        call: String,
        /// That call's sequence number.
        sequence: u64,
    },

    /// A rank, this one or another, failed with an error that ends the group.
    #[error("rank {peer} ended the group: {}", Printable(reason))]
    PeerFailed {
        /// The rank that failed first.
        peer: usize,
        /// Its error.
        #[serde(serialize_with = "cut_text")]
        reason: String,
    },

    /// Ranks called different collectives, or the same one with different arguments. Or they wait for each other in calls of different
    /// groups: then all groups of the job fail, and the ranks are numbered as in the group of all ranks.
    #[error("{}{}", Parted(*sequence, (*rank_a, call_a), (*rank_b, call_b)), Places(places))]
    Desync {
        /// The group's sequence number of the call; 0 for calls of different groups.
        sequence: u64,
        /// One of the ranks.
        rank_a: usize,
        /// Its call.
        #[serde(serialize_with = "cut_text")]
        call_a: String,
        /// The other rank.
        rank_b: usize,
        /// The other rank's call.
        #[serde(serialize_with = "cut_text")]
        call_b: String,
        /// The ranks whose place in the program is known, each with the file, the line and the column of its call.
        #[serde(default)]
        places: Vec<(usize, String)>,
    },

    /// A collective or a message did not complete within the group's time-out.
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
        #[serde(serialize_with = "cut_text")]
        call: String,
        /// The call's sequence number in the group.
        sequence: u64,
        /// The group's time-out.
        timeout: Duration,
        /// The ranks that it still waited for, if known.
        waiting_for: Vec<usize>,
        /// What these ranks were doing.
        #[serde(serialize_with = "cut_text")]
        reason: String,
    },
}

#[doc(hidden)]
impl Failure {
    /// The same failure with the ranks' numbers in another group; `None` if that group does not have all these ranks.
    pub fn renumbered(&self, number: impl Fn(usize) -> Option<usize>) -> Option<Self> {
        let mut failure = self.clone();
        let renumber = |rank: &mut usize| number(*rank).map(|number| *rank = number);
        match &mut failure {
            Self::PeerGone { rank, peer, .. } => renumber(rank).and(renumber(peer))?,
            Self::PeerLeft { peer, .. } | Self::PeerFailed { peer, .. } => renumber(peer)?,
            Self::Desync { sequence: 0, .. } => {}
            Self::Desync { rank_a, rank_b, places, .. } => {
                places.iter_mut().try_for_each(|(rank, _)| renumber(rank))?;
                renumber(rank_a).and(renumber(rank_b))?;
            }
            Self::TimedOut { rank, waiting_for, .. } => {
                waiting_for.iter_mut().try_for_each(renumber)?;
                renumber(rank)?;
            }
        }
        Some(failure)
    }

    /// The same failure, whose message names the group, `[2, 3]`, in which the ranks have their numbers.
    #[must_use]
    pub fn within(mut self, ranks: &[usize]) -> Self {
        let place = format!(" in the group of ranks {}", candle_ddp_base::text::ranks(ranks));
        let add = |text: &mut String| {
            if !text.contains(&place) {
                text.push_str(&place);
            }
        };
        match &mut self {
            Self::Desync { sequence: 0, .. } => {}
            Self::Desync { call_a, call_b, .. } => [call_a, call_b].into_iter().for_each(add),
            Self::PeerGone { call, .. } | Self::PeerLeft { call, .. } | Self::TimedOut { call, .. } => add(call),
            Self::PeerFailed { reason, .. } => add(reason),
        }
        self
    }

    /// Whether ranks wait for each other in different groups.
    pub fn spans_groups(&self) -> bool {
        matches!(self, Self::Desync { sequence: 0, .. })
    }

    /// The variant's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::PeerGone { .. } => "PeerGone",
            Self::PeerLeft { .. } => "PeerLeft",
            Self::PeerFailed { .. } => "PeerFailed",
            Self::Desync { .. } => "Desync",
            Self::TimedOut { .. } => "TimedOut",
        }
    }

    /// The rank of the group that caused it, if known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::PeerGone { peer, .. } | Self::PeerLeft { peer, .. } | Self::PeerFailed { peer, .. } => Some(*peer),
            Self::TimedOut { waiting_for, .. } => waiting_for.first().copied(),
            // Either of the two may be right.
            Self::Desync { .. } => None,
        }
    }
}

/// Cuts long text, since other ranks get only its beginning.
fn cut_text<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::{decode, encode};

    #[test]
    fn every_failure_can_be_encoded_and_decoded() {
        let call = || "all_reduce(f32[3])".to_string();
        for failure in [
            Failure::PeerGone { rank: 1, peer: 2, call: call() },
            Failure::PeerLeft { peer: 3, left_after: 9, call: call(), sequence: 10 },
            Failure::PeerFailed { peer: 4, reason: "Grüße".repeat(3) },
            Failure::Desync {
                sequence: 1 << 33,
                rank_a: 1,
                call_a: call(),
                rank_b: 0,
                call_b: call(),
                places: vec![(1, "src/main.rs:41:9".to_string())],
            },
            Failure::TimedOut {
                rank: 0,
                call: call(),
                sequence: 2,
                timeout: Duration::from_millis(1500),
                waiting_for: vec![3, 1],
                reason: call(),
            },
        ] {
            assert_eq!(decode::<Failure>("", &encode(&failure)).unwrap(), failure);
        }
    }

    #[test]
    fn ranks_get_the_numbers_of_another_group() {
        let members = [5, 2, 7];
        let call = || "barrier()".to_string();
        let timed_out = |rank: usize, waiting_for: &[usize]| Failure::TimedOut {
            rank,
            call: call(),
            sequence: 2,
            timeout: Duration::from_secs(1),
            waiting_for: waiting_for.to_vec(),
            reason: call(),
        };
        let desync = |rank_a, rank_b| Failure::Desync {
            sequence: 1,
            rank_a,
            call_a: call(),
            rank_b,
            call_b: "gather".to_string(),
            places: vec![(rank_b, "src/main.rs:41:9".to_string())],
        };
        for (inside, outside) in [
            (
                Failure::PeerGone { rank: 1, peer: 2, call: call() },
                Failure::PeerGone { rank: 2, peer: 7, call: call() },
            ),
            (
                Failure::PeerLeft { peer: 0, left_after: 9, call: call(), sequence: 10 },
                Failure::PeerLeft { peer: 5, left_after: 9, call: call(), sequence: 10 },
            ),
            (Failure::PeerFailed { peer: 1, reason: call() }, Failure::PeerFailed { peer: 2, reason: call() }),
            (desync(1, 2), desync(2, 7)),
            (timed_out(2, &[0, 1]), timed_out(7, &[5, 2])),
        ] {
            assert_eq!(inside.renumbered(|rank| members.get(rank).copied()).unwrap(), outside);
            let place = |rank: usize| members.iter().position(|member| *member == rank);
            assert_eq!(outside.renumbered(place).unwrap(), inside);
            assert_eq!(outside.renumbered(|rank| place(rank).filter(|_| rank == 7)), None);
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let failure = Failure::PeerFailed { peer: 0, reason: "é".repeat(20_000) + "x" };
        let Failure::PeerFailed { reason, .. } = decode("", &encode(&failure)).unwrap() else { panic!() };
        assert_eq!(reason, "é".repeat(8192));
    }
}
