//! Peers whose control connection ended without a goodbye.
//!
//! Data that such a peer has sent still counts: bytes in a socket and slots in shared memory outlive the process that
//! wrote them. So its end fails only calls that need more from it.
use crate::call::{Call, Channel};
use crate::error::Failure;
use crate::failure::CallCounts;
use crate::operation::Flow;
use std::io::{Error, ErrorKind};

/// The facts about a rank of another host that no longer takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has left in good order, after this collective.
    Left(u64),
    /// Its process has ended without a goodbye: after this collective, if known.
    Gone(Option<u64>),
}

impl Fate {
    /// Its number, which is not zero, and the collective.
    pub(crate) fn encode(self) -> (u8, u64) {
        match self {
            Self::Left(last) => (1, last),
            Self::Gone(Some(last)) => (2, last),
            Self::Gone(None) => (3, 0),
        }
    }

    pub(crate) fn decode(number: u8, last: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Left(last)),
            2 => Some(Self::Gone(Some(last))),
            3 => Some(Self::Gone(None)),
            _ => None,
        }
    }
}

/// A message about a rank of another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) rank: usize,
    pub(crate) fate: Fate,
    /// The rank that has noticed it by itself.
    pub(crate) witness: usize,
}

/// How a control connection ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The peer's system closed it: its process is gone.
    Closed,
    /// An error of the connection.
    Broken(Error),
    /// The peer sent bytes that are not a frame.
    Malformed,
}

impl Ended {
    /// The failure of a group that lost the connection to `peer` although the peer's process may still be running;
    /// `None` if that process has ended. `hosts` names the addresses of the connection.
    pub(crate) fn lost(&self, rank: usize, peer: usize, hosts: &str, call: &str) -> Option<Failure> {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        let reason = match self {
            Self::Closed => return None,
            // The system resets the connections of a process that ended with unread data.
            Self::Broken(error) if matches!(error.kind(), ConnectionReset | ConnectionAborted | BrokenPipe) => {
                return None;
            }
            Self::Broken(error) => lost(peer, hosts, call, &error.to_string()),
            Self::Malformed => {
                format!(
                    "rank {peer} sent it something that is not a message of this engine, during {call}: run the same \
                     candle-ddp on all ranks, and look for a proxy or a faulty network between the two"
                )
            }
        };
        Some(Failure::PeerFailed { peer: rank, reason })
    }
}

/// The text for a lost connection to `peer`, although its process may not have ended.
pub(crate) fn lost(peer: usize, hosts: &str, call: &str, error: &str) -> String {
    format!(
        "its connection to rank {peer} ({hosts}) was lost during {call}: {error}. Either the network \
         between the two failed, or the host of rank {peer}: check both"
    )
}

/// A peer whose process has ended.
pub(crate) struct Gone {
    /// The number of calls that it finished, counting the one with number 0. Known only for ranks of this host, from shared
    /// memory.
    finished: Option<CallCounts>,
    /// The system's error, if the connection did not simply end.
    error: Option<String>,
    /// The rank that has noticed it, if this rank was told.
    witness: Option<usize>,
}

impl Gone {
    pub(crate) fn new(ended: Ended, finished: Option<CallCounts>) -> Self {
        let error = if let Ended::Broken(error) = ended { Some(error.to_string()) } else { None };
        Self { finished, error, witness: None }
    }

    /// One of whose end `witness` has told.
    pub(crate) fn told_by(witness: usize, finished: Option<CallCounts>) -> Self {
        Self { finished, error: None, witness: Some(witness) }
    }

    pub(crate) fn witness(&self) -> Option<usize> {
        self.witness
    }

    /// Whether it ended before it had finished call number `sequence`; `None` if unknown. Then the call itself notices,
    /// at the end of the peer's data.
    pub(crate) fn missed(&self, channel: Channel, sequence: u64) -> Option<bool> {
        Some(self.finished?.matching(channel) <= sequence)
    }

    /// Its last collective, if known.
    pub(crate) fn last(&self) -> Option<u64> {
        self.finished.map(|finished| finished.collectives.saturating_sub(1))
    }

    /// The failure of `call`, for which rank `rank` needs `peer`.
    pub(crate) fn failure(&self, rank: usize, peer: usize, call: String) -> Failure {
        let call = match &self.error {
            Some(error) => format!("{call} ({error})"),
            None => call,
        };
        Failure::PeerGone { rank: self.witness.unwrap_or(rank), peer, call }
    }
}

/// Whether `peer` cannot finish `call` before rank `rank` has begun it.
pub(crate) fn needs(peer: usize, call: &Call, rank: usize) -> bool {
    match call.operation.flow() {
        Flow::FromRoot => call.root == Some(rank),
        Flow::ToRoot => call.root == Some(peer),
        Flow::FromPeer => false,
        Flow::ToPeer | Flow::Everywhere => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_is_lost_is_not_the_end_of_a_process() {
        let lost = |ended: &Ended| {
            let failure = ended.lost(0, 2, "from 10.0.0.1 to 10.0.0.3", "barrier(), sequence 4")?;
            Some(crate::Error::from(failure).to_string())
        };
        let broken = |error: rustix::io::Errno| Ended::Broken(error.into());
        assert_eq!(lost(&Ended::Closed), None);
        assert_eq!(lost(&broken(rustix::io::Errno::CONNRESET)), None);
        for (error, words) in [
            (rustix::io::Errno::TIMEDOUT, "Connection timed out"),
            (rustix::io::Errno::HOSTUNREACH, "No route to host"),
        ] {
            let text = lost(&broken(error)).unwrap();
            let begin = "rank 0 ended the group: its connection to rank 2 (from 10.0.0.1 to 10.0.0.3) was lost during \
                         barrier(), sequence 4: ";
            assert!(text.starts_with(begin) && text.contains(words), "{text}");
            let end = "Either the network between the two failed, or the host of rank 2: check both";
            assert!(text.ends_with(end), "{text}");
        }
        assert!(lost(&Ended::Malformed).unwrap().contains("rank 2 sent it something that is not a message"));
    }

    #[test]
    fn what_a_rank_that_is_gone_has_finished_is_not_missed() {
        let finished = CallCounts { collectives: 5, sent: 3, received: 0 };
        let gone = Gone::new(Ended::Closed, Some(finished));
        assert_eq!(gone.last(), Some(4));
        assert_eq!([4, 5].map(|sequence| gone.missed(Channel::Collectives, sequence)), [Some(false), Some(true)]);
        assert_eq!([2, 3].map(|sequence| gone.missed(Channel::RecvFrom(1), sequence)), [Some(false), Some(true)]);
        assert_eq!(gone.missed(Channel::SendTo(1), 1), Some(true));
        assert_eq!(Gone::new(Ended::Closed, None).missed(Channel::Collectives, 1), None);
    }
}
