//! Moves bytes between ranks over TCP.
//!
//! The only primitive is [`Transport::exchange`], which sends to and receives from any number of peers at once and
//! makes progress wherever it can, so that no order of large messages can block another.
use crate::arrival::Arrival;
use crate::call::Header;
use crate::memory::Cut;
use crate::tcp::piece::{Piece, PieceMut, beyond};
use crate::transport_error::TransportError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Connections to peers, each a byte stream.
pub(crate) struct Transport {
    /// By rank; empty until the first use, and for the ranks of this host.
    sockets: Vec<OnceLock<TcpStream>>,
}

/// Bytes to send to a peer, or to receive from it: the header, if this is the first exchange of a call, then the pieces in
/// order, then pieces that need not be complete when the exchange ends.
pub(crate) struct Flow<'a, M> {
    pub(crate) peer: usize,
    head: Option<&'a [u8; Header::BYTES]>,
    /// How much of the header a receiving flow has got.
    received_head: [u8; Header::BYTES],
    pieces: Vec<Piece<'a, M>>,
    /// Bytes already moved, including the header's.
    done: usize,
    /// Bytes that must be moved before the exchange ends.
    needed: usize,
    total: usize,
}

/// Bytes to send to a peer.
pub(crate) type Outflow<'a> = Flow<'a, &'a [u8]>;
/// Bytes expected from a peer.
pub(crate) type Inflow<'a> = Flow<'a, &'a mut [u8]>;

/// The result of one attempt to move bytes.
enum Progress {
    Complete,
    Blocked,
}

impl Transport {
    /// Without connections.
    pub(crate) fn new(world_size: usize) -> Self {
        Self { sockets: (0..world_size).map(|_| OnceLock::new()).collect() }
    }

    /// Whether there is a connection to `peer`.
    pub(crate) fn has(&self, peer: usize) -> bool {
        self.sockets.get(peer).is_some_and(|socket| socket.get().is_some())
    }

    /// Takes a non-blocking connection to `peer`. Returns whether it is the first one.
    pub(crate) fn add(&self, peer: usize, socket: TcpStream) -> bool {
        self.sockets.get(peer).is_some_and(|place| place.set(socket).is_ok())
    }

    /// Ends every exchange, now and later, on this rank and (once they have read what was sent before) on its peers.
    pub(crate) fn close(&self) {
        for socket in self.sockets.iter().filter_map(OnceLock::get) {
            // It fails if the peer has already closed, which has the same effect.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Sends what `sends` need and receives what `recvs` need, until `deadline`, and moves as much of the rest as it
    /// can without waiting. Both have at most one flow for each peer. When the last header has come goes into `arrival`.
    pub(crate) fn exchange(
        &self,
        sends: &mut [Outflow],
        recvs: &mut [Inflow],
        deadline: Instant,
        arrival: &Arrival,
    ) -> Result<(), TransportError> {
        // Usually the sockets take everything at once, and small messages have already arrived: then no poll is needed.
        let mut sending = Vec::with_capacity(sends.len());
        let mut receiving = Vec::with_capacity(recvs.len());
        for (index, flow) in sends.iter_mut().enumerate() {
            if let Progress::Blocked = flow.advance(self.socket(flow.peer)?)? {
                sending.push(index);
            }
        }
        for (index, flow) in recvs.iter_mut().enumerate() {
            if let Progress::Blocked = flow.advance(self.socket(flow.peer)?)? {
                receiving.push(index);
            }
        }
        let mut is_awaited = recvs.iter().any(Inflow::awaits_head);
        let mut pace = Pace::default();
        loop {
            let unsent: usize = sending.iter().map(|index| sends[*index].missing()).sum();
            let unread: usize = receiving.iter().map(|index| recvs[*index].missing()).sum();
            if unsent + unread == 0 {
                return Ok(());
            }
            pace.rest(unsent + unread);
            let ready = self.wait(sends, &sending, recvs, &receiving, deadline)?;
            let mut ready = ready.into_iter();
            retain_blocked(&mut sending, &mut ready, |index| {
                let flow = &mut sends[index];
                flow.advance(self.socket(flow.peer)?)
            })?;
            retain_blocked(&mut receiving, &mut ready, |index| {
                let flow = &mut recvs[index];
                flow.advance(self.socket(flow.peer)?)
            })?;
            if is_awaited && !recvs.iter().any(Inflow::awaits_head) {
                is_awaited = false;
                arrival.note(Some(Instant::now()));
            }
        }
    }

    /// Waits until at least one of the flows can advance. Returns which ones can, the sending ones first.
    fn wait(
        &self,
        sends: &[Outflow],
        sending: &[usize],
        recvs: &[Inflow],
        receiving: &[usize],
        deadline: Instant,
    ) -> Result<Vec<bool>, TransportError> {
        let mut fds = Vec::with_capacity(sending.len() + receiving.len());
        for &index in sending {
            fds.push(PollFd::new(self.socket(sends[index].peer)?, PollFlags::OUT));
        }
        for &index in receiving {
            fds.push(PollFd::new(self.socket(recvs[index].peer)?, PollFlags::IN));
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // If the time is longer than the system can express, there is no time limit.
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) if left.is_zero() => {
                    let sends = sending.iter().map(|&index| &sends[index]).filter(|flow| flow.missing() > 0);
                    let recvs = receiving.iter().map(|&index| &recvs[index]).filter(|flow| flow.missing() > 0);
                    let mut peers: Vec<usize> =
                        sends.map(|flow| flow.peer).chain(recvs.map(|flow| flow.peer)).collect();
                    peers.sort_unstable();
                    peers.dedup();
                    return Err(TransportError::TimedOut { peers });
                }
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
                Err(error) => return Err(TransportError::System(format!("poll: {error}"))),
            }
        }
    }

    fn socket(&self, peer: usize) -> Result<&TcpStream, TransportError> {
        let socket = self.sockets.get(peer).and_then(OnceLock::get);
        socket.ok_or_else(|| TransportError::System(format!("there is no connection to rank {peer}")))
    }
}

/// Advances the flows that are ready, and keeps those in `indices` that are not complete.
fn retain_blocked(
    indices: &mut Vec<usize>,
    ready: &mut impl Iterator<Item = bool>,
    mut advance: impl FnMut(usize) -> Result<Progress, TransportError>,
) -> Result<(), TransportError> {
    let mut result = Ok(());
    indices.retain(|&index| {
        if result.is_err() || !ready.next().unwrap_or(false) {
            return true;
        }
        match advance(index) {
            Ok(Progress::Complete) => false,
            Ok(Progress::Blocked) => true,
            Err(error) => {
                result = Err(error);
                true
            }
        }
    });
    result
}

/// A slow link delivers in small pieces, and waking up for each of them takes time from the threads that compute. So a
/// slow exchange rests until most of what is missing should have arrived.
#[derive(Default)]
struct Pace {
    waits: usize,
    /// When the exchange was first seen to move, and how many bytes were missing then.
    start: Option<(Instant, usize)>,
}

impl Pace {
    /// Shorter rests are not worthwhile.
    const LEAST: Duration = Duration::from_micros(100);
    /// The end of the group is noticed within this time.
    const LONGEST: Duration = Duration::from_millis(2);

    /// Call before each wait, with the number of missing bytes.
    fn rest(&mut self, missing: usize) {
        self.waits += 1;
        match self.start {
            Some((start, missing_then)) => {
                let moved = missing_then.saturating_sub(missing).max(1);
                let left = start.elapsed().mul_f64(missing as f64 / moved as f64);
                let rest = left.mul_f64(0.875).min(Self::LONGEST);
                if rest >= Self::LEAST {
                    std::thread::sleep(rest);
                }
            }
            // The first wait may be for a late peer, and says nothing about the link.
            None if self.waits > 1 => self.start = Some((Instant::now(), missing)),
            None => {}
        }
    }
}

impl<'a, M: AsRef<[u8]>> Flow<'a, M> {
    pub(crate) fn new(peer: usize, head: Option<&'a [u8; Header::BYTES]>) -> Self {
        let total = head.map_or(0, |head| head.len());
        Self { peer, head, received_head: [0; Header::BYTES], pieces: Vec::new(), done: 0, needed: total, total }
    }

    pub(crate) fn push(&mut self, piece: impl Into<Piece<'a, M>>) {
        self.push_ahead(piece);
        self.needed = self.total;
    }

    /// Adds a piece that follows those that are needed, and may be left to later exchanges.
    pub(crate) fn push_ahead(&mut self, piece: impl Into<Piece<'a, M>>) {
        let piece = piece.into();
        self.total += piece.len();
        self.pieces.push(piece);
    }

    /// Skips the first `done` bytes, which the previous exchange moved ahead.
    pub(crate) fn resume(&mut self, done: usize) {
        self.done = done;
    }

    /// Bytes moved beyond those that were needed.
    pub(crate) fn ahead(&self) -> usize {
        self.done.saturating_sub(self.needed)
    }

    fn missing(&self) -> usize {
        self.needed.saturating_sub(self.done)
    }
}

impl Outflow<'_> {
    fn advance(&mut self, socket: &TcpStream) -> Result<Progress, TransportError> {
        // `write_vectored` would raise SIGPIPE for a closed connection in programs that do not ignore that signal.
        #[cfg(not(target_vendor = "apple"))]
        const FLAGS: SendFlags = SendFlags::NOSIGNAL;
        #[cfg(target_vendor = "apple")]
        const FLAGS: SendFlags = SendFlags::empty();

        while self.done < self.total {
            let head = self.head.map(|head| Piece::from(&head[..]));
            let left = || beyond(self.done, head.into_iter().chain(self.pieces.iter().copied()), |piece| piece.len());
            // Only parts of one tensor at a time, since its memory is locked while they move.
            let tensor = left().find_map(|(piece, _)| piece.tensor());
            let send = |memory: &[u8]| {
                let mut rest = Vec::with_capacity(1 + self.pieces.len());
                for (piece, skipped) in left() {
                    let bytes = match piece {
                        Piece::Memory(bytes) => bytes,
                        Piece::Tensor(part) if tensor.is_some_and(|tensor| tensor.shares_lock(part)) => {
                            part.of(memory)?
                        }
                        Piece::Tensor(_) => break,
                    };
                    rest.push(IoSlice::new(&bytes[skipped..]));
                }
                Ok(sendmsg(socket, &rest, &mut SendAncillaryBuffer::default(), FLAGS))
            };
            let sent = match tensor {
                Some(tensor) => tensor.read_all(send)?,
                None => send(&[])?,
            };
            match sent {
                Ok(sent) => self.done += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Progress::Blocked),
                Err(error) => return Err(TransportError::Closed { peer: self.peer, reason: error.to_string() }),
            }
        }
        Ok(Progress::Complete)
    }
}

impl Inflow<'_> {
    /// Whether the header has not come yet.
    fn awaits_head(&self) -> bool {
        self.head.is_some() && self.done < Header::BYTES
    }

    fn advance(&mut self, mut socket: &TcpStream) -> Result<Progress, TransportError> {
        while self.done < self.total {
            let head = self.head.map_or(0, |head| head.len());
            let after_head = self.done.saturating_sub(head);
            // Only parts of one tensor at a time, as in sending.
            let tensor =
                beyond(after_head, self.pieces.iter(), |piece| piece.len()).find_map(|(piece, _)| piece.tensor());
            let (received_head, pieces, done) = (&mut self.received_head, &mut self.pieces, self.done);
            let mut receive = |memory: &mut [u8]| {
                let mut memory = Cut::new(memory);
                let mut rest = Vec::with_capacity(1 + pieces.len());
                if done < head {
                    rest.push(IoSliceMut::new(&mut received_head[done..]));
                }
                for (piece, skipped) in beyond(after_head, pieces.iter_mut(), |piece| piece.len()) {
                    let bytes = match piece {
                        PieceMut::Memory(bytes) => bytes,
                        PieceMut::Tensor(part) if tensor.is_some_and(|tensor| tensor.shares_lock(*part)) => {
                            let Some(bytes) = memory.take(part.range()) else { break };
                            bytes
                        }
                        PieceMut::Tensor(_) => break,
                    };
                    rest.push(IoSliceMut::new(&mut bytes[skipped..]));
                }
                Ok(socket.read_vectored(&mut rest))
            };
            // Data is read together with its header, before the header is checked. If the header is that of another
            // call, the group has failed, and the contents of its tensors are undefined.
            let received = match tensor {
                Some(tensor) => tensor.write_all(receive)?,
                None => receive(&mut [])?,
            };
            match received {
                Ok(0) => return Err(TransportError::Closed { peer: self.peer, reason: "end of stream".into() }),
                Ok(received) => {
                    let had_head = self.done >= Header::BYTES;
                    self.done += received;
                    if !had_head && self.done >= Header::BYTES {
                        self.check_head()?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Progress::Blocked),
                Err(error) => return Err(TransportError::Closed { peer: self.peer, reason: error.to_string() }),
            }
        }
        Ok(Progress::Complete)
    }

    fn check_head(&self) -> Result<(), TransportError> {
        match self.head {
            Some(expected) if !Header::agree(expected, &self.received_head) => {
                Err(TransportError::Header { peer: self.peer, received: self.received_head })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    /// The two ends of a connection between ranks 0 and 1.
    fn pair() -> [Transport; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        [&near, &far].iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let transports = [(); 2].map(|()| Transport::new(2));
        assert!(transports[0].add(1, near) && transports[1].add(0, far));
        transports
    }

    #[test]
    fn what_goes_ahead_is_not_waited_for_and_not_repeated() {
        let [near, far] = pair();
        let deadline = Instant::now() + Duration::from_secs(120);
        let first: Vec<u8> = (0..100).collect();
        // More than any socket's buffers hold.
        let second: Vec<u8> = (0..32_u32 << 20).map(|index| (index % 251) as u8).collect();
        let mut flow = Outflow::new(1, None);
        flow.push(&first[..]);
        flow.push_ahead(&second[..]);
        // The peer does not read meanwhile.
        let mut sends = [flow];
        near.exchange(&mut sends, &mut [], deadline, &Arrival::default()).unwrap();
        let went = sends[0].ahead();
        assert!(went > 0 && went < second.len(), "{went}");
        let mut rest = Outflow::new(1, None);
        rest.resume(went);
        rest.push(&second[..]);
        let (mut got_first, mut got_second) = (vec![0; first.len()], vec![0; second.len()]);
        std::thread::scope(|scope| {
            scope.spawn(|| near.exchange(&mut [rest], &mut [], deadline, &Arrival::default()).unwrap());
            let mut flow = Inflow::new(0, None);
            flow.push(&mut got_first[..]);
            flow.push_ahead(&mut got_second[..]);
            let mut recvs = [flow];
            far.exchange(&mut [], &mut recvs, deadline, &Arrival::default()).unwrap();
            let came = recvs[0].ahead();
            let mut rest = Inflow::new(0, None);
            rest.resume(came);
            rest.push(&mut got_second[..]);
            far.exchange(&mut [], &mut [rest], deadline, &Arrival::default()).unwrap();
        });
        assert!(got_first == first && got_second == second);
    }
}
