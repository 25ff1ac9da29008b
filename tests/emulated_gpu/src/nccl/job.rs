//! The calls of a communicator that run together on a stream, like a single kernel.
use super::communicator::Communicator;
use super::peer_info::pretences;
use super::wire::{Call, Kind, call_header, read_answer_header};
use super::{Code, Outcome, failure};
use crate::stream::Stream;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;

/// A call with the addresses of its buffers. NCCL's caller guarantees that they are valid until the stream has executed
/// the call, and that nothing else accesses them in the meantime.
#[derive(Clone, Copy)]
pub(super) struct Queued {
    pub(super) call: Call,
    pub(super) send: usize,
    pub(super) receive: usize,
}

/// Checks that a rank's messages to itself have both halves in the same group.
pub(super) fn check(communicator: &Communicator, calls: &[(Arc<Stream>, Queued)]) -> Outcome<()> {
    let own = |kind| {
        let calls = calls.iter().map(|(_, queued)| queued.call);
        let to_self = calls.filter(move |call| call.kind == kind && call.peer == communicator.rank);
        to_self.map(|call| (call.count, call.dtype)).collect::<Vec<_>>()
    };
    if own(Kind::Send) == own(Kind::Recv) {
        return Ok(());
    }
    Err(failure(Code::InvalidUsage, "a rank sends to itself without a matching recv in the same group, or the reverse"))
}

/// Whether the launch of these calls never ends, as if a peer did not connect: of messages, if the environment says so.
pub(super) fn is_stuck<'a>(mut calls: impl Iterator<Item = &'a Queued>) -> bool {
    pretences().stuck && calls.any(|queued| matches!(queued.call.kind, Kind::Send | Kind::Recv))
}

/// Whether all ranks take part in these calls, so that the first ones connect them.
pub(super) fn connects(communicator: &Communicator, calls: &[(Arc<Stream>, Queued)]) -> bool {
    let is_message = |(_, queued): &(_, Queued)| matches!(queued.call.kind, Kind::Send | Kind::Recv);
    // Some of this crate's own tests make the calls of several ranks one after the other.
    !cfg!(test) && !calls.is_empty() && (communicator.size == 2 || !calls.iter().all(is_message))
}

/// Puts the calls on their streams as one job: all of these streams wait for its start and its end.
pub(super) fn launch(communicator: &Arc<Communicator>, calls: Vec<(Arc<Stream>, Queued)>) {
    let mut streams: Vec<Arc<Stream>> = Vec::new();
    for (stream, _) in &calls {
        if !streams.iter().any(|known| Arc::ptr_eq(known, stream)) {
            streams.push(stream.clone());
        }
    }
    let Some((first, others)) = streams.split_first() else { return };
    let (number, communicator) = (communicator.launch(), communicator.clone());
    let calls: Vec<Queued> = calls.into_iter().map(|(_, queued)| queued).collect();
    // Nothing is sent: a receiver waits until all of its senders are dropped.
    let (arrived, arrivals) = channel::<()>();
    let mut over = Vec::new();
    for other in others {
        let ((end, ended), arrived) = (channel::<()>(), arrived.clone());
        over.push(end);
        other.push(move || {
            drop(arrived);
            let _ = ended.recv();
        });
    }
    drop(arrived);
    first.push(move || {
        let _ = arrivals.recv();
        run(&communicator, number, &calls);
        drop(over);
    });
}

/// Returns when the job has ended, or hangs until an abort.
fn run(communicator: &Communicator, number: u64, calls: &[Queued]) {
    let Ok(connection) = communicator.await_turn(number) else { return communicator.hang() };
    communicator.resident(|| {
        communicator.linger(pretences().delay);
        let done = if calls.iter().any(|_| fails()) {
            let text = "a fault was injected by EMULATED_NCCL_FAIL_AFTER";
            communicator.fail(failure(Code::SystemError, text));
            false
        } else {
            exchange(communicator, &connection, calls).is_ok()
        };
        if done { communicator.pass() } else { communicator.hang() }
    });
}

/// Counts the calls of this process and returns whether this one must fail.
fn fails() -> bool {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed) + 1 == pretences().fail_after
}

/// Sends everything to the hub before receiving anything, so that no call of the job waits for another one.
fn exchange(communicator: &Communicator, mut connection: &UnixStream, calls: &[Queued]) -> Result<()> {
    let Communicator { rank, size, .. } = *communicator;
    for (index, queued) in calls.iter().enumerate() {
        connection.write_all(&call_header(index, &queued.call))?;
        let bytes = queued.call.given(rank, size);
        if bytes > 0 {
            // SAFETY: NCCL's caller provides a buffer of this size, to which nothing writes until the stream has
            // executed this job.
            connection.write_all(unsafe { std::slice::from_raw_parts(queued.send as *const u8, bytes) })?;
        }
    }
    for _ in calls {
        let (index, bytes) = read_answer_header(connection)?;
        let strange = || Error::new(ErrorKind::InvalidData, "an unexpected reply");
        let queued = calls.get(index).filter(|queued| queued.call.taken(rank, size) == bytes).ok_or_else(strange)?;
        if bytes > 0 {
            // SAFETY: NCCL's caller provides a buffer of this size, which nothing else uses until the stream has
            // executed this job. No slice of a send buffer, which may be the same memory, exists any more.
            let received = unsafe { std::slice::from_raw_parts_mut(queued.receive as *mut u8, bytes) };
            connection.read_exact(received)?;
            if pretences().corrupt {
                received[bytes / 2] ^= 1;
            }
        }
    }
    Ok(())
}
