//! The control connections: small frames between the monitors of two ranks on different hosts.
use crate::panic::lock;
use crate::tcp::frame::Frame;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock};

/// The control connections to ranks of other hosts. Any thread may send; only the monitor reads.
pub(crate) struct Control {
    /// By rank; empty for the ranks of this host, and for those that this rank has never needed. There are two if both have
    /// called at the same time: the higher rank's call, and the lower one's.
    links: Vec<[OnceLock<Link>; 2]>,
    /// Wakes the monitor from its poll: one end is written to, the other one is polled.
    wake: UnixStream,
    woken: UnixStream,
}

/// The bytes that may wait for a peer before it gets no more answers. A peer that asks reads them, and all the reports of a large
/// host are less.
const UNREAD: usize = 8 << 20;

pub(crate) struct Link {
    pub(crate) socket: TcpStream,
    /// Bytes that the socket has not accepted yet.
    unsent: Mutex<Vec<u8>>,
    /// The addresses of both ends, read early because a socket with an error no longer returns them.
    hosts: String,
}

impl Control {
    /// Without connections.
    pub(crate) fn new(world_size: usize) -> std::io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Self { links: (0..world_size).map(|_| Default::default()).collect(), wake, woken })
    }

    /// Takes a non-blocking connection to `peer`, for which the higher rank of the two has called, or else the lower one.
    /// Returns whether it is the first one.
    pub(crate) fn add(&self, peer: usize, socket: TcpStream, by_higher: bool) -> bool {
        let address = |end: std::io::Result<SocketAddr>| {
            end.map_or_else(|_| "an unknown address".to_string(), |address| address.ip().to_string())
        };
        let hosts = format!("from {} to {}", address(socket.local_addr()), address(socket.peer_addr()));
        let place = self.links.get(peer).map(|links| &links[usize::from(!by_higher)]);
        place.is_some_and(|place| place.set(Link { socket, unsent: Mutex::default(), hosts }).is_ok())
    }

    /// The connection on which frames are sent to `peer`.
    pub(crate) fn link(&self, peer: usize) -> Option<&Link> {
        self.links.get(peer)?.iter().find_map(OnceLock::get)
    }

    /// All connections, with their peers and numbers.
    pub(crate) fn links(&self) -> impl Iterator<Item = ((usize, usize), &Link)> {
        let numbered = self.links.iter().enumerate();
        let all = numbered.flat_map(|(peer, links)| [0, 1].map(|number| ((peer, number), links[number].get())));
        all.filter_map(|(place, link)| Some((place, link?)))
    }

    /// The addresses of both ends of the connection to `peer`, in words.
    pub(crate) fn hosts(&self, peer: usize) -> &str {
        self.link(peer).map_or("which was not made", |link| &link.hosts)
    }

    /// Sends `frame` without waiting; the monitor sends what the socket does not accept at once.
    pub(crate) fn send(&self, peer: usize, frame: &Frame) {
        let Some(link) = self.link(peer) else { return };
        let mut unsent = lock(&link.unsent);
        if let Frame::Answer { .. } = frame
            && unsent.len() >= UNREAD
        {
            return;
        }
        unsent.extend_from_slice(&frame.encode());
        link.write(&mut unsent);
        if !unsent.is_empty() {
            self.wake();
        }
    }

    pub(crate) fn wake(&self) {
        // If the pipe is full, the monitor has been woken often enough.
        let _ = (&self.wake).write(&[0]);
    }

    /// Readable after [`wake`](Self::wake), until [`settle`](Self::settle).
    pub(crate) fn woken(&self) -> &UnixStream {
        &self.woken
    }

    pub(crate) fn settle(&self) {
        let mut buffer = [0; 64];
        while matches!((&self.woken).read(&mut buffer), Ok(1..)) {}
    }
}

impl Link {
    pub(crate) fn has_unsent(&self) -> bool {
        !lock(&self.unsent).is_empty()
    }

    /// Sends what the socket did not accept before.
    pub(crate) fn flush(&self) {
        self.write(&mut lock(&self.unsent));
    }

    fn write(&self, unsent: &mut Vec<u8>) {
        while !unsent.is_empty() {
            match (&self.socket).write(unsent) {
                Ok(sent) => drop(unsent.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The connection is broken, which the monitor notices when it reads.
                Err(_) => unsent.clear(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Failure;
    use std::net::TcpListener;

    #[test]
    fn answers_for_a_peer_that_does_not_read_take_a_bounded_memory() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let control = Control::new(2).unwrap();
        assert!(control.add(1, socket, true));
        let answer = Frame::Answer { id: 1, rank: 0, report: vec![0; 30_000] };
        let (length, unsent) = (answer.encode().len(), || lock(&control.link(1).unwrap().unsent).len());
        // The system takes some as well.
        (0..(UNREAD + (64 << 20)) / length).for_each(|_| control.send(1, &answer));
        let full = unsent();
        assert!((UNREAD..UNREAD + length).contains(&full), "{full}");
        // It still learns why the group ends.
        control.send(1, &Frame::Abort(Failure::PeerFailed { peer: 0, reason: "out of memory".into() }));
        assert!(unsent() > full);
    }
}
