//! Why a group ended, and how the cause is found.
//!
//! Both engines collect the same facts: what every rank has called ([`ProgressReport`]), and which ranks do not answer.
//! The CPU engine does so over its control connections, the NCCL engine through the store. One pure function,
//! [`diagnose`], finds the cause from these facts.
mod diagnose;
mod history;
mod report;

pub(crate) use diagnose::{ExpiredCall, RankState, desync, diagnose, left_before, left_since};
pub(crate) use history::CallHistory;
pub(crate) use report::{CallCounts, ProgressReport};

use crate::backend::wire::{Reader, Writer};
use crate::error::Failure;
use std::time::Duration;

impl Failure {
    pub(crate) fn encode(&self, writer: &mut Writer) {
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

    pub(crate) fn decode(reader: &mut Reader) -> Option<Self> {
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
