//! The thread that reads the control connections.
use super::frame::FrameReader;
use super::gone::Ended;
use super::group::Group;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;

/// Reads and answers the frames of all peers until the group tells it to end.
pub(super) fn run(group: &Group) -> Result<(), Errno> {
    let mut readers: Vec<Option<FrameReader>> =
        (0..group.world_size).map(|peer| group.control.link(peer).map(|_| FrameReader::default())).collect();
    while !group.is_over() {
        // The open connections, and the events for which each is polled.
        let mut open = Vec::new();
        let mut fds = vec![PollFd::new(group.control.woken(), PollFlags::IN)];
        for (peer, _) in readers.iter().enumerate().filter(|(_, reader)| reader.is_some()) {
            let Some(link) = group.control.link(peer) else { continue };
            let flags = if link.has_unsent() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&link.socket, flags));
            open.push((peer, link));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        group.control.settle();
        for ((peer, link), fd) in open.into_iter().zip(&fds[1..]) {
            if fd.revents().contains(PollFlags::OUT) {
                link.flush();
            }
            if fd.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
                && let Some(reader) = &mut readers[peer]
                && let Err(ended) = read(group, peer, &link.socket, reader)
            {
                readers[peer] = None;
                group.on_closed(peer, ended);
            }
        }
    }
    Ok(())
}

/// Handles all frames that have arrived.
fn read(group: &Group, peer: usize, mut socket: &TcpStream, reader: &mut FrameReader) -> Result<(), Ended> {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return Err(Ended::Closed),
            Ok(count) => reader.push(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(Ended::Broken(error)),
        }
        while let Some(frame) = reader.next().map_err(|_| Ended::Malformed)? {
            group.on_frame(peer, frame);
        }
    }
}
