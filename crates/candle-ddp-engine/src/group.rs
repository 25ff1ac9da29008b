//! The state of a group, shared by all threads of one rank: the progress of its calls, who has left, and why it failed.
use crate::Error;
use crate::call::{Call, Channel, Header};
use crate::call_site::CallSite;
use crate::call_sites::CallSites;
use crate::error::Failure;
use crate::failure::{CallCounts, CallHistory, left_since};
use crate::flight_recorder::{CallRecord, FlightRecorder, Recorded};
use crate::gone::{self, Ended, Gone, News};
use crate::hosts::Hosts;
use crate::memory::LockWaits;
use crate::panic::lock;
use crate::shm::{Life, ShmGroup, Sleeper};
use crate::standing::{Membership, Thread, Wait, strangers};
use crate::state::{Peer, State};
use crate::tcp::control::Control;
use crate::tcp::frame::Frame;
use crate::tcp::transport::Transport;
use crate::wait::wait_until;
use crate::warnings::warn_aloud;
use candle_ddp_rendezvous::json::encode;
use rustix::thread::Pid;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// One group, as seen by one of its ranks.
pub(crate) struct Group {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// How long a call may take.
    pub(crate) timeout: Duration,
    /// Which ranks share memory.
    pub(crate) hosts: Hosts,
    /// The memory that this rank shares with the others of its host, instead of connections.
    pub(crate) shm: Option<ShmGroup>,
    /// The connections for collectives.
    pub(crate) data: Transport,
    /// The connections for `send` and `recv`, which must not wait for a collective.
    pub(crate) direct: Transport,
    pub(crate) control: Control,
    /// This rank's waits for the locks of tensors.
    pub(crate) locks: LockWaits,
    call_sites: CallSites,
    recorder: Option<Arc<FlightRecorder>>,
    /// Its place in its job.
    pub(crate) membership: Option<Membership>,
    /// The threads of this process that were unknown when this rank made the group.
    pub(crate) strangers: Option<Vec<Pid>>,
    /// The threads that wait for calls that other threads run.
    pub(crate) waits: Mutex<Vec<Wait>>,
    pub(crate) state: Mutex<State>,
    /// Notified of a failure, an acknowledgement, an answer, or a connection that is new or closed.
    pub(crate) changed: Condvar,
}

impl Group {
    pub(crate) fn new(
        rank: usize,
        world_size: usize,
        timeout: Duration,
        hosts: Hosts,
        shm: Option<ShmGroup>,
        control: Control,
    ) -> Self {
        let [data, direct] = [(); 2].map(|()| Transport::new(world_size));
        let (state, changed, locks) = (Mutex::new(State::new(world_size, 0)), Condvar::new(), LockWaits::default());
        let (call_sites, recorder, membership, waits) = (CallSites::default(), None, None, Mutex::default());
        Self {
            rank,
            world_size,
            timeout,
            hosts,
            shm,
            data,
            direct,
            control,
            locks,
            call_sites,
            recorder,
            membership,
            strangers: None,
            waits,
            state,
            changed,
        }
    }

    /// Returns the same group, before its first call; `recorder` writes its calls.
    pub(crate) fn recorded(self, recorder: Arc<FlightRecorder>) -> Self {
        let state = Mutex::new(State::new(self.world_size, recorder.entries()));
        Self { recorder: Some(recorder), state, ..self }
    }

    /// Returns the same group, which has this place in its job.
    pub(crate) fn member(self, membership: Membership) -> Self {
        Self { membership: Some(membership), strangers: strangers(), ..self }
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world_size).filter(move |peer| *peer != rank)
    }

    /// Returns the group's failure, if any, as the result of a call.
    fn tell(&self, state: &mut State) -> Result<(), Failure> {
        let Some(failure) = state.failure.clone() else { return Ok(()) };
        state.untold = false;
        self.membership.iter().for_each(Membership::tell);
        Err(failure)
    }

    /// Records that `call` was started, and when if the caller knows, unless the group has failed.
    pub(crate) fn start(&self, channel: Channel, header: Header, at: Option<Instant>) -> Result<(), Failure> {
        let mut state = lock(&self.state);
        self.tell(&mut state)?;
        // The one with the number 0 makes the group.
        if header.sequence > 0 {
            Thread::enter(&mut state.callers);
        }
        state.history_mut(channel).start(header.sequence, header.call, at);
        Ok(())
    }

    /// Records that a call has been running since `at`, unless the group has failed, or a peer that the call needs has left or
    /// ended.
    pub(crate) fn begin(&self, channel: Channel, sequence: u64, at: Instant) -> Result<(), Failure> {
        let mut state = lock(&self.state);
        self.tell(&mut state)?;
        state.history_mut(channel).begin(sequence, Some(at));
        let missing = state.missing(self.rank, channel, sequence);
        if let Some(failure) = missing.or_else(|| state.begun_in_vain(self.rank, channel, sequence)) {
            drop(state);
            self.fail(failure);
            return self.tell(&mut lock(&self.state));
        }
        Ok(())
    }

    /// Records that the call that [began](Self::begin) is complete, whether it succeeded, when if the caller knows, and how
    /// long it waited for the last of the other ranks, if it is a collective.
    pub(crate) fn finish(
        &self,
        channel: Channel,
        sequence: u64,
        well: bool,
        at: Option<Instant>,
        waited: Option<Duration>,
    ) {
        if well && let Some((shm, kind)) = self.kind(channel) {
            shm.set_finished(kind, sequence);
        }
        let mut state = lock(&self.state);
        let history = state.history_mut(channel);
        if let Some(waited) = waited {
            history.note_wait(waited);
        }
        history.finish(well, at);
        // A call that fails returns the group's failure. One that was running when the group failed may still succeed.
        if !well {
            let _ = self.tell(&mut state);
        }
    }

    /// Looks at the places of a collective that is over.
    pub(crate) fn look_at_call_sites(&self, header: &Header) {
        let has_called = |place| lock(&self.state).collectives.has_called_from(place);
        self.call_sites.look(self.rank, (header.sequence, &header.call), CallSite::take_met(), has_called);
    }

    /// The part of shared memory that `channel` uses; `None` for messages to and from other hosts.
    fn kind(&self, channel: Channel) -> Option<(&ShmGroup, Sleeper)> {
        let kind = match channel {
            Channel::Collectives => Sleeper::Collectives,
            Channel::SendTo(peer) => Sleeper::SendTo(self.hosts.member(peer)?),
            Channel::RecvFrom(peer) => Sleeper::RecvFrom(self.hosts.member(peer)?),
        };
        Some((self.shm.as_ref()?, kind))
    }

    /// How many calls that concern this rank `peer` had finished before its process ended. Known only for ranks on this
    /// host.
    fn finished_by(&self, peer: usize, state: &State) -> Option<CallCounts> {
        let (shm, member, own) = (self.shm.as_ref()?, self.hosts.member(peer)?, self.hosts.index());
        let count = |kind, near: &CallHistory| shm.finished_by(member, kind, near.begun());
        Some(CallCounts {
            collectives: count(Sleeper::Collectives, &state.collectives),
            sent: count(Sleeper::SendTo(own), &state.peers[peer].recvs),
            received: count(Sleeper::RecvFrom(own), &state.peers[peer].sends),
        })
    }

    pub(crate) fn call_at(&self, channel: Channel, sequence: u64) -> Option<Call> {
        lock(&self.state).history_mut(channel).call_at(sequence)
    }

    /// Ends the group with `failure`, unless it already has one; returns the first one.
    pub(crate) fn fail(&self, failure: Failure) -> Failure {
        self.membership.iter().for_each(|membership| membership.pass_on(&failure));
        let mut state = lock(&self.state);
        let is_own = matches!(failure, Failure::PeerFailed { peer, .. } if peer == self.rank);
        if let Some(first) = state.failure.clone() {
            // A rank that fails as well need not be warned that the group had failed.
            state.untold &= !is_own;
            self.membership.iter().filter(|_| is_own).for_each(Membership::tell);
            return first;
        }
        log::debug!("rank {}: the group failed: {failure:?}", self.rank);
        // If this rank caused it, it needs no warning.
        state.untold = !is_own;
        self.membership.iter().filter(|_| is_own).for_each(Membership::tell);
        state.failure = Some(failure.clone());
        // Said on the board before another thread of this rank can see the failure and leave: to its peers, it would have left
        // in good order.
        if let Some(shm) = &self.shm {
            shm.board.fail(&encode(&failure));
        }
        drop(state);
        self.changed.notify_all();
        // The reason is sent before the data connections close, since peers that see them close wait for the reason.
        let abort = Frame::Abort(failure.clone());
        self.linked().for_each(|peer| self.control.send(peer, &abort));
        self.locks.end();
        self.shm.iter().for_each(ShmGroup::close);
        self.data.close();
        self.direct.close();
        if let Some(recorder) = &self.recorder {
            recorder.write_because(&Error::from(failure.clone()).to_string());
        }
        failure
    }

    /// Ends the group because a connection of `channel` to `peer` closed, with the reason that the monitor knows or is
    /// about to learn.
    pub(crate) fn fail_closed(&self, channel: Channel, peer: usize, reason: &str) -> Failure {
        /// By then the monitor has read the peer's last frames: when a process ends, its control connection closes
        /// together with its data connection.
        const PATIENCE: Duration = Duration::from_secs(3);
        let deadline = Instant::now() + PATIENCE;
        let known = self.wait_until(deadline, |state| {
            let call = || state.describe(channel, state.history(channel).begun());
            let gone = || state.peers[peer].gone.as_ref().map(|gone| gone.failure(self.rank, peer, call()));
            let failure = state.failure.clone().or_else(gone);
            // The peer's last frames before it closed the connection have been read by now.
            (failure.is_some() || state.peers[peer].closed).then_some(failure)
        });
        let failure = known.flatten().or_else(|| self.left_during(channel, peer)).unwrap_or_else(|| {
            let state = lock(&self.state);
            let call = state.activity();
            if state.peers[peer].refuses {
                return Failure::PeerGone { rank: self.rank, peer, call: format!("{call} ({reason})") };
            }
            let reason = gone::lost(peer, self.control.hosts(peer), &call, reason);
            Failure::PeerFailed { peer: self.rank, reason }
        });
        self.fail(failure)
    }

    /// The failure of the running call of `channel` if `peer` has left instead of taking part in it.
    fn left_during(&self, channel: Channel, peer: usize) -> Option<Failure> {
        let state = lock(&self.state);
        state.peers[peer].left?;
        let history = state.history(channel);
        Some(left_since(peer, self.rank, history.begun(), history.call_at(history.begun())?))
    }

    /// The reason why the group has failed, or why no more calls of all its ranks can succeed.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let state = lock(&self.state);
        let gone =
            |(peer, known): (usize, &Peer)| Some(known.gone.as_ref()?.failure(self.rank, peer, state.activity()));
        state.failure.clone().or_else(|| state.peers.iter().enumerate().find_map(gone))
    }

    /// The peers whose control connections closed without a goodbye.
    pub(crate) fn gone(&self) -> Vec<usize> {
        let state = lock(&self.state);
        self.peers().filter(|peer| state.peers[*peer].gone.is_some()).collect()
    }

    /// Waits until `found` returns something, at most until `deadline`.
    pub(crate) fn wait_until<T>(&self, deadline: Instant, found: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        wait_until(&self.state, &self.changed, deadline, found)
    }

    /// Tells all peers that this rank leaves, unless the group has failed, which they already know. Returns once those of
    /// other hosts have read it, also those that are just connecting, or after a short while: if the connections closed earlier,
    /// the system might discard it.
    pub(crate) fn leave(&self) {
        self.look_around();
        // Otherwise, this rank would leave in good order.
        self.membership.as_ref().and_then(Membership::ended).map(|failure| self.fail(failure));
        let mut state = lock(&self.state);
        state.leaving = true;
        // The monitor of a busy peer may not run for seconds. A stopped process reads nothing, and the groups of a process leave in turn.
        let may_be_stopped = matches!(state.failure, None | Some(Failure::TimedOut { .. }));
        let patience = Duration::from_secs(if may_be_stopped { 2 } else { 5 });
        let mut goodbyes = Vec::new();
        if let Some(shm) = &self.shm {
            shm.board.leave();
        }
        if state.failure.is_none() {
            goodbyes.extend(self.linked().map(|peer| (peer, state.goodbye(peer))));
        }
        drop(state);
        goodbyes.iter().for_each(|(peer, goodbye)| self.control.send(*peer, goodbye));
        self.wait_until(Instant::now() + patience, |state| {
            let has_read = |peer: usize| state.peers[peer].acknowledged || state.peers[peer].closed;
            (!state.is_connecting && self.linked().all(has_read)).then_some(())
        });
        let state = lock(&self.state);
        match &state.failure {
            // After its last call, a program may end without leaving the group: that is no failure.
            None | Some(Failure::PeerGone { .. }) => {}
            // The groups of a job often end together. A call in any of them says so.
            Some(_) if self.membership.as_ref().is_some_and(Membership::has_told) => {}
            Some(failure) if state.untold && !std::thread::panicking() => {
                let (rank, error) = (self.rank, Error::from(failure.clone()));
                warn_aloud(format_args!(
                    "rank {rank}: the group had failed when it left, and no call has said so: {error}"
                ));
            }
            Some(_) => {}
        }
    }

    /// Takes note of the ranks of this host that have failed, left or ended. The monitor may not have looked yet.
    fn look_around(&self) {
        let Some(shm) = &self.shm else { return };
        for (member, peer) in self.neighbours() {
            let life = shm.board.life(member);
            if life.has_failed() {
                self.on_told(shm.board.failure(member).as_deref(), peer);
            } else if life == Life::Left {
                self.on_left(peer);
            }
        }
    }

    /// The other ranks of this host: their numbers there, and their ranks.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = (usize, usize)> {
        self.hosts.members().iter().copied().enumerate().filter(|(_, peer)| *peer != self.rank)
    }

    /// The peers with a control connection, on other hosts.
    pub(crate) fn linked(&self) -> impl Iterator<Item = usize> {
        self.peers().filter(|peer| self.control.link(*peer).is_some())
    }

    /// Takes what this rank was told, and notes whether connections are being made.
    pub(crate) fn look_up(&self, is_connecting: bool) -> Vec<News> {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.is_connecting, is_connecting) && !is_connecting {
            self.changed.notify_all();
        }
        std::mem::take(&mut state.heard)
    }

    /// Tells the monitors to end.
    pub(crate) fn end_monitors(&self) {
        lock(&self.state).over = true;
        self.control.wake();
        self.shm.iter().for_each(|shm| shm.board.ring_here());
    }

    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.state).failure.is_some()
    }

    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).over
    }

    /// Called when the monitor has read `frame` from `peer`.
    pub(crate) fn on_frame(&self, peer: usize, frame: Frame) {
        match frame {
            Frame::Abort(failure) => {
                self.fail(failure);
                self.control.send(peer, &Frame::Ack);
            }
            Frame::Goodbye(counts) => {
                self.leaves(lock(&self.state), peer, counts);
                self.control.send(peer, &Frame::Ack);
                self.spread(peer);
            }
            Frame::Call { kind } => self.want(&[peer], kind),
            Frame::Ack => {
                lock(&self.state).peers[peer].acknowledged = true;
                self.changed.notify_all();
            }
            Frame::Query { id, question } => {
                self.control.send(peer, &Frame::Answer { id, rank: self.rank, report: self.report(question) });
                self.relay(peer, id, question);
            }
            Frame::Answer { id, rank, report } => {
                let mut state = lock(&self.state);
                if let Some(answer) = state.queries.get_mut(&id).and_then(|query| query.answers.get_mut(rank)) {
                    *answer = Some(report);
                }
                drop(state);
                self.changed.notify_all();
            }
            Frame::News { rank, fate } => lock(&self.state).heard.push(News { rank, fate, witness: peer }),
        }
    }

    /// Records that `peer` has left in good order, after so many calls.
    fn leaves(&self, mut state: MutexGuard<State>, peer: usize, counts: CallCounts) {
        state.peers[peer].left = Some(counts);
        self.fail_if_needed(state, peer);
    }

    /// Called when `peer`, on this host, has left in good order: it has finished all its calls.
    pub(crate) fn on_left(&self, peer: usize) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.peers[peer].closed, true) {
            return;
        }
        if let Some(finished) = self.finished_by(peer, &state) {
            // Without the one with number 0.
            let [collectives, sent, received] =
                [finished.collectives, finished.sent, finished.received].map(|count| count.saturating_sub(1));
            self.leaves(state, peer, CallCounts { collectives, sent, received });
        }
        self.changed.notify_all();
        self.spread(peer);
    }

    /// Called when `peer`, on this host, has said why the group failed.
    pub(crate) fn on_told(&self, failure: Option<&[u8]>, peer: usize) {
        let told = failure.and_then(|failure| serde_json::from_slice(failure).ok());
        let unknown = || {
            let reason = format!("rank {peer} could not tell it why the group has failed: see the output of that rank");
            Failure::PeerFailed { peer: self.rank, reason }
        };
        self.fail(told.unwrap_or_else(unknown));
    }

    /// Ends the group if the last collective that began here, or a running message, needs `peer`, which has left or
    /// ended.
    pub(crate) fn fail_if_needed(&self, state: MutexGuard<State>, peer: usize) {
        let mut concerned = vec![(Channel::Collectives, Some(state.collectives.begun()))];
        // A sent message that will never be received is not a failure.
        concerned.push((Channel::SendTo(peer), state.peers[peer].sends.running()));
        concerned.push((Channel::RecvFrom(peer), state.peers[peer].recvs.running()));
        let rank = self.rank;
        let failure = concerned.into_iter().find_map(|(channel, sequence)| state.missing(rank, channel, sequence?));
        drop(state);
        if let Some(failure) = failure {
            self.fail(failure);
        }
    }

    /// Called when the control connection to `peer` has ended, or its process on this host.
    pub(crate) fn on_closed(&self, peer: usize, ended: Ended) {
        let mut state = lock(&self.state);
        // Of two connections, the other one may have ended before.
        if std::mem::replace(&mut state.peers[peer].closed, true) {
            return;
        }
        if state.peers[peer].left.is_none() {
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
        self.spread(peer);
    }
}

impl Recorded for Group {
    fn record(&self) -> (Vec<CallRecord>, Option<String>) {
        let state = lock(&self.state);
        (state.records(), state.failure.clone().map(|failure| Error::from(failure).to_string()))
    }
}
