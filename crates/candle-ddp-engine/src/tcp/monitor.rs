//! The thread that reads the control connections, and attends to the door.
use crate::gone::Ended;
use crate::group::Group;
use crate::tcp::door::Door;
use crate::tcp::frame::FrameReader;
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::Duration;

/// Reads and answers the frames of all peers, and makes connections, until the group tells it to end.
pub(crate) fn run(group: &Group, door: Door) -> Result<()> {
    // By connection; `None` once it has ended.
    let mut readers: HashMap<(usize, usize), Option<FrameReader>> = HashMap::new();
    let mut door = Some(door);
    while !group.is_over() {
        door.iter_mut().for_each(|door| group.attend(door));
        let is_connecting = door.as_ref().is_some_and(Door::is_connecting);
        let heard = group.look_up(is_connecting);
        // The open connections, and the events for which each is polled.
        let mut open = Vec::new();
        let mut fds = vec![PollFd::new(group.control.woken(), PollFlags::IN)];
        for (place, link) in group.control.links() {
            if readers.entry(place).or_insert_with(|| Some(FrameReader::default())).is_none() {
                continue;
            }
            let flags = if link.has_unsent() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&link.socket, flags));
            open.push((place, link));
        }
        let patience = door.as_ref().and_then(|door| door.prepare(&mut fds));
        let patience = if heard.is_empty() { patience } else { Some(Duration::ZERO) };
        match poll(&mut fds, patience.and_then(|patience| Timespec::try_from(patience).ok()).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Error::io("waiting for messages of other hosts", error)),
        }
        group.control.settle();
        let events: Vec<PollFlags> = fds[1..].iter().map(PollFd::revents).collect();
        drop(fds);
        if let Some(open) = &mut door {
            let stepped = open.step();
            // A peer that has connected, sent its data, and ended is heard in this order.
            group.attend(open);
            match stepped {
                Err(error) if !group.has_failed() => return Err(error),
                Err(_) => door = None,
                Ok(()) => {}
            }
        }
        heard.into_iter().for_each(|news| group.on_news(news));
        for ((place, link), events) in open.into_iter().zip(events) {
            if events.contains(PollFlags::OUT) {
                link.flush();
            }
            let (peer, _) = place;
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
                && let Some(Some(reader)) = readers.get_mut(&place)
                && let Err(ended) = read(group, peer, &link.socket, reader)
            {
                readers.insert(place, None);
                group.on_closed(peer, ended);
            }
        }
    }
    Ok(())
}

/// The number of times that a connection is read before it is the turn of the others.
const TURN: usize = 64;

/// Handles the frames that have arrived, as many as one turn allows.
fn read(
    group: &Group,
    peer: usize,
    mut socket: &TcpStream,
    reader: &mut FrameReader,
) -> std::result::Result<(), Ended> {
    let mut buffer = [0; 4096];
    for _ in 0..TURN {
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
    Ok(())
}
