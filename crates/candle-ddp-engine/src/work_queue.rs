//! A work queue runs the calls of one channel, one after the other, in the order in which they were started.
use crate::Result;
use crate::algorithm::{Flat, Hierarchical, Scratch, Shm, Tuning, dispatch};
use crate::arrival::Arrival;
use crate::call::{Call, Channel, Header};
use crate::deadline::deadline_from;
use crate::error::Failure;
use crate::group::Group;
use crate::operands::{Operands, Tensors};
use crate::panic::{lock, wait, wait_timeout};
use crate::session::Session;
use crate::shm::session::ShmSession;
use crate::tcp::session::TcpSession;
use crate::thread::spawn;
use candle_ddp_base::debug_fields;
use candle_ddp_rendezvous::count_wait;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A queue of calls, which run one after another. It gets a thread with the first call that is not waited for at once.
pub struct WorkQueue {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    group: Arc<Group>,
    channel: Channel,
    tuning: Tuning,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Locked by the thread that has set `busy`.
    scratch: Mutex<Scratch>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The sequence number of the last call that was started.
    sequence: u64,
    /// A thread, the queue's own or a caller's, is running a call.
    busy: bool,
    /// No more calls will come.
    closing: bool,
}

struct Job {
    header: Header,
    tensors: Box<dyn Tensors>,
    outcome: Arc<Outcome>,
}

debug_fields!(WorkQueue: |this| channel = this.shared.channel);

impl WorkQueue {
    pub(crate) fn new(group: Arc<Group>, channel: Channel, tuning: Tuning) -> Self {
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

    /// A number that identifies the queue in this process.
    #[inline]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Puts a call into the queue. The tensors are dropped before the call counts as complete.
    ///
    /// # Errors
    /// Returns the failure of the group, if it has failed, or the error of [`prepare`](Self::prepare).
    pub fn start(&self, call: Call, tensors: Box<dyn Tensors>) -> Result<Work> {
        self.prepare()?;
        let mut queue = lock(&self.shared.queue);
        let header = self.shared.number(&mut queue, call, None)?;
        let outcome = Arc::new(Outcome {
            result: Mutex::default(),
            over: Condvar::new(),
            group: Arc::downgrade(&self.shared.group),
            place: (self.shared.channel, header.sequence),
        });
        queue.jobs.push_back(Job { header, tensors, outcome: outcome.clone() });
        drop(queue);
        self.shared.changed.notify_all();
        Ok(Work(outcome))
    }

    /// Runs a call on the calling thread. Returns `None`, without doing anything, if other calls come before it: it must then
    /// be [started](Self::start).
    pub fn run(&self, call: Call, operands: Operands) -> Option<Result<(), Failure>> {
        let mut queue = lock(&self.shared.queue);
        if queue.busy || !queue.jobs.is_empty() {
            return None;
        }
        let begun = Instant::now();
        let header = match self.shared.number(&mut queue, call, Some(begun)) {
            Ok(header) => header,
            Err(failure) => return Some(Err(failure)),
        };
        let turn = self.shared.take_turn(queue);
        let deadline = deadline_from(begun, self.shared.group.timeout);
        let arrival = Arrival::default();
        let result = turn.execute(header, operands, (begun, deadline), &arrival, None);
        count_wait_of(begun, self.shared.last_of(&arrival));
        Some(result)
    }

    /// Runs the call with sequence number 0, which ends the construction, on the calling thread.
    pub(crate) fn run_first(&self, call: Call, deadline: Instant) -> Result<(), Failure> {
        let (header, begun) = (Header { sequence: 0, call }, Instant::now());
        self.shared.group.start(self.shared.channel, header, Some(begun))?;
        let turn = self.shared.take_turn(lock(&self.shared.queue));
        turn.execute(header, Operands::default(), (begun, deadline), &Arrival::default(), None)
    }

    /// Gets ready for [`start`](Self::start), which then fails only if the group has failed.
    ///
    /// # Errors
    /// Returns an error if the system starts no thread.
    pub fn prepare(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let name = match shared.channel {
                Channel::Collectives => format!("ddp-{}-engine", shared.group.rank),
                Channel::SendTo(peer) => format!("ddp-{}-to-{peer}", shared.group.rank),
                Channel::RecvFrom(peer) => format!("ddp-{}-from-{peer}", shared.group.rank),
            };
            *thread = Some(spawn(name, move || shared.work())?);
        }
        Ok(())
    }

    /// Waits until all calls are complete, at most until `deadline`. Returns whether they are.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut queue = lock(&self.shared.queue);
        let is_idle = !queue.busy && queue.jobs.is_empty();
        let _waiting = (!is_idle).then(|| self.shared.group.waiting(self.shared.channel, queue.sequence));
        while queue.busy || !queue.jobs.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue = wait_timeout(&self.shared.changed, queue, left);
        }
        true
    }

    /// Ends the thread after the calls in the queue.
    pub(crate) fn close(&self) {
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
    fn number(&self, queue: &mut Queue, call: Call, at: Option<Instant>) -> Result<Header, Failure> {
        let header = Header { sequence: queue.sequence + 1, call };
        self.group.start(self.channel, header, at)?;
        queue.sequence += 1;
        Ok(header)
    }

    /// When the last of the other ranks came to a collective, if this rank has had to wait. A message waits for one rank, which may
    /// have something else to do.
    fn last_of(&self, arrival: &Arrival) -> Option<Instant> {
        arrival.last().filter(|_| self.channel == Channel::Collectives)
    }

    fn take_turn<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> Turn<'a> {
        queue.busy = true;
        Turn(self)
    }

    /// The body of the queue's thread.
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
                queue = wait(&self.changed, queue);
            };
            let turn = self.take_turn(queue);
            let begun = Instant::now();
            let Job { header, tensors, outcome } = job;
            let deadline = deadline_from(begun, self.group.timeout);
            let mut ended = begun;
            let mut result = None;
            let arrival = Arrival::default();
            tensors.with(&mut |operands| {
                result = Some(turn.execute(header, operands, (begun, deadline), &arrival, Some(&mut ended)));
            });
            let result = result.unwrap_or_else(|| {
                let reason = format!("{}: its tensors could not be reached", header.call);
                Err(self.group.fail(Failure::PeerFailed { peer: self.group.rank, reason }))
            });
            let ran = Ran { begun, arrived: self.last_of(&arrival), ended };
            drop(turn);
            // The caller is told only after the engine has released its tensors.
            drop(tensors);
            *lock(&outcome.result) = Some((result, ran));
            outcome.over.notify_all();
        }
    }
}

/// The right to run a call, until it is dropped.
struct Turn<'a>(&'a Shared);

impl Turn<'_> {
    /// Runs the call, which has begun at `begun`. When the other ranks have come goes into `arrival` and, if the caller wants
    /// to know, when the call ended into `ended`.
    fn execute(
        &self,
        header: Header,
        operands: Operands,
        (begun, deadline): (Instant, Instant),
        arrival: &Arrival,
        ended: Option<&mut Instant>,
    ) -> Result<(), Failure> {
        let Shared { group, channel, tuning, scratch, .. } = self.0;
        group.begin(*channel, header.sequence, begun)?;
        // A panic would be a bug in this engine. The calls queued behind it must not wait forever.
        let result = catch_unwind(AssertUnwindSafe(|| {
            let session = Session { group, channel: *channel, header, deadline, arrival };
            let shm = group.shm.as_ref().map(|shm| ShmSession { session, shm });
            let tuning = *tuning;
            match shm {
                Some(shm) if group.hosts.count() == 1 => dispatch(session, operands, &mut Shm { session: shm, tuning }),
                _ if group.hosts.are_single() => {
                    let (session_over_tcp, scratch) = (TcpSession::new(session), &mut lock(scratch));
                    dispatch(session, operands, &mut Flat { session: session_over_tcp, scratch, tuning })
                }
                shm => dispatch(session, operands, &mut Hierarchical::new(session, shm, &mut lock(scratch), tuning)),
            }
        }));
        let at = ended.map(|ended| {
            *ended = Instant::now();
            *ended
        });
        let since = |last: Instant| last.saturating_duration_since(begun);
        let waited = (*channel == Channel::Collectives).then(|| self.0.last_of(arrival).map_or(Duration::ZERO, since));
        group.finish(*channel, header.sequence, matches!(result, Ok(Ok(()))), at, waited);
        group.look_at_call_sites(&header);
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

/// Counts the time for which the program has stood still, from `since` until the last of the other ranks had come to a call.
fn count_wait_of(since: Instant, arrived: Option<Instant>) {
    if let Some(arrived) = arrived {
        count_wait(arrived.saturating_duration_since(since));
    }
}

/// How a queued call ended, and when it ran.
struct Outcome {
    /// Empty until the call is over.
    result: Mutex<Option<(Result<(), Failure>, Ran)>>,
    over: Condvar,
    group: Weak<Group>,
    /// The number of the call in its group.
    place: (Channel, u64),
}

/// When a call ran.
#[derive(Clone, Copy)]
struct Ran {
    begun: Instant,
    /// When the last of the other ranks had come to it, if this rank has had to wait.
    arrived: Option<Instant>,
    ended: Instant,
}

/// A queued call.
#[derive(Clone)]
pub struct Work(Arc<Outcome>);

impl Work {
    /// Waits until the call is complete and its tensors are released.
    ///
    /// # Errors
    /// Returns the failure of the call, or of the group before it.
    pub fn wait(&self) -> Result<(), Failure> {
        if let Some((result, _)) = &*lock(&self.0.result) {
            return result.clone();
        }
        let (group, (channel, sequence)) = (self.0.group.upgrade(), self.0.place);
        let _waiting = group.as_ref().map(|group| group.waiting(channel, sequence));
        let since = Instant::now();
        let mut result = lock(&self.0.result);
        loop {
            if let Some((result, ran)) = &*result {
                // The rank has waited only since the program has nothing else to do.
                count_wait_of(ran.begun.max(since), ran.arrived);
                return result.clone();
            }
            result = wait(&self.0.over, result);
        }
    }

    /// Whether the call is complete (even if it failed), without waiting.
    pub fn is_completed(&self) -> bool {
        lock(&self.0.result).is_some()
    }

    /// When execution started and finished; `None` before the call is complete.
    pub fn span(&self) -> Option<(Instant, Instant)> {
        lock(&self.0.result).as_ref().map(|(_, ran)| (ran.begun, ran.ended))
    }
}

debug_fields!(Work: |this| is_completed = this.is_completed());
