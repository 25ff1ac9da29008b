//! What all threads of one rank know about their group: how far it is, who has left, and why it failed.
pub(super) use super::call::Channel;
use super::call::{Call, Header};
use super::control::Control;
use super::failure::Failure;
use super::frame::{Answer, Farewell, Frame};
use super::hosts::Hosts;
use super::lock;
use super::progress::Progress;
use super::shm::Room;
use super::storage::LockWaits;
use super::transport::Transport;
use crate::Error;
use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One group, as seen by one of its ranks.
pub(super) struct Group {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// How long a call may take.
    pub(super) timeout: Duration,
    /// Which ranks share memory.
    pub(super) hosts: Hosts,
    /// The memory that this rank shares with the others of its host, in place of data and direct connections.
    pub(super) room: Option<Room>,
    /// For collectives.
    pub(super) data: Transport,
    /// For `send` and `recv`, which must not wait for a collective.
    pub(super) direct: Transport,
    pub(super) control: Control,
    /// For the locks of tensors.
    pub(super) locks: LockWaits,
    state: Mutex<State>,
    /// A failure, an acknowledgement, an answer, or a closed connection.
    changed: Condvar,
}

struct State {
    failure: Option<Failure>,
    /// No call has returned the failure.
    untold: bool,
    collectives: Progress,
    peers: Vec<Peer>,
    /// Answers to the queries under way, by rank.
    queries: HashMap<u64, Vec<Option<Answer>>>,
    next_query: u64,
    /// The monitor should end.
    over: bool,
}

#[derive(Default)]
struct Peer {
    sends: Progress,
    recvs: Progress,
    /// It has left in good order.
    farewell: Option<Farewell>,
    /// It has read our last word.
    acknowledged: bool,
    /// Its control connection is closed.
    closed: bool,
}

impl State {
    fn progress(&mut self, channel: Channel) -> &mut Progress {
        match channel {
            Channel::Collectives => &mut self.collectives,
            Channel::SendTo(peer) => &mut self.peers[peer].sends,
            Channel::RecvFrom(peer) => &mut self.peers[peer].recvs,
        }
    }

    /// The failure, for a caller.
    fn tell(&mut self) -> Result<(), Failure> {
        self.untold = false;
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// A call that is being carried out: its progress and its sequence number.
    fn running(&self) -> Option<(&Progress, u64)> {
        let point_to_point = self.peers.iter().flat_map(|peer| [&peer.sends, &peer.recvs]);
        let mut all = std::iter::once(&self.collectives).chain(point_to_point);
        all.find_map(|progress| Some((progress, progress.running()?)))
    }

    /// A peer that left before it could take part in call number `sequence` of `channel`.
    fn missing(&self, channel: Channel, sequence: u64) -> Option<(usize, u64)> {
        let left_before = |peer: usize, last: fn(&Farewell) -> u64| {
            let last = last(self.peers[peer].farewell.as_ref()?);
            (last < sequence).then_some((peer, last))
        };
        match channel {
            Channel::Collectives => (0..self.peers.len()).find_map(|peer| left_before(peer, |farewell| farewell.last)),
            Channel::SendTo(peer) => left_before(peer, |farewell| farewell.received),
            Channel::RecvFrom(peer) => left_before(peer, |farewell| farewell.sent),
        }
    }

    /// The failure of call number `sequence` of `channel` for want of a peer that left.
    fn peer_left(&mut self, channel: Channel, sequence: u64) -> Option<Failure> {
        let (peer, left_after) = self.missing(channel, sequence)?;
        // Collectives in between were missed too; the first one is named.
        let sequence = if channel == Channel::Collectives { left_after + 1 } else { sequence };
        let call =
            self.progress(channel).call_at(sequence).map_or_else(|| "a collective".into(), |call| call.to_string());
        Some(Failure::PeerLeft { peer, left_after, call, sequence })
    }

    /// What is going on, for messages.
    fn activity(&self) -> String {
        let describe = |progress: &Progress, sequence| {
            let call = progress.call_at(sequence).map_or_else(|| "a collective".into(), |call| call.to_string());
            format!("{call}, sequence {sequence}")
        };
        let running = self.running().map(|(progress, sequence)| describe(progress, sequence));
        running.unwrap_or_else(|| match self.collectives.current() {
            0 => "the time before the first collective".into(),
            last => format!("the time after {}", describe(&self.collectives, last)),
        })
    }
}

impl Group {
    pub(super) fn new(
        rank: usize,
        world_size: usize,
        timeout: Duration,
        hosts: Hosts,
        room: Option<Room>,
        [data, direct]: [Transport; 2],
        control: Control,
    ) -> Self {
        let state = State {
            failure: None,
            untold: false,
            collectives: Progress::default(),
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            queries: HashMap::new(),
            next_query: 0,
            over: false,
        };
        let (state, changed, locks) = (Mutex::new(state), Condvar::new(), LockWaits::default());
        Self { rank, world_size, timeout, hosts, room, data, direct, control, locks, state, changed }
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world_size).filter(move |peer| *peer != rank)
    }

    /// Notes that `call` was started, unless the group has failed.
    pub(super) fn start(&self, channel: Channel, header: Header) -> Result<(), Failure> {
        let mut state = lock(&self.state);
        state.tell()?;
        state.progress(channel).start(header.sequence, header.call);
        Ok(())
    }

    /// Notes that a call is being carried out, unless the group has failed or a peer that is needed has left.
    pub(super) fn begin(&self, channel: Channel, sequence: u64) -> Result<(), Failure> {
        let mut state = lock(&self.state);
        state.tell()?;
        state.progress(channel).begin(sequence);
        if let Some(failure) = state.peer_left(channel, sequence) {
            drop(state);
            return Err(self.fail(failure));
        }
        Ok(())
    }

    /// Notes that the call that [began](Self::begin) is over.
    pub(super) fn finish(&self, channel: Channel) {
        lock(&self.state).progress(channel).finish();
    }

    pub(super) fn call_at(&self, channel: Channel, sequence: u64) -> Option<Call> {
        lock(&self.state).progress(channel).call_at(sequence)
    }

    /// Ends the group with `failure`, unless it has one already; returns the first one.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        let mut state = lock(&self.state);
        if let Some(first) = &state.failure {
            return first.clone();
        }
        log::debug!("rank {}: the group failed: {failure:?}", self.rank);
        // A call that is being carried out returns it, and this rank knows what it did itself.
        let is_own = matches!(failure, Failure::PeerFailed { peer, .. } if peer == self.rank);
        state.untold = !is_own && state.running().is_none();
        state.failure = Some(failure.clone());
        drop(state);
        self.changed.notify_all();
        // First the reason, then the end of the data: peers that see the latter wait for the former.
        let abort = Frame::Abort(failure.clone());
        self.peers().for_each(|peer| self.control.send(peer, &abort));
        self.locks.end();
        self.room.iter().for_each(Room::close);
        self.data.close();
        self.direct.close();
        failure
    }

    /// The failure behind a connection of `channel` to `peer` that closed. The monitor knows, or will in a moment.
    pub(super) fn fail_closed(&self, channel: Channel, peer: usize, reason: &str) -> Failure {
        /// Within this time the control connection has had its say; it closes with the data connection when a process
        /// ends.
        const PATIENCE: Duration = Duration::from_secs(3);
        let deadline = Instant::now() + PATIENCE;
        if let Some(failure) = self.wait_until(deadline, |state| state.failure.clone()) {
            return failure;
        }
        let failure = self.left_after_another(channel, &[peer]).unwrap_or_else(|| {
            let call = lock(&self.state).activity();
            Failure::PeerGone { rank: self.rank, peer, call: format!("{call} ({reason})") }
        });
        self.fail(failure)
    }

    /// The failure of the call that `channel` is carrying out when one of `peers`, of which it still wants something, has
    /// left: it made its calls, as many as this rank, but another one here.
    pub(super) fn left_after_another(&self, channel: Channel, peers: &[usize]) -> Option<Failure> {
        let mut state = lock(&self.state);
        let peer = *peers.iter().find(|peer| state.peers[**peer].farewell.is_some())?;
        let progress = state.progress(channel);
        let sequence = progress.current();
        let ours = progress.call_at(sequence)?;
        Some(Failure::Desync {
            sequence,
            rank_a: peer,
            call_a: "something else (it has left since)".into(),
            rank_b: self.rank,
            call_b: ours.to_string(),
        })
    }

    /// Why the group has ended, if it has.
    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.state).failure.clone()
    }

    /// Waits until `found` finds something in the state, at most until `deadline`.
    fn wait_until<T>(&self, deadline: Instant, mut found: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(result) = found(&mut state) {
                return Some(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Asks all peers where they are and what they called at `sequence`. By rank; `None` where no answer came in time.
    pub(super) fn query(&self, sequence: u64) -> Vec<Option<Answer>> {
        /// Monitors answer at once: who does not is stopped or out of reach.
        const PATIENCE: Duration = Duration::from_secs(1);
        let mut state = lock(&self.state);
        let id = state.next_query;
        state.next_query += 1;
        state.queries.insert(id, vec![None; self.world_size]);
        drop(state);
        self.peers().for_each(|peer| self.control.send(peer, &Frame::Query { id, sequence }));
        self.wait_until(Instant::now() + PATIENCE, |state| {
            let answers = state.queries.get(&id)?;
            let complete = self.peers().all(|peer| answers[peer].is_some() || state.peers[peer].closed);
            (complete || state.failure.is_some()).then_some(())
        });
        let mut state = lock(&self.state);
        let mut answers = state.queries.remove(&id).unwrap_or_default();
        for (answer, peer) in answers.iter_mut().zip(&state.peers) {
            // Who has left has said where it was.
            let left = peer.farewell.map(|farewell| Answer {
                current: farewell.last,
                current_call: None,
                asked_call: None,
                waits_for_lock: false,
            });
            *answer = answer.or(left);
        }
        answers
    }

    /// Says goodbye to all peers, or nothing when the group has failed and everybody knows. Returns once they have
    /// read it, or after a short while: closing earlier could make the system throw it away.
    pub(super) fn leave(&self) {
        const PATIENCE: Duration = Duration::from_secs(2);
        let mut state = lock(&self.state);
        let mut goodbyes = Vec::new();
        if state.failure.is_none() {
            let last = state.collectives.current();
            for peer in self.peers() {
                let Peer { sends, recvs, .. } = &mut state.peers[peer];
                let farewell = Farewell { last, sent: sends.current(), received: recvs.current() };
                goodbyes.push((peer, Frame::Goodbye(farewell)));
            }
        }
        drop(state);
        goodbyes.iter().for_each(|(peer, goodbye)| self.control.send(*peer, goodbye));
        self.wait_until(Instant::now() + PATIENCE, |state| {
            self.peers().all(|peer| state.peers[peer].acknowledged || state.peers[peer].closed).then_some(())
        });
        let state = lock(&self.state);
        match &state.failure {
            // After the last call, programs end in many ways.
            None | Some(Failure::PeerGone { .. }) => {}
            Some(failure) if state.untold => {
                let (rank, error) = (self.rank, Error::from(failure.clone()));
                log::warn!("rank {rank}: the group had failed when it left, and no call has said so: {error}");
            }
            Some(_) => {}
        }
    }

    /// Tells the monitor to end.
    pub(super) fn end_monitor(&self) {
        lock(&self.state).over = true;
        self.control.wake();
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).over
    }

    /// The monitor read `frame` from `peer`.
    pub(super) fn on_frame(&self, peer: usize, frame: Frame) {
        match frame {
            Frame::Abort(failure) => {
                self.fail(failure);
                self.control.send(peer, &Frame::Ack);
            }
            Frame::Goodbye(farewell) => {
                let mut state = lock(&self.state);
                state.peers[peer].farewell = Some(farewell);
                let mut concerned = vec![(Channel::Collectives, Some(state.collectives.current()))];
                // A message that was sent and never received hurts nobody.
                concerned.push((Channel::SendTo(peer), state.peers[peer].sends.running()));
                concerned.push((Channel::RecvFrom(peer), state.peers[peer].recvs.running()));
                let failure = concerned.into_iter().find_map(|(channel, sequence)| state.peer_left(channel, sequence?));
                drop(state);
                if let Some(failure) = failure {
                    self.fail(failure);
                }
                self.control.send(peer, &Frame::Ack);
            }
            Frame::Ack => {
                lock(&self.state).peers[peer].acknowledged = true;
                self.changed.notify_all();
            }
            Frame::Query { id, sequence } => {
                let mut state = lock(&self.state);
                let progress = state.progress(Channel::Collectives);
                let current = progress.current();
                let current_call = if current == 0 { None } else { progress.call_at(current) };
                let asked_call = progress.call_at(sequence);
                let answer = Answer { current, current_call, asked_call, waits_for_lock: self.locks.any() };
                drop(state);
                self.control.send(peer, &Frame::Answer { id, answer });
            }
            Frame::Answer { id, answer } => {
                if let Some(answers) = lock(&self.state).queries.get_mut(&id) {
                    answers[peer] = Some(answer);
                }
                self.changed.notify_all();
            }
        }
    }

    /// The control connection to `peer` closed, or broke, or made no sense.
    pub(super) fn on_closed(&self, peer: usize) {
        let mut state = lock(&self.state);
        state.peers[peer].closed = true;
        let in_good_order = state.peers[peer].farewell.is_some();
        let call = state.activity();
        drop(state);
        if !in_good_order {
            self.fail(Failure::PeerGone { rank: self.rank, peer, call });
        }
        self.changed.notify_all();
    }
}
