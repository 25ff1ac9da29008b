//! What all threads of one rank know about their group: how far it is, who has left, and why it failed.
use super::control::Control;
use super::frame::{Answer, Frame, ShutdownNotice};
use super::gone::{self, Ended, Finished, Gone};
use super::hosts::Hosts;
use super::lock;
use super::shm::{ShmGroup, Sleeper};
use super::state::{Peer, State};
use super::storage::LockWaits;
use super::transport::Transport;
use crate::Error;
pub(super) use crate::backend::call::Channel;
use crate::backend::call::{Call, Header};
use crate::backend::progress::Progress;
use crate::error::Failure;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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
    pub(super) shm: Option<ShmGroup>,
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

impl Group {
    pub(super) fn new(
        rank: usize,
        world_size: usize,
        timeout: Duration,
        hosts: Hosts,
        shm: Option<ShmGroup>,
        [data, direct]: [Transport; 2],
        control: Control,
    ) -> Self {
        let (state, changed, locks) = (Mutex::new(State::new(world_size)), Condvar::new(), LockWaits::default());
        Self { rank, world_size, timeout, hosts, shm, data, direct, control, locks, state, changed }
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

    /// Notes that a call is being carried out, unless the group has failed or a peer that is needed is not there any more.
    pub(super) fn begin(&self, channel: Channel, sequence: u64) -> Result<(), Failure> {
        let mut state = lock(&self.state);
        state.tell()?;
        state.progress(channel).begin(sequence);
        let missing = state.missing(self.rank, channel, sequence);
        if let Some(failure) = missing.or_else(|| state.begun_in_vain(self.rank, channel, sequence)) {
            drop(state);
            return Err(self.fail(failure));
        }
        Ok(())
    }

    /// Notes that the call that [began](Self::begin) is over, and whether it went well.
    pub(super) fn finish(&self, channel: Channel, sequence: u64, well: bool) {
        if well && let Some((shm, kind)) = self.kind(channel) {
            shm.set_finished(kind, sequence);
        }
        lock(&self.state).progress(channel).finish();
    }

    /// What `channel` is in the memory that this rank shares with others; `None` for messages to other hosts.
    fn kind(&self, channel: Channel) -> Option<(&ShmGroup, Sleeper)> {
        let kind = match channel {
            Channel::Collectives => Sleeper::Collectives,
            Channel::SendTo(peer) => Sleeper::SendTo(self.hosts.member(peer)?),
            Channel::RecvFrom(peer) => Sleeper::RecvFrom(self.hosts.member(peer)?),
        };
        Some((self.shm.as_ref()?, kind))
    }

    /// How far `peer`, whose process is gone, came with what concerns this rank, if it is of this host.
    fn finished_by(&self, peer: usize, state: &State) -> Option<Finished> {
        let (shm, member, own) = (self.shm.as_ref()?, self.hosts.member(peer)?, self.hosts.index());
        let count = |kind, near: &Progress| shm.finished_by(member, kind, near.current());
        Some(Finished {
            collectives: count(Sleeper::Collectives, &state.collectives),
            sent: count(Sleeper::SendTo(own), &state.peers[peer].recvs),
            received: count(Sleeper::RecvFrom(own), &state.peers[peer].sends),
        })
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
        self.shm.iter().for_each(ShmGroup::close);
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
        let known = self.wait_until(deadline, |state| {
            let call = || state.describe(channel, state.progress_of(channel).current());
            let gone = || state.peers[peer].gone.as_ref().map(|gone| gone.failure(self.rank, peer, call()));
            let failure = state.failure.clone().or_else(gone);
            // What a peer said before it closed the connection has been read by now.
            (failure.is_some() || state.peers[peer].closed).then_some(failure)
        });
        let failure = known.flatten().or_else(|| self.left_after_another(channel, &[peer])).unwrap_or_else(|| {
            let call = lock(&self.state).activity();
            let reason = gone::lost(peer, self.control.hosts(peer), &call, reason);
            Failure::PeerFailed { peer: self.rank, reason }
        });
        self.fail(failure)
    }

    /// The failure of the call that `channel` is carrying out when one of `peers`, of which it still wants something, has
    /// left: it made its calls, as many as this rank, but another one here.
    pub(super) fn left_after_another(&self, channel: Channel, peers: &[usize]) -> Option<Failure> {
        let mut state = lock(&self.state);
        let peer = *peers.iter().find(|peer| state.peers[**peer].shutdown_notice.is_some())?;
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

    /// Why the group has ended, if it has, or why no more calls of all its ranks can succeed.
    pub(super) fn failure(&self) -> Option<Failure> {
        let state = lock(&self.state);
        let gone =
            |(peer, known): (usize, &Peer)| Some(known.gone.as_ref()?.failure(self.rank, peer, state.activity()));
        state.failure.clone().or_else(|| state.peers.iter().enumerate().find_map(gone))
    }

    /// Whether the process of `peer` has ended without a goodbye.
    pub(super) fn is_gone(&self, peer: usize) -> bool {
        lock(&self.state).peers[peer].gone.is_some()
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
            // Who has left has said where it was, and the memory of a process that is gone may say it.
            let last = peer.shutdown_notice.map(|shutdown_notice| shutdown_notice.last);
            let last = last.or_else(|| peer.gone.as_ref().and_then(Gone::last));
            let left =
                last.map(|current| Answer { current, current_call: None, asked_call: None, waits_for_lock: false });
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
                let shutdown_notice = ShutdownNotice { last, sent: sends.current(), received: recvs.current() };
                goodbyes.push((peer, Frame::Goodbye(shutdown_notice)));
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
            Frame::Goodbye(shutdown_notice) => {
                let mut state = lock(&self.state);
                state.peers[peer].shutdown_notice = Some(shutdown_notice);
                self.fail_if_needed(state, peer);
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

    /// Ends the group if something is under way for which `peer`, which is not there any more, is needed.
    fn fail_if_needed(&self, state: MutexGuard<State>, peer: usize) {
        let mut concerned = vec![(Channel::Collectives, Some(state.collectives.current()))];
        // A message that was sent and never received hurts nobody.
        concerned.push((Channel::SendTo(peer), state.peers[peer].sends.running()));
        concerned.push((Channel::RecvFrom(peer), state.peers[peer].recvs.running()));
        let rank = self.rank;
        let failure = concerned.into_iter().find_map(|(channel, sequence)| state.missing(rank, channel, sequence?));
        drop(state);
        if let Some(failure) = failure {
            self.fail(failure);
        }
    }

    /// The control connection to `peer` has ended.
    pub(super) fn on_closed(&self, peer: usize, ended: Ended) {
        let mut state = lock(&self.state);
        state.peers[peer].closed = true;
        if state.peers[peer].shutdown_notice.is_none() {
            log::debug!("rank {}: the control connection to rank {peer} has ended: {ended:?}", self.rank);
            if let Some(failure) = ended.lost(self.rank, peer, self.control.hosts(peer), &state.activity()) {
                drop(state);
                self.fail(failure);
            } else {
                state.peers[peer].gone = Some(Gone::new(ended, self.finished_by(peer, &state)));
                self.fail_if_needed(state, peer);
            }
        } else {
            drop(state);
        }
        self.changed.notify_all();
    }
}
