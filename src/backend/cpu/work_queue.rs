//! A queue_of carries out the calls of one channel, one after the other, in the order in which they were started.
use super::algorithm::hosts::Bridge;
use super::algorithm::{self, Scratch, Tuning};
use super::group::{Channel, Group};
use super::in_flight::{Caller, InFlight};
use super::kernels::Reduction;
use super::lock;
use super::session::Session;
use super::shm::ShmGroup;
use super::storage::Region;
use crate::backend::call::{Call, Header};
use crate::backend::{Collective, Completion, Work};
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// A queue of calls and, once one was started without waiting for it, a thread that works through them.
pub(super) struct WorkQueue {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    group: Arc<Group>,
    channel: Channel,
    tuning: Tuning,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Locked by whoever has set `busy`.
    scratch: Mutex<Scratch>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The sequence number of the last call that was started.
    sequence: u64,
    /// A thread, the queue_of's or a caller's, is carrying out a call.
    busy: bool,
    /// No more calls will come.
    closing: bool,
}

struct Job {
    header: Header,
    collective: Collective,
    in_flight: InFlight,
    outcome: Arc<Outcome>,
}

impl WorkQueue {
    pub(super) fn new(group: Arc<Group>, channel: Channel, tuning: Tuning) -> Self {
        let shared = Shared {
            group,
            channel,
            tuning,
            queue: Mutex::default(),
            changed: Condvar::new(),
            scratch: Mutex::default(),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// Puts the call into the queue.
    pub(super) fn start(&self, call: Call, collective: Collective) -> Result<Work> {
        self.ensure_thread()?;
        let in_flight = self.caller(call).enter(&collective)?;
        let mut queue = lock(&self.shared.queue);
        let header = self.shared.number(&mut queue, call)?;
        let outcome = Arc::new(Outcome::default());
        queue.jobs.push_back(Job { header, collective, in_flight, outcome: outcome.clone() });
        drop(queue);
        self.shared.changed.notify_all();
        Ok(Work::new(Pending(outcome)))
    }

    /// Carries out the call and waits for it: on the calling thread when no other call is before it.
    pub(super) fn run(&self, call: Call, collective: Collective) -> Result<()> {
        self.caller(call).compare(&collective)?;
        let mut queue = lock(&self.shared.queue);
        if queue.busy || !queue.jobs.is_empty() {
            drop(queue);
            return self.start(call, collective)?.wait();
        }
        let header = self.shared.number(&mut queue, call)?;
        let turn = self.shared.take_turn(queue);
        let deadline = deadline_after(self.shared.group.timeout);
        Ok(turn.execute(header, &collective, deadline)?)
    }

    /// The call of sequence number 0, on the calling thread: the end of the construction.
    pub(super) fn run_first(&self, call: Call, collective: &Collective, deadline: Instant) -> Result<()> {
        let header = Header { sequence: 0, call };
        self.shared.group.start(self.shared.channel, header)?;
        let turn = self.shared.take_turn(lock(&self.shared.queue));
        Ok(turn.execute(header, collective, deadline)?)
    }

    fn caller(&self, call: Call) -> Caller {
        Caller { queue: Arc::as_ptr(&self.shared).addr(), rank: self.shared.group.rank, call }
    }

    fn ensure_thread(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let name = match shared.channel {
                Channel::Collectives => format!("ddp-{}-engine", shared.group.rank),
                Channel::SendTo(peer) => format!("ddp-{}-to-{peer}", shared.group.rank),
                Channel::RecvFrom(peer) => format!("ddp-{}-from-{peer}", shared.group.rank),
            };
            let builder = std::thread::Builder::new().name(name);
            let spawned =
                builder.spawn(move || shared.work()).map_err(|e| Error::io("starting an engine thread", e))?;
            *thread = Some(spawned);
        }
        Ok(())
    }

    /// Waits until all calls are over, at most until `deadline`; whether they are.
    pub(super) fn drain(&self, deadline: Instant) -> bool {
        let mut queue = lock(&self.shared.queue);
        while queue.busy || !queue.jobs.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the thread, after the calls in the queue.
    pub(super) fn close(&self) {
        lock(&self.shared.queue).closing = true;
        self.shared.changed.notify_all();
        let thread = lock(&self.thread).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("rank {}: an engine thread panicked", self.shared.group.rank);
        }
    }
}

impl Shared {
    /// Gives the call the next number, unless the group has failed.
    fn number(&self, queue: &mut Queue, call: Call) -> Result<Header, Failure> {
        let header = Header { sequence: queue.sequence + 1, call };
        self.group.start(self.channel, header)?;
        queue.sequence += 1;
        Ok(header)
    }

    fn take_turn<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> Turn<'a> {
        queue.busy = true;
        Turn(self)
    }

    /// The queue_of's thread.
    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                if !queue.busy
                    && let Some(job) = queue.jobs.pop_front()
                {
                    break job;
                }
                if queue.closing && !queue.busy {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            let turn = self.take_turn(queue);
            let begin = Instant::now();
            let Job { header, collective, in_flight, outcome } = job;
            let result = turn.execute(header, &collective, deadline_after(self.group.timeout));
            let span = (begin, Instant::now());
            drop(turn);
            drop(in_flight);
            // The tensors are the caller's alone before it hears of it.
            drop(collective);
            *lock(&outcome.result) = Some((result, span));
            outcome.over.notify_all();
        }
    }
}

/// The right to carry out a call, until it is dropped.
struct Turn<'a>(&'a Shared);

impl Turn<'_> {
    fn execute(&self, header: Header, collective: &Collective, deadline: Instant) -> Result<(), Failure> {
        let Shared { group, channel, tuning, scratch, .. } = self.0;
        group.begin(*channel, header.sequence)?;
        // A panic, which would be a mistake in this engine, must not leave those waiting who queue behind it.
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut session = Session::new(group, *channel, header, deadline);
            let hosts = &group.hosts;
            match (&group.shm, collective) {
                (Some(shm), Collective::Send { peer, .. } | Collective::Recv { peer, .. })
                    if hosts.member(*peer).is_some() =>
                {
                    execute_shared(&session, shm, *tuning, header.call, collective)
                }
                (Some(shm), _) if hosts.count() == 1 => execute_shared(&session, shm, *tuning, header.call, collective),
                (shm, _) if *channel == Channel::Collectives && !hosts.are_single() => {
                    let streams = shm.as_ref().map(|shm| session.streams(shm));
                    let mut bridge = Bridge::new(&mut session, streams, *tuning);
                    algorithm::hosts::execute(&mut bridge, &mut lock(scratch), header.call, collective)
                }
                _ => execute(&mut session, &mut lock(scratch), *tuning, header.call, collective),
            }
        }));
        group.finish(*channel, header.sequence, matches!(result, Ok(Ok(()))));
        result.unwrap_or_else(|_| {
            let reason = format!("{}: its engine panicked", header.call);
            Err(group.fail(Failure::PeerFailed { peer: group.rank, reason }))
        })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.queue).busy = false;
        self.0.changed.notify_all();
    }
}

/// Carries out a call through shared memory.
fn execute_shared(
    session: &Session,
    shm: &ShmGroup,
    tuning: Tuning,
    call: Call,
    collective: &Collective,
) -> Result<(), Failure> {
    let locking = session.locking();
    match collective {
        Collective::Send { tensor, peer } => session.send_shared(shm, Region::of(tensor, locking), *peer),
        Collective::Recv { tensor, peer } => session.receive_shared(shm, Region::of(tensor, locking), *peer),
        _ => {
            let result = algorithm::shared::execute(&mut session.streams(shm), locking, tuning, call, collective);
            result.map_err(|error| session.failure_inside(error))
        }
    }
}

/// Carries out a call over TCP.
fn execute(
    session: &mut Session,
    scratch: &mut Scratch,
    tuning: Tuning,
    call: Call,
    collective: &Collective,
) -> Result<(), Failure> {
    use algorithm as by;
    let Some(element) = call.element else { return by::barrier(session) };
    let is_root = call.root == Some(session.rank());
    let ranks = session.world_size();
    let reduction = |op: &_| Reduction { element, op: *op, ranks };
    let locking = session.locking();
    let region = |tensor| Region::of(tensor, locking);
    match collective {
        Collective::AllReduce { tensor, op } => by::all_reduce(session, scratch, tuning, region(tensor), reduction(op)),
        Collective::Broadcast { tensor, .. } if is_root => {
            let owners: Vec<usize> = session.peers().collect();
            by::broadcast_from_here(session, tuning, &owners, region(tensor), element)
        }
        Collective::Broadcast { tensor, root } => {
            let owners: Vec<usize> = (0..ranks).filter(|rank| rank != root).collect();
            by::broadcast_to_here(session, tuning, (*root, &owners), region(tensor), element)
        }
        Collective::Reduce { tensor, op, .. } if is_root => {
            by::reduce_to_here(session, scratch, tuning, region(tensor), reduction(op))
        }
        Collective::Reduce { tensor: input, root, .. } | Collective::Gather { output: None, input, root } => {
            by::send(session, region(input), *root)
        }
        Collective::Gather { output: Some(output), input, .. } => {
            by::gather_to_here(session, region(output), region(input))
        }
        Collective::Scatter { output, input: Some(input), .. } => {
            by::scatter_from_here(session, region(output), region(input))
        }
        Collective::Scatter { output, input: None, root } => by::receive(session, region(output), *root),
        Collective::AllGather { output, input } => by::all_gather(session, region(output), region(input)),
        Collective::ReduceScatter { output, input, op } => {
            by::reduce_scatter(session, scratch, tuning, (region(output), region(input)), reduction(op))
        }
        Collective::AllToAll { output, input } => by::all_to_all(session, region(output), region(input)),
        Collective::Send { tensor, peer } => by::send(session, region(tensor), *peer),
        Collective::Recv { tensor, peer } => by::receive(session, region(tensor), *peer),
        Collective::Barrier => by::barrier(session),
    }
}

/// How a call in the queue ended, once it has, and when it was carried out.
#[derive(Default)]
struct Outcome {
    result: Mutex<Option<(Result<(), Failure>, Span)>>,
    over: Condvar,
}

/// From when to when.
type Span = (Instant, Instant);

/// The caller's end.
struct Pending(Arc<Outcome>);

impl Completion for Pending {
    fn wait(&self) -> Result<()> {
        let mut result = lock(&self.0.result);
        loop {
            if let Some((result, _)) = &*result {
                return Ok(result.clone()?);
            }
            result = self.0.over.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_completed(&self) -> bool {
        lock(&self.0.result).is_some()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        lock(&self.0.result).as_ref().map(|(_, span)| *span)
    }
}
