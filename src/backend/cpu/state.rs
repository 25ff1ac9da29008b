//! What one rank remembers of its group: how far the calls have come, and who is not there any more.
use super::frame::{Answer, ShutdownNotice};
use super::gone::{self, Gone};
use crate::backend::call::Channel;
use crate::backend::progress::Progress;
use crate::error::Failure;
use std::collections::HashMap;
use std::ops::Range;

pub(super) struct State {
    pub(super) failure: Option<Failure>,
    /// No call has returned the failure.
    pub(super) untold: bool,
    pub(super) collectives: Progress,
    pub(super) peers: Vec<Peer>,
    /// Answers to the queries under way, by rank.
    pub(super) queries: HashMap<u64, Vec<Option<Answer>>>,
    pub(super) next_query: u64,
    /// The monitor should end.
    pub(super) over: bool,
}

#[derive(Default)]
pub(super) struct Peer {
    pub(super) sends: Progress,
    pub(super) recvs: Progress,
    /// It has left in good order.
    pub(super) shutdown_notice: Option<ShutdownNotice>,
    /// Its process has ended without that.
    pub(super) gone: Option<Gone>,
    /// It has read our last word.
    pub(super) acknowledged: bool,
    /// Its control connection is closed.
    pub(super) closed: bool,
}

impl State {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            failure: None,
            untold: false,
            collectives: Progress::default(),
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            queries: HashMap::new(),
            next_query: 0,
            over: false,
        }
    }

    pub(super) fn progress(&mut self, channel: Channel) -> &mut Progress {
        match channel {
            Channel::Collectives => &mut self.collectives,
            Channel::SendTo(peer) => &mut self.peers[peer].sends,
            Channel::RecvFrom(peer) => &mut self.peers[peer].recvs,
        }
    }

    pub(super) fn progress_of(&self, channel: Channel) -> &Progress {
        match channel {
            Channel::Collectives => &self.collectives,
            Channel::SendTo(peer) => &self.peers[peer].sends,
            Channel::RecvFrom(peer) => &self.peers[peer].recvs,
        }
    }

    /// The failure, for a caller.
    pub(super) fn tell(&mut self) -> Result<(), Failure> {
        self.untold = false;
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// A call that is being carried out: its channel and its sequence number.
    pub(super) fn running(&self) -> Option<(Channel, u64)> {
        let messages = (0..self.peers.len()).flat_map(|peer| [Channel::SendTo(peer), Channel::RecvFrom(peer)]);
        let mut all = std::iter::once(Channel::Collectives).chain(messages);
        all.find_map(|channel| Some((channel, self.progress_of(channel).running()?)))
    }

    /// The failure of call number `sequence` of `channel` of rank `rank` for want of a peer that left, or whose process
    /// ended, before it could take part in it.
    pub(super) fn missing(&self, rank: usize, channel: Channel, sequence: u64) -> Option<Failure> {
        self.concerned(channel).find_map(|peer| {
            self.left_before(peer, channel, sequence).or_else(|| {
                let gone =
                    self.peers[peer].gone.as_ref().filter(|gone| gone.missed(channel, sequence) == Some(true))?;
                Some(gone.failure(rank, peer, self.describe(channel, sequence)))
            })
        })
    }

    /// The ranks that take part in the calls of `channel`.
    fn concerned(&self, channel: Channel) -> Range<usize> {
        match channel {
            Channel::Collectives => 0..self.peers.len(),
            Channel::SendTo(peer) | Channel::RecvFrom(peer) => peer..peer + 1,
        }
    }

    fn left_before(&self, peer: usize, channel: Channel, sequence: u64) -> Option<Failure> {
        let shutdown_notice = self.peers[peer].shutdown_notice.as_ref()?;
        let left_after = match channel {
            Channel::Collectives => shutdown_notice.last,
            Channel::SendTo(_) => shutdown_notice.received,
            Channel::RecvFrom(_) => shutdown_notice.sent,
        };
        if left_after >= sequence {
            return None;
        }
        // Collectives in between were missed too; the first one is named.
        let sequence = if channel == Channel::Collectives { left_after + 1 } else { sequence };
        Some(Failure::PeerLeft { peer, left_after, call: self.name(channel, sequence), sequence })
    }

    /// The failure of call number `sequence` of `channel`, which rank `rank` begins, for want of a peer whose process has
    /// ended, and which would not have ended its part of the call without this rank's.
    pub(super) fn begun_in_vain(&self, rank: usize, channel: Channel, sequence: u64) -> Option<Failure> {
        let call = self.progress_of(channel).call_at(sequence)?;
        self.concerned(channel).find_map(|peer| {
            let gone = self.peers[peer].gone.as_ref().filter(|_| gone::needs(peer, &call, rank))?;
            Some(gone.failure(rank, peer, self.describe(channel, sequence)))
        })
    }

    /// Call number `sequence` of `channel`, for messages.
    fn name(&self, channel: Channel, sequence: u64) -> String {
        self.progress_of(channel).call_at(sequence).map_or_else(|| "a collective".into(), |call| call.to_string())
    }

    pub(super) fn describe(&self, channel: Channel, sequence: u64) -> String {
        format!("{}, sequence {sequence}", self.name(channel, sequence))
    }

    /// What is going on, for messages.
    pub(super) fn activity(&self) -> String {
        match (self.running(), self.collectives.current()) {
            (Some((channel, sequence)), _) => self.describe(channel, sequence),
            (None, 0) => "the time before the first collective".into(),
            (None, last) => format!("the time after {}", self.describe(Channel::Collectives, last)),
        }
    }
}
