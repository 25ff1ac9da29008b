//! One call being carried out: its exchanges with headers in front, and what to make of it when one fails.
use super::call::{Call, Header, Operation};
use super::failure::Failure;
use super::group::{Channel, Group};
use super::shm::{Post, Room};
use super::transport::{Inflow, Outflow, Stall, Transport};
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
}

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

    /// Sends and receives everything in the lists at once, each a piece of bytes with the peer that it goes to or comes
    /// from. Several pieces for one peer follow each other in the order of the list, which is the same on both sides.
    pub(super) fn exchange(&mut self, sends: &[(usize, &[u8])], recvs: Vec<(usize, &mut [u8])>) -> Result<(), Failure> {
        let (outgoing, incoming) = (self.outgoing_head, self.incoming_head);
        let mut outflows: Vec<Outflow> = Vec::with_capacity(sends.len());
        for (peer, piece) in sends {
            let position = outflows.iter().position(|flow| flow.peer == *peer).unwrap_or_else(|| {
                let first = !std::mem::replace(&mut self.sent_head[*peer], true);
                outflows.push(Outflow::new(*peer, first.then_some(&outgoing)));
                outflows.len() - 1
            });
            outflows[position].push(piece);
        }
        let mut inflows: Vec<Inflow> = Vec::with_capacity(recvs.len());
        for (peer, piece) in recvs {
            let position = inflows.iter().position(|flow| flow.peer == peer).unwrap_or_else(|| {
                let first = !std::mem::replace(&mut self.received_head[peer], true);
                inflows.push(Inflow::new(peer, first.then_some(&incoming)));
                inflows.len() - 1
            });
            inflows[position].push(piece);
        }
        self.transport().exchange(&mut outflows, &mut inflows, self.deadline).map_err(|stall| self.failure(stall))
    }

    /// The streams of the collectives in shared memory, for this call.
    pub(super) fn post<'r>(&self, room: &'r Room) -> Post<'r> {
        room.post(self.outgoing_head, self.deadline)
    }

    /// Sends to a peer through shared memory.
    pub(super) fn send_shared(&self, room: &Room, data: &[u8], peer: usize) -> Result<(), Failure> {
        let sent = room.send(peer, &self.outgoing_head, data, self.deadline);
        sent.map_err(|stall| self.failure(stall))
    }

    /// Receives from a peer through shared memory.
    pub(super) fn receive_shared(&self, room: &Room, data: &mut [u8], peer: usize) -> Result<(), Failure> {
        let received = room.receive(peer, &self.incoming_head, data, self.deadline);
        received.map_err(|stall| self.failure(stall))
    }

    fn transport(&self) -> &'a Transport {
        match self.channel {
            Channel::Collectives => &self.group.data,
            Channel::SendTo(_) | Channel::RecvFrom(_) => &self.group.direct,
        }
    }

    /// Finds out what is behind `stall`, and ends the group with it.
    pub(super) fn failure(&self, stall: Stall) -> Failure {
        match stall {
            Stall::Closed { peer, reason } => self.group.fail_closed(self.channel, peer, &reason),
            Stall::System(reason) => self.group.fail(Failure::PeerFailed { peer: self.rank(), reason }),
            Stall::Header { peer, received } => {
                let failure = self.mismatch(peer, &received);
                self.group.fail(failure)
            }
            Stall::TimedOut { peers } => {
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
                if peers.contains(&peer) {
                    reasons.push(format!("rank {peer} did not make the matching call; of the collectives, {last}"));
                }
                continue;
            }
            match answer.asked_call {
                Some(theirs) if theirs != call => return self.desync(sequence, peer, theirs, call),
                _ if answer.current >= sequence => {}
                Some(_) => reasons.push(format!("rank {peer} has started this collective but is not in it: {last}")),
                None => reasons.push(format!("rank {peer} is not in this collective: {last}")),
            }
        }
        if reasons.is_empty() {
            reasons.push(format!("all ranks are in it, but ranks {peers:?} are too slow, or the network is"));
        }
        Failure::TimedOut {
            rank: self.rank(),
            call: call.to_string(),
            sequence,
            timeout: self.group.timeout,
            reason: reasons.join("; "),
        }
    }
}
