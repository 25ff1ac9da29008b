//! The state of a group on one rank: the progress of its calls, and which peers have left or ended.
use crate::call::Channel;
use crate::error::Failure;
use crate::failure::{CallCounts, CallHistory, ProgressReport, RankState, left_before};
use crate::flight_recorder::CallRecord;
use crate::gone::{self, Fate, Gone, News};
use crate::question::Question;
use crate::standing::Thread;
use crate::tcp::frame::Frame;
use crate::tcp::handshake::Kind;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

pub(crate) struct State {
    pub(crate) failure: Option<Failure>,
    /// Whether no call has returned the failure yet.
    pub(crate) untold: bool,
    pub(crate) collectives: CallHistory,
    pub(crate) peers: Vec<Peer>,
    /// The threads that have made calls.
    pub(crate) callers: Vec<Arc<Thread>>,
    /// The open queries.
    pub(crate) queries: HashMap<u64, Query>,
    pub(crate) next_query: u64,
    /// The queries of ranks of other hosts that other ranks of this host answer.
    pub(crate) relays: Vec<Relay>,
    /// Whether this rank has said goodbye.
    pub(crate) leaving: bool,
    /// The connections that the monitor should make.
    pub(crate) wanted: Vec<(usize, Kind)>,
    /// Messages about ranks of other hosts that this rank has not looked into yet.
    pub(crate) heard: Vec<News>,
    /// Whether there are connections that peers may take for made, and that this rank has not taken yet.
    pub(crate) is_connecting: bool,
    /// Whether the monitor should end.
    pub(crate) over: bool,
}

/// A question to all peers.
pub(crate) struct Query {
    pub(crate) question: Question,
    /// Its number on the board of this host, if there is one.
    pub(crate) asked: Option<u32>,
    /// By rank.
    pub(crate) answers: Vec<Option<Vec<u8>>>,
}

/// A query of a rank of another host, whose proxy this rank is.
pub(crate) struct Relay {
    pub(crate) peer: usize,
    pub(crate) id: u64,
    pub(crate) question: Question,
    /// Its number on the board of this host.
    pub(crate) asked: u32,
    /// The ranks that have not answered yet, with their numbers here.
    pub(crate) missing: Vec<(usize, usize)>,
    /// By then, the rank that has asked does not wait any more.
    pub(crate) until: Instant,
}

#[derive(Default)]
pub(crate) struct Peer {
    pub(crate) sends: CallHistory,
    pub(crate) recvs: CallHistory,
    /// The peer has left in good order, after this many calls.
    pub(crate) left: Option<CallCounts>,
    /// The peer's process has ended without a goodbye.
    pub(crate) gone: Option<Gone>,
    /// The peer has read this rank's goodbye or abort.
    pub(crate) acknowledged: bool,
    /// The peer sends nothing more: it has left, or its control connection or its process has ended.
    pub(crate) closed: bool,
    /// The reason why there can be no connection to the peer.
    pub(crate) unreachable: Option<String>,
    /// Nobody listens at its address any more: its process has ended, or it has left.
    pub(crate) refuses: bool,
    /// Its system has accepted a call of this rank.
    pub(crate) answers_calls: bool,
}

impl State {
    /// `recorded` is the number of calls of each channel that the flight recorder wants.
    pub(crate) fn new(world_size: usize, recorded: usize) -> Self {
        let history = || CallHistory::new(recorded);
        Self {
            failure: None,
            untold: false,
            collectives: history(),
            peers: (0..world_size).map(|_| Peer { sends: history(), recvs: history(), ..Peer::default() }).collect(),
            callers: Vec::new(),
            queries: HashMap::new(),
            next_query: 0,
            relays: Vec::new(),
            leaving: false,
            wanted: Vec::new(),
            heard: Vec::new(),
            is_connecting: false,
            over: false,
        }
    }

    pub(crate) fn history_mut(&mut self, channel: Channel) -> &mut CallHistory {
        match channel {
            Channel::Collectives => &mut self.collectives,
            Channel::SendTo(peer) => &mut self.peers[peer].sends,
            Channel::RecvFrom(peer) => &mut self.peers[peer].recvs,
        }
    }

    pub(crate) fn history(&self, channel: Channel) -> &CallHistory {
        match channel {
            Channel::Collectives => &self.collectives,
            Channel::SendTo(peer) => &self.peers[peer].sends,
            Channel::RecvFrom(peer) => &self.peers[peer].recvs,
        }
    }

    /// All channels.
    pub(crate) fn channels(&self) -> impl Iterator<Item = Channel> + use<> {
        let messages = (0..self.peers.len()).flat_map(|peer| [Channel::SendTo(peer), Channel::RecvFrom(peer)]);
        std::iter::once(Channel::Collectives).chain(messages)
    }

    /// Returns all calls that are remembered.
    pub(crate) fn records(&self) -> Vec<CallRecord> {
        self.channels().flat_map(|channel| self.history(channel).records(channel)).collect()
    }

    /// The channel and the sequence number of a running call.
    pub(crate) fn running(&self) -> Option<(Channel, u64)> {
        self.channels().find_map(|channel| Some((channel, self.history(channel).running()?)))
    }

    /// The failure of rank `rank`'s call number `sequence` on `channel` if a peer left, or its process ended, before it
    /// took part in that call.
    pub(crate) fn missing(&self, rank: usize, channel: Channel, sequence: u64) -> Option<Failure> {
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
        let counts = self.peers[peer].left?;
        // The peer missed all collectives after its last one; the failure names the first of them.
        let sequence = match channel {
            Channel::Collectives => sequence.min(counts.collectives + 1),
            Channel::SendTo(_) | Channel::RecvFrom(_) => sequence,
        };
        left_before(peer, counts, channel, sequence, || self.name(channel, sequence))
    }

    /// The failure of call number `sequence` on `channel`, which rank `rank` is beginning, if a peer's process has
    /// ended that could not have finished its part of the call before this rank's.
    pub(crate) fn begun_in_vain(&self, rank: usize, channel: Channel, sequence: u64) -> Option<Failure> {
        let call = self.history(channel).call_at(sequence)?;
        self.concerned(channel).find_map(|peer| {
            let gone = self.peers[peer].gone.as_ref().filter(|_| gone::needs(peer, &call, rank))?;
            Some(gone.failure(rank, peer, self.describe(channel, sequence)))
        })
    }

    /// The text of call number `sequence` on `channel`.
    fn name(&self, channel: Channel, sequence: u64) -> String {
        self.history(channel).call_at(sequence).map_or_else(|| "a collective".into(), |call| call.to_string())
    }

    pub(crate) fn describe(&self, channel: Channel, sequence: u64) -> String {
        format!("{}, sequence {sequence}", self.name(channel, sequence))
    }

    /// How `peer` has left or ended, if it has, as far as rank `rank` knows.
    pub(crate) fn news(&self, rank: usize, peer: usize) -> Option<News> {
        let Peer { left, gone, .. } = &self.peers[peer];
        let left = left.map(|counts| Fate::Left(counts.collectives));
        let fate = left.or_else(|| Some(Fate::Gone(gone.as_ref()?.last())))?;
        Some(News { rank: peer, fate, witness: gone.as_ref().and_then(Gone::witness).unwrap_or(rank) })
    }

    /// This rank's message to `peer` when it leaves in good order.
    pub(crate) fn goodbye(&self, peer: usize) -> Frame {
        let (collectives, Peer { sends, recvs, .. }) = (self.collectives.begun(), &self.peers[peer]);
        Frame::Goodbye(CallCounts { collectives, sent: sends.begun(), received: recvs.begun() })
    }

    /// The state of `peer` when a call has expired, given its answer to a query. `is_asked` if the query, or a call for it, has
    /// reached its host.
    pub(crate) fn rank_state(&self, peer: usize, answer: Option<ProgressReport>, is_asked: bool) -> RankState {
        match (answer, &self.peers[peer]) {
            (Some(report), _) => RankState::Running(report),
            (None, Peer { left: Some(_), .. }) => RankState::Left,
            (None, Peer { gone: Some(gone), .. }) => RankState::Ended(gone.last()),
            (None, _) if is_asked => RankState::Silent,
            (None, _) => RankState::Unknown,
        }
    }

    /// Describes what this rank is doing.
    pub(crate) fn activity(&self) -> String {
        match (self.running(), self.collectives.begun()) {
            (Some((channel, sequence)), _) => self.describe(channel, sequence),
            (None, 0) => "the time before the first collective".into(),
            (None, last) => format!("the time after {}", self.describe(Channel::Collectives, last)),
        }
    }
}
