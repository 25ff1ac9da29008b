//! The hub of a communicator: threads in the process that created its id. All ranks connect to it, and it executes
//! their collective operations.
use super::exchange::{Exchange, Reply, Turn};
use super::wire::{Greeting, Message};
use super::{Code, Failure, failure, lock, system_error};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Result};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Starts the hub of a new communicator and returns its name.
pub(super) fn open() -> Result<String> {
    let (name, listener) = super::wire::listen()?;
    std::thread::Builder::new().name("nccl-hub".to_string()).spawn(move || accept(&listener))?;
    Ok(name)
}

/// Accepts connections until all ranks are connected. As in NCCL, an id that is never used keeps the thread for the
/// lifetime of the process.
fn accept(listener: &UnixListener) {
    let mut hub: Option<Arc<Hub>> = None;
    for stream in listener.incoming() {
        let mut stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                // Nobody else gets in, as in NCCL.
                if let Some(hub) = &hub {
                    lock(&hub.0).fail(system_error("accepting a connection", &error));
                }
                return;
            }
        };
        // A rank that dies here is noticed through its other connection, or never joins.
        let Ok(greeting) = Greeting::read(&mut stream) else { continue };
        let hub = hub.get_or_insert_with(|| Arc::new(Hub::new(greeting.size)));
        hub.admit(greeting, stream);
        if hub.is_complete() {
            return;
        }
    }
}

struct Hub(Mutex<State>);

struct State {
    seats: Vec<Seat>,
    failed: Option<Failure>,
    exchange: Exchange,
    /// The number of replies that are still to be sent.
    unsent: usize,
}

/// The hub's state of a rank.
#[derive(Default)]
struct Seat {
    /// The rank's process, once it has connected.
    process: Option<u32>,
    has_control: bool,
    has_data: bool,
    control: Option<UnixStream>,
    replies: Option<Sender<Reply>>,
    joined: Option<Joined>,
    split: Option<(i32, i32)>,
    connects: bool,
    finalized: bool,
    destroys: bool,
    /// Whether the rank knows that it is finalized and may close its connections.
    dismissed: bool,
}

struct Joined {
    device: i32,
    may_share: bool,
    host: String,
}

impl Seat {
    fn tell(&self, message: &Message) {
        if let Some(control) = &self.control {
            // The connection of a rank that has left is closed, which the thread that reads from it notices.
            let _ = message.send(control);
        }
    }

    fn tell_failure(&self, failure: Failure) {
        self.tell(&Message::Failed(told_to(self.process, failure)));
    }
}

/// Returns a failure as a rank in `process` sees it: a system error in the hub is remote, except for ranks in the hub's process.
fn told_to(process: Option<u32>, error: Failure) -> Failure {
    match error.code {
        Code::SystemError if process != Some(std::process::id()) => failure(Code::RemoteError, error.text),
        _ => error,
    }
}

impl Hub {
    fn new(size: usize) -> Self {
        let seats = (0..size).map(|_| Seat::default()).collect();
        Self(Mutex::new(State { seats, failed: None, exchange: Exchange::new(size), unsent: 0 }))
    }

    fn is_complete(&self) -> bool {
        lock(&self.0).seats.iter().all(|seat| seat.has_control && seat.has_data)
    }

    /// Accepts a new connection.
    fn admit(self: &Arc<Self>, greeting: Greeting, stream: UnixStream) {
        let Greeting { for_data, rank, size, process } = greeting;
        let mut state = lock(&self.0);
        let fits = size == state.seats.len() && rank < size;
        let taken = |seat: &Seat| if for_data { seat.has_data } else { seat.has_control };
        if !fits || taken(&state.seats[rank]) {
            let text = format!("rank {rank} of {size} is invalid or joined twice");
            let error = failure(Code::InvalidUsage, text);
            if !for_data {
                let _ = Message::Failed(error.clone()).send(&stream);
            }
            state.fail(error);
            return;
        }
        state.seats[rank].process = Some(process);
        let copy = match stream.try_clone() {
            Ok(copy) => copy,
            Err(error) => {
                let error = system_error("copying a connection", &error);
                if !for_data {
                    let _ = Message::Failed(told_to(Some(process), error.clone())).send(&stream);
                }
                return state.fail(error);
            }
        };
        let (seat, hub) = (&mut state.seats[rank], self.clone());
        if for_data {
            let (replies, queue) = channel();
            (seat.has_data, seat.replies) = (true, Some(replies));
            let answering = self.clone();
            std::thread::spawn(move || answering.answer(&queue, &copy));
            std::thread::spawn(move || hub.collect(rank, &stream));
        } else {
            (seat.has_control, seat.control) = (true, Some(copy));
            std::thread::spawn(move || hub.listen(rank, &stream));
        }
        state.start_if_complete();
    }

    /// Reads a rank's requests until it leaves.
    fn listen(&self, rank: usize, stream: &UnixStream) {
        for line in BufReader::new(stream).lines() {
            let Ok(line) = line else { break };
            let mut state = lock(&self.0);
            let seat = &mut state.seats[rank];
            match Message::parse(&line) {
                Some(Message::Join { device, may_share, host }) => {
                    seat.joined = Some(Joined { device, may_share, host });
                    match state.failed.clone() {
                        Some(error) => state.seats[rank].tell_failure(error),
                        None => state.start_if_complete(),
                    }
                }
                Some(Message::Split { color, key }) => {
                    seat.split = Some((color, key));
                    state.split_if_complete();
                }
                Some(Message::Connect) => {
                    seat.connects = true;
                    if state.seats.iter().all(|seat| seat.connects) {
                        state.seats.iter().for_each(|seat| seat.tell(&Message::Connected));
                    }
                }
                Some(Message::Finalize) => {
                    seat.finalized = true;
                    state.dismiss();
                }
                Some(Message::Destroy) => {
                    seat.destroys = true;
                    state.release(rank);
                }
                other => {
                    state.fail(failure(Code::InternalError, format!("unexpected message from rank {rank}: {other:?}")))
                }
            }
        }
        let mut state = lock(&self.0);
        let seat = &mut state.seats[rank];
        (seat.control, seat.replies) = (None, None);
        if !seat.dismissed {
            state.fail(failure(Code::RemoteError, format!("rank {rank} has closed its connection")));
        }
    }

    /// Reads a rank's calls, and executes those that all participating ranks have made.
    fn collect(&self, rank: usize, stream: &UnixStream) {
        while let Some(call) = super::exchange::read(stream, |call| {
            let size = lock(&self.0).seats.len();
            call.given(rank, size)
        }) {
            let turn = {
                let mut state = lock(&self.0);
                let turn = state.exchange.add(rank, call);
                state.unsent += turn.as_ref().map_or(0, Turn::replies);
                turn
            };
            // Runs without the lock, because it may take long.
            let Some(turn) = turn else { continue };
            for (rank, reply) in turn.carry_out() {
                let mut state = lock(&self.0);
                let sent = state.seats[rank].replies.as_ref().is_some_and(|replies| replies.send(reply).is_ok());
                if !sent {
                    state.unsent -= 1;
                }
            }
        }
    }

    /// Sends a rank its replies.
    fn answer(&self, queue: &Receiver<Reply>, stream: &UnixStream) {
        for reply in queue {
            // A rank that has left does not miss its replies.
            let _ = reply.send(stream);
            let mut state = lock(&self.0);
            state.unsent -= 1;
            state.dismiss();
        }
    }
}

impl State {
    /// Reports a failure to all ranks except those that have left properly.
    fn fail(&mut self, failure: Failure) {
        if self.failed.is_none() {
            self.failed = Some(failure.clone());
            let staying = self.seats.iter().filter(|seat| !seat.dismissed);
            staying.for_each(|seat| seat.tell_failure(failure.clone()));
        }
    }

    fn start_if_complete(&mut self) {
        let joined: Vec<&Joined> = self.seats.iter().filter_map(|seat| seat.joined.as_ref()).collect();
        if self.failed.is_some() || joined.len() < self.seats.len() || !self.seats.iter().all(|seat| seat.has_data) {
            return;
        }
        let clash = |a: &Joined, b: &Joined| a.host == b.host && a.device == b.device && !(a.may_share && b.may_share);
        let pairs = (0..joined.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
        if let Some((a, b)) = pairs.into_iter().find(|(a, b)| clash(joined[*a], joined[*b])) {
            let text = format!("Duplicate GPU detected: rank {a} and rank {b} are both on device {}", joined[a].device);
            return self.fail(failure(Code::InvalidUsage, text));
        }
        self.seats.iter().for_each(|seat| seat.tell(&Message::Ready));
    }

    fn split_if_complete(&mut self) {
        let asked: Vec<(i32, i32)> = self.seats.iter().filter_map(|seat| seat.split).collect();
        if asked.len() < self.seats.len() {
            return;
        }
        self.seats.iter_mut().for_each(|seat| seat.split = None);
        let mut colors: BTreeMap<i32, Vec<(i32, usize)>> = BTreeMap::new();
        for (rank, (color, key)) in asked.into_iter().enumerate() {
            colors.entry(color).or_default().push((key, rank));
        }
        for (color, mut members) in colors {
            if color < 0 {
                members.iter().for_each(|(_, rank)| self.seats[*rank].tell(&Message::Child(None)));
                continue;
            }
            members.sort_unstable();
            let name = match open() {
                Ok(name) => name,
                Err(error) => return self.fail(system_error("opening a socket for a split", &error)),
            };
            for (new_rank, (_, rank)) in members.iter().enumerate() {
                self.seats[*rank].tell(&Message::Child(Some((new_rank, members.len(), name.clone()))));
            }
        }
    }

    /// Lets the ranks on the host of `rank` go if all of them are being destroyed.
    fn release(&self, rank: usize) {
        let host = |seat: &Seat| seat.joined.as_ref().map(|joined| joined.host.clone());
        let host_of_rank = host(&self.seats[rank]);
        let here = || self.seats.iter().filter(|seat| host(seat) == host_of_rank);
        if here().all(|seat| seat.destroys) {
            here().for_each(|seat| seat.tell(&Message::Destroyed));
        }
    }

    /// Releases ranks whose host has finalized completely. Waits until all replies are sent, because the process of the
    /// hub may exit then.
    fn dismiss(&mut self) {
        if self.unsent > 0 || self.failed.is_some() {
            return;
        }
        let host = |seat: &Seat| seat.joined.as_ref().map(|joined| joined.host.clone());
        let staying: Vec<_> = self.seats.iter().filter(|seat| !seat.finalized).map(host).collect();
        let goes = |seat: &Seat| seat.finalized && !seat.dismissed && !staying.contains(&host(seat));
        let going: Vec<usize> = (0..self.seats.len()).filter(|rank| goes(&self.seats[*rank])).collect();
        going.iter().for_each(|rank| self.seats[*rank].dismissed = true);
        let own = std::process::id();
        let ours = |seat: &&Seat| seat.process == Some(own);
        if !going.is_empty() && self.seats.iter().filter(ours).all(|seat| seat.dismissed) {
            self.seats.iter().filter(|seat| !seat.dismissed).for_each(|seat| seat.tell(&Message::Orphaned));
        }
        going.iter().for_each(|rank| self.seats[*rank].tell(&Message::Finalized));
    }
}
