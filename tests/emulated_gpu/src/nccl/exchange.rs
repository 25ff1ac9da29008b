//! Matching of calls in the hub, and computing the result of each rank.
use super::reduce::reduce;
use super::wire::{ANSWER_HEADER, CALL_HEADER, Call, Kind, answer_header, parse_call};
use std::collections::{HashMap, VecDeque};
use std::io::{Read, Result, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A rank's call with its input data.
pub(super) struct Part {
    /// The index in the rank's job.
    index: usize,
    call: Call,
    body: Vec<u8>,
}

/// Reads the next call from a connection; `None` at its end. `given` returns the length of a body.
pub(super) fn read(mut stream: &UnixStream, given: impl Fn(&Call) -> usize) -> Option<Part> {
    let mut header = [0; CALL_HEADER];
    stream.read_exact(&mut header).ok()?;
    let (index, call) = parse_call(&header)?;
    let mut body = vec![0; given(&call)];
    stream.read_exact(&mut body).ok()?;
    Some(Part { index, call, body })
}

/// A rank's result of a call: consecutive pieces.
pub(super) struct Reply {
    index: usize,
    pieces: Vec<(Arc<Vec<u8>>, Range<usize>)>,
}

impl Reply {
    pub(super) fn send(&self, mut stream: &UnixStream) -> Result<()> {
        let bytes = self.pieces.iter().map(|(_, range)| range.len()).sum();
        let header: [u8; ANSWER_HEADER] = answer_header(self.index, bytes);
        stream.write_all(&header)?;
        self.pieces.iter().try_for_each(|(bytes, range)| stream.write_all(&bytes[range.clone()]))
    }
}

/// The calls that wait for matching calls.
pub(super) struct Exchange {
    collectives: Vec<VecDeque<Part>>,
    /// Keyed by sender and receiver.
    sends: HashMap<(usize, usize), VecDeque<Part>>,
    recvs: HashMap<(usize, usize), VecDeque<Part>>,
}

impl Exchange {
    pub(super) fn new(size: usize) -> Self {
        let collectives = (0..size).map(|_| VecDeque::new()).collect();
        Self { collectives, sends: HashMap::new(), recvs: HashMap::new() }
    }

    /// Adds a call and returns the calls that can be executed now. Mismatched calls stay queued, with everything behind
    /// them, so they hang.
    pub(super) fn add(&mut self, rank: usize, part: Part) -> Option<Turn> {
        let between = match part.call.kind {
            Kind::Send => (rank, part.call.peer),
            Kind::Recv => (part.call.peer, rank),
            _ => {
                self.collectives[rank].push_back(part);
                return self.next_collective();
            }
        };
        let is_send = part.call.kind == Kind::Send;
        let queues = if is_send { &mut self.sends } else { &mut self.recvs };
        queues.entry(between).or_default().push_back(part);
        self.next_message(between)
    }

    fn next_collective(&mut self) -> Option<Turn> {
        let first = self.collectives.first()?.front()?.call;
        let alike = |queue: &VecDeque<Part>| queue.front().is_some_and(|part| part.call == first);
        if !self.collectives.iter().all(alike) {
            return None;
        }
        Some(Turn::Collective(self.collectives.iter_mut().filter_map(VecDeque::pop_front).collect()))
    }

    fn next_message(&mut self, between: (usize, usize)) -> Option<Turn> {
        let (sends, recvs) = (self.sends.get_mut(&between)?, self.recvs.get_mut(&between)?);
        let (send, recv) = (sends.front()?, recvs.front()?);
        if (send.call.count, send.call.dtype) != (recv.call.count, recv.call.dtype) {
            return None;
        }
        Some(Turn::Message { between, send: sends.pop_front()?, recv: recvs.pop_front()? })
    }
}

/// Calls that match.
pub(super) enum Turn {
    /// In the order of ranks.
    Collective(Vec<Part>),
    Message {
        between: (usize, usize),
        send: Part,
        recv: Part,
    },
}

impl Turn {
    /// Returns the number of replies.
    pub(super) fn replies(&self) -> usize {
        match self {
            Self::Collective(parts) => parts.len(),
            Self::Message { .. } => 2,
        }
    }

    /// Computes the result of each rank.
    pub(super) fn carry_out(self) -> Vec<(usize, Reply)> {
        match self {
            Self::Message { between: (from, to), send, recv } => {
                let whole = 0..send.body.len();
                let received = Reply { index: recv.index, pieces: vec![(Arc::new(send.body), whole)] };
                vec![(from, Reply { index: send.index, pieces: Vec::new() }), (to, received)]
            }
            Self::Collective(parts) => collective(parts),
        }
    }
}

fn collective(parts: Vec<Part>) -> Vec<(usize, Reply)> {
    let size = parts.len();
    let Some(call) = parts.first().map(|part| part.call) else { return Vec::new() };
    let (indices, mut bodies): (Vec<_>, Vec<_>) = parts.into_iter().map(|part| (part.index, part.body)).unzip();
    let bodies: Vec<Arc<Vec<u8>>> = match call.kind {
        Kind::AllGather => bodies.into_iter().map(Arc::new).collect(),
        Kind::Broadcast => vec![Arc::new(bodies.swap_remove(call.peer))],
        _ => vec![Arc::new(reduce(bodies, call.dtype, call.op))],
    };
    let pieces = |rank: usize| match call.kind {
        Kind::Reduce if rank != call.peer => Vec::new(),
        Kind::ReduceScatter => {
            let bytes = call.taken(rank, size);
            vec![(bodies[0].clone(), rank * bytes..(rank + 1) * bytes)]
        }
        _ => bodies.iter().map(|body| (body.clone(), 0..body.len())).collect(),
    };
    indices.into_iter().enumerate().map(|(rank, index)| (rank, Reply { index, pieces: pieces(rank) })).collect()
}
