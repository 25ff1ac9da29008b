//! One call over TCP: its exchanges, preceded by headers.
use crate::call::Header;
use crate::error::Failure;
use crate::session::Session;
use crate::tcp::piece::{Piece, PieceMut};
use crate::tcp::transport::{Inflow, Outflow};
use std::ops::Deref;

/// The exchanges of one call.
pub(crate) struct TcpSession<'a> {
    session: Session<'a>,
    outgoing: [u8; Header::BYTES],
    incoming: [u8; Header::BYTES],
    /// By rank: whether an earlier exchange sent or received the header.
    sent_head: Vec<bool>,
    received_head: Vec<bool>,
    /// By rank: how many bytes of the next exchange the previous one has sent or received.
    sent_ahead: Vec<usize>,
    received_ahead: Vec<usize>,
}

/// Pieces of bytes with the peer to which each is sent. Several pieces for one peer are sent in the order of the list,
/// which is the same on both sides.
pub(crate) type Sends<'a> = [(usize, Piece<'a>)];

/// Pieces of bytes with the peer from which each is received.
pub(crate) type Recvs<'a> = Vec<(usize, PieceMut<'a>)>;

impl<'a> TcpSession<'a> {
    pub(crate) fn new(session: Session<'a>) -> Self {
        let world_size = session.world_size();
        Self {
            outgoing: session.outgoing_head(),
            incoming: session.incoming_head(),
            session,
            sent_head: vec![false; world_size],
            received_head: vec![false; world_size],
            sent_ahead: vec![0; world_size],
            received_ahead: vec![0; world_size],
        }
    }

    /// Sends and receives everything in the lists at once.
    pub(crate) fn exchange(&mut self, sends: &Sends, recvs: Recvs) -> Result<(), Failure> {
        self.exchange_ahead((sends, recvs), (&[], vec![]))
    }

    /// Sends and receives everything in the lists `now`. Meanwhile it moves as much of the lists `ahead` as it can
    /// without waiting; these must be the lists `now` of the next exchange with the same peers.
    pub(crate) fn exchange_ahead(&mut self, now: (&Sends, Recvs), ahead: (&Sends, Recvs)) -> Result<(), Failure> {
        let (outgoing, incoming) = (self.outgoing, self.incoming);
        // By rank: the position of its flow. With very many peers, a search would take longer than their system calls.
        let mut places = vec![None; self.world_size()];
        let mut outflows: Vec<Outflow> = Vec::with_capacity(now.0.len());
        let sends = now.0.iter().map(|send| (send, true)).chain(ahead.0.iter().map(|send| (send, false)));
        for ((peer, piece), is_needed) in sends {
            let position = *places[*peer].get_or_insert_with(|| {
                let first = !std::mem::replace(&mut self.sent_head[*peer], true);
                let mut flow = Outflow::new(*peer, first.then_some(&outgoing));
                flow.resume(std::mem::take(&mut self.sent_ahead[*peer]));
                outflows.push(flow);
                outflows.len() - 1
            });
            if is_needed { outflows[position].push(*piece) } else { outflows[position].push_ahead(*piece) }
        }
        places.fill(None);
        let mut inflows: Vec<Inflow> = Vec::with_capacity(now.1.len());
        let recvs = now.1.into_iter().map(|recv| (recv, true)).chain(ahead.1.into_iter().map(|recv| (recv, false)));
        for ((peer, piece), is_needed) in recvs {
            let position = *places[peer].get_or_insert_with(|| {
                let first = !std::mem::replace(&mut self.received_head[peer], true);
                let mut flow = Inflow::new(peer, first.then_some(&incoming));
                flow.resume(std::mem::take(&mut self.received_ahead[peer]));
                inflows.push(flow);
                inflows.len() - 1
            });
            if is_needed { inflows[position].push(piece) } else { inflows[position].push_ahead(piece) }
        }
        let Session { group, channel, deadline, arrival, .. } = self.session;
        let peers = outflows.iter().map(|flow| flow.peer).chain(inflows.iter().map(|flow| flow.peer));
        let reached = group.reach(channel, peers, deadline);
        let (transport, _) = group.transport(channel);
        let exchanged = reached.and_then(|()| transport.exchange(&mut outflows, &mut inflows, deadline, arrival));
        exchanged.map_err(|error| self.session.failure(error))?;
        outflows.iter().for_each(|flow| self.sent_ahead[flow.peer] = flow.ahead());
        inflows.iter().for_each(|flow| self.received_ahead[flow.peer] = flow.ahead());
        Ok(())
    }
}

impl<'a> Deref for TcpSession<'a> {
    type Target = Session<'a>;

    fn deref(&self) -> &Session<'a> {
        &self.session
    }
}
