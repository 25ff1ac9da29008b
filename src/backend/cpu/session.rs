//! One call being carried out: its exchanges with headers in front, and what to make of it when one fails.
use super::group::{Channel, Group};
use super::hosts::Hosts;
use super::piece::{Piece, PieceMut};
use super::shm::{ShmGroup, Streams};
use super::storage::{Locking, Region};
use super::transport::{Inflow, Outflow, Transport};
use super::transport_error::TransportError;
use crate::backend::call::{Call, Header, Operation};
use crate::error::Failure;
use std::time::Instant;

/// A call, from its first byte to its last.
pub(super) struct Session<'a> {
    group: &'a Group,
    channel: Channel,
    header: Header,
    deadline: Instant,
    /// In front of what is sent, and expected in front of what comes.
    outgoing_head: [u8; Header::BYTES],
    incoming_head: [u8; Header::BYTES],
    /// By rank: whether the header went, or came, with an earlier exchange.
    sent_head: Vec<bool>,
    received_head: Vec<bool>,
    /// By rank: bytes of the next exchange that went, or came, with the one before.
    sent_ahead: Vec<usize>,
    received_ahead: Vec<usize>,
}

/// Pieces of bytes with the peer that each goes to. Several for one peer follow each other in the order of the list,
/// which is the same on both sides.
pub(super) type Sends<'a> = [(usize, Piece<'a>)];

/// The same for what comes.
pub(super) type Recvs<'a> = Vec<(usize, PieceMut<'a>)>;

impl<'a> Session<'a> {
    pub(super) fn new(group: &'a Group, channel: Channel, header: Header, deadline: Instant) -> Self {
        let mut incoming = header;
        if header.call.operation == Operation::Recv {
            incoming.call.operation = Operation::Send;
        }
        Self {
            group,
            channel,
            header,
            deadline,
            outgoing_head: header.encode(),
            incoming_head: incoming.encode(),
            sent_head: vec![false; group.world_size],
            received_head: vec![false; group.world_size],
            sent_ahead: vec![0; group.world_size],
            received_ahead: vec![0; group.world_size],
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.group.world_size
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.group.peers()
    }

    pub(super) fn hosts(&self) -> &'a Hosts {
        &self.group.hosts
    }

    /// How long this call waits for the locks of its tensors.
    pub(super) fn locking(&self) -> Locking<'a> {
        Locking { waits: &self.group.locks, deadline: self.deadline }
    }

    /// What came of moving bytes of a tensor.
    pub(super) fn move_bytes(&self, result: Result<(), TransportError>) -> Result<(), Failure> {
        result.map_err(|error| self.failure(error))
    }

    /// Sends and receives everything in the lists at once.
    pub(super) fn exchange(&mut self, sends: &Sends, recvs: Recvs) -> Result<(), Failure> {
        self.exchange_ahead((sends, recvs), (&[], vec![]))
    }

    /// Sends and receives everything in the lists `now`, and meanwhile, as far as nobody has to wait for it, what is in
    /// the lists `ahead`, which must be the lists `now` of the next exchange with the same peers.
    pub(super) fn exchange_ahead(&mut self, now: (&Sends, Recvs), ahead: (&Sends, Recvs)) -> Result<(), Failure> {
        let (outgoing, incoming) = (self.outgoing_head, self.incoming_head);
        let mut outflows: Vec<Outflow> = Vec::with_capacity(now.0.len());
        let sends = now.0.iter().map(|send| (send, true)).chain(ahead.0.iter().map(|send| (send, false)));
        for ((peer, piece), is_needed) in sends {
            let position = outflows.iter().position(|flow| flow.peer == *peer).unwrap_or_else(|| {
                let first = !std::mem::replace(&mut self.sent_head[*peer], true);
                let mut flow = Outflow::new(*peer, first.then_some(&outgoing));
                flow.resume(std::mem::take(&mut self.sent_ahead[*peer]));
                outflows.push(flow);
                outflows.len() - 1
            });
            if is_needed { outflows[position].push(*piece) } else { outflows[position].push_ahead(*piece) }
        }
        let mut inflows: Vec<Inflow> = Vec::with_capacity(now.1.len());
        let recvs = now.1.into_iter().map(|recv| (recv, true)).chain(ahead.1.into_iter().map(|recv| (recv, false)));
        for ((peer, piece), is_needed) in recvs {
            let position = inflows.iter().position(|flow| flow.peer == peer).unwrap_or_else(|| {
                let first = !std::mem::replace(&mut self.received_head[peer], true);
                let mut flow = Inflow::new(peer, first.then_some(&incoming));
                flow.resume(std::mem::take(&mut self.received_ahead[peer]));
                inflows.push(flow);
                inflows.len() - 1
            });
            if is_needed { inflows[position].push(piece) } else { inflows[position].push_ahead(piece) }
        }
        let exchanged = self.transport().exchange(&mut outflows, &mut inflows, self.deadline);
        exchanged.map_err(|error| self.failure(error))?;
        outflows.iter().for_each(|flow| self.sent_ahead[flow.peer] = flow.ahead());
        inflows.iter().for_each(|flow| self.received_ahead[flow.peer] = flow.ahead());
        Ok(())
    }

    /// The streams of the collectives in shared memory, for this call.
    pub(super) fn streams<'r>(&self, shm: &'r ShmGroup) -> Streams<'r> {
        shm.streams(self.outgoing_head, self.deadline)
    }

    /// Sends to a peer through shared memory.
    pub(super) fn send_shared(&self, shm: &ShmGroup, data: Region, peer: usize) -> Result<(), Failure> {
        let sent = shm.send(self.member(peer)?, &self.outgoing_head, data, self.deadline);
        sent.map_err(|error| self.failure_inside(error))
    }

    /// Receives from a peer through shared memory.
    pub(super) fn receive_shared(&self, shm: &ShmGroup, data: Region, peer: usize) -> Result<(), Failure> {
        let received = shm.receive(self.member(peer)?, &self.incoming_head, data, self.deadline);
        received.map_err(|error| self.failure_inside(error))
    }

    fn member(&self, peer: usize) -> Result<usize, Failure> {
        let absent = || self.failure(TransportError::System(format!("there is no shared memory with rank {peer}")));
        self.hosts().member(peer).ok_or_else(absent)
    }

    fn transport(&self) -> &'a Transport {
        match self.channel {
            Channel::Collectives => &self.group.data,
            Channel::SendTo(_) | Channel::RecvFrom(_) => &self.group.direct,
        }
    }

    /// Finds out what is behind a `error` in shared memory, where ranks have the numbers that they have on this host.
    pub(super) fn failure_inside(&self, error: TransportError) -> Failure {
        let members = self.hosts().members();
        self.failure(match error {
            TransportError::TimedOut { peers } => {
                TransportError::TimedOut { peers: peers.into_iter().map(|peer| members[peer]).collect() }
            }
            TransportError::Closed { peer, reason } => TransportError::Closed { peer: members[peer], reason },
            TransportError::Header { peer, received } => TransportError::Header { peer: members[peer], received },
            error @ (TransportError::Locked | TransportError::System(_)) => error,
        })
    }

    /// Finds out what is behind `error`, and ends the group with it.
    pub(super) fn failure(&self, error: TransportError) -> Failure {
        match error {
            TransportError::Closed { peer, reason } => self.group.fail_closed(self.channel, peer, &reason),
            TransportError::Locked => self.group.fail(self.timed_out_because(locked("this rank"))),
            TransportError::System(reason) => self.group.fail(Failure::PeerFailed { peer: self.rank(), reason }),
            TransportError::Header { peer, received } => {
                let failure = self.mismatch(peer, &received);
                self.group.fail(failure)
            }
            TransportError::TimedOut { peers } => {
                let failure = self.timed_out(&peers);
                self.group.fail(failure)
            }
        }
    }

    /// A peer is in another call.
    fn mismatch(&self, peer: usize, received: &[u8; Header::BYTES]) -> Failure {
        let Header { sequence, call: ours } = self.header;
        let Some(theirs) = Header::decode(received) else {
            let reason = format!("the data from rank {peer} is not the engine's: it begins with {received:02x?}");
            return Failure::PeerFailed { peer: self.rank(), reason };
        };
        if theirs.sequence < sequence
            && let Some(ours) = self.group.call_at(self.channel, theirs.sequence)
        {
            // What this rank called back then did not read what the peer sent.
            return self.desync(theirs.sequence, peer, theirs.call, ours);
        }
        if theirs.sequence > sequence
            && self.channel == Channel::Collectives
            && let Some(theirs) = self.group.query(sequence)[peer].and_then(|answer| answer.asked_call)
        {
            // What the peer called here did not send this rank anything; it is further by now.
            return self.desync(sequence, peer, theirs, ours);
        }
        self.desync(sequence, peer, theirs.call, ours)
    }

    /// The higher rank is named first, so that both sides say the same.
    fn desync(&self, sequence: u64, peer: usize, theirs: Call, ours: Call) -> Failure {
        let (theirs, ours) = theirs.describe_both(&ours);
        let (theirs, ours) = ((peer, theirs), (self.rank(), ours));
        let ((rank_a, call_a), (rank_b, call_b)) = if peer > self.rank() { (theirs, ours) } else { (ours, theirs) };
        Failure::Desync { sequence, rank_a, call_a, rank_b, call_b }
    }

    /// The deadline passed while `peers` were being waited for. Asks everybody where they are.
    fn timed_out(&self, peers: &[usize]) -> Failure {
        let Header { sequence, call } = self.header;
        let answers = self.group.query(sequence);
        let mut reasons = Vec::new();
        for (peer, answer) in answers.into_iter().enumerate().filter(|(peer, _)| *peer != self.rank()) {
            let Some(answer) = answer else {
                if self.group.is_gone(peer) {
                    reasons.push(format!("the process of rank {peer} has ended"));
                    continue;
                }
                reasons.push(format!(
                    "rank {peer} does not answer: its process is stopped, or its host cannot be reached"
                ));
                continue;
            };
            let last = match answer.current_call {
                Some(call) => format!("its last was sequence {}, {call}", answer.current),
                None => "it has not begun any".into(),
            };
            if self.channel != Channel::Collectives {
                if peers.contains(&peer) && answer.waits_for_lock {
                    reasons.push(locked(&format!("rank {peer}")));
                } else if peers.contains(&peer) {
                    reasons.push(format!("rank {peer} did not make the matching call; of the collectives, {last}"));
                }
                continue;
            }
            match answer.asked_call {
                Some(theirs) if theirs != call => return self.desync(sequence, peer, theirs, call),
                _ if answer.waits_for_lock => reasons.push(locked(&format!("rank {peer}"))),
                _ if answer.current >= sequence => {}
                Some(_) => reasons.push(format!("rank {peer} has started this collective but is not in it: {last}")),
                None => reasons.push(format!("rank {peer} is not in this collective: {last}")),
            }
        }
        if let Some(failure) = self.group.left_after_another(self.channel, peers) {
            return failure;
        }
        if reasons.is_empty() {
            reasons.push(format!("all ranks are in it, but ranks {peers:?} are too slow, or the network is"));
        }
        self.timed_out_because(reasons.join("; "))
    }

    fn timed_out_because(&self, reason: String) -> Failure {
        let Header { sequence, call } = self.header;
        let (rank, timeout) = (self.rank(), self.group.timeout);
        Failure::TimedOut { rank, call: call.to_string(), sequence, timeout, reason }
    }
}

/// Why `rank` does not come on.
fn locked(rank: &str) -> String {
    format!(
        "{rank} waits for the storage of its tensor, which its own program keeps locked: drop the guard that \
         storage_and_layout() returns before the call"
    )
}
