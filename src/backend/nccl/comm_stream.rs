//! A communicator and the stream for its calls, on which collectives are started.
use super::comm::{CancellationCheck, Comm, WaitError};
use super::group::{Fence, Group};
use super::prepared::Prepared;
use super::status::{NcclFailure, Status, version};
use super::stream::{Done, Event, Streams};
use super::threads::spawn;
use super::work::NcclWork;
use super::{cuda_error, cuda_failure};
use crate::backend::Completion;
use crate::error::Failure;
use crate::panic::{lock, wait};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// How long starting a collective waits for NCCL's launch. It takes microseconds, unless NCCL must first connect the ranks, which it
/// does in the first calls that need a connection, with all ranks.
const LAUNCH: Duration = Duration::from_millis(5);

/// The first version of NCCL whose calls in progress need no thread.
const STATE_OF_ITS_OWN: i32 = 22_703;

/// A call that is to be launched.
pub(super) struct Job {
    pub(super) prepared: Prepared,
    pub(super) ready: Event,
    pub(super) work: Arc<NcclWork>,
}

impl Job {
    /// Tells those that wait for the work that it is launched. Returns the work if nobody waits: the calling thread must not be the
    /// last to hold its tensors before the GPU has passed it.
    pub(super) fn set_launched(self, group: &Group) -> Option<NcclWork> {
        let done = Arc::clone(&self.work.done);
        let abandoned = Arc::into_inner(self.work);
        done.set_started();
        group.notify();
        abandoned
    }
}

pub(super) struct CommStream {
    /// Calls run in the order in which their threads had this lock.
    turn: Mutex<()>,
    /// `None` once the communicator was aborted or finalized. The lock lets one thread at a time call NCCL.
    open: Mutex<Option<Open>>,
    late: Mutex<Late>,
    /// Whether a thread launches all calls: before 2.27.3, NCCL keeps the state of a call in progress in the memory of the thread that
    /// made it, and uses it in an abort. A thread of the program may end before.
    always_late: bool,
    /// Whether NCCL is done with it.
    ended: Mutex<bool>,
    changed: Condvar,
    pub(super) streams: Streams,
}

struct Open {
    comm: Comm,
    /// Calls that failed after they had begun: NCCL may launch more parts of them until the communicator is aborted.
    stranded: Vec<Arc<NcclWork>>,
}

/// Calls that a thread launches, because NCCL still has to launch one before them.
#[derive(Default)]
struct Late {
    /// Whether the thread is at work, or has failed.
    is_active: bool,
    jobs: VecDeque<Job>,
    /// Works that it has launched and that nobody waits for, for the thread of the next call.
    abandoned: Vec<NcclWork>,
}

/// The right to start the next call of a [`CommStream`].
pub(super) struct Turn<'a> {
    comm_stream: &'a Arc<CommStream>,
    _guard: MutexGuard<'a, ()>,
}

impl CommStream {
    pub(super) fn new(comm: Comm, streams: Streams) -> Self {
        let open = Mutex::new(Some(Open { comm, stranded: Vec::new() }));
        let (turn, late, ended, changed) = (Mutex::default(), Mutex::default(), Mutex::default(), Condvar::new());
        let always_late = version().is_ok_and(|version| version < STATE_OF_ITS_OWN);
        Self { turn, open, late, always_late, ended, changed, streams }
    }

    pub(super) fn turn(self: &Arc<Self>) -> Turn<'_> {
        Turn { comm_stream: self, _guard: lock(&self.turn) }
    }

    /// Puts a call on the stream after its `ready`, followed by its work's fence. Waits until NCCL has launched it, at most for
    /// `patience`; [`finish`](Self::finish) does the rest.
    pub(super) fn launch(&self, group: &Group, job: &Job, patience: Option<Duration>) -> Result<Status, WaitError> {
        let mut open = lock(&self.open);
        let Some(Open { comm, .. }) = open.as_mut() else { return Err(gone(group)) };
        self.streams.bind().map_err(cuda_failure)?;
        self.streams.after(&job.ready).map_err(cuda_failure)?;
        self.streams.begin(&job.work.done).map_err(cuda_failure)?;
        // SAFETY: the work has the tensors, and lets go of them behind its fence.
        let launched = match unsafe { job.prepared.start(comm, self.streams.target()) } {
            Ok(Status::InProgress) => comm.settle_within(patience, STARTING, &mut || is_alive(group)),
            other => other.map_err(WaitError::from),
        };
        self.end_launch(&mut open, job, launched)
    }

    /// Waits for the rest of a launch.
    fn finish(&self, group: &Group, job: &Job) -> Result<Status, WaitError> {
        let mut open = lock(&self.open);
        let Some(Open { comm, .. }) = open.as_mut() else { return Err(gone(group)) };
        let launched = comm.settle_within(None, STARTING, &mut || is_alive(group));
        self.end_launch(&mut open, job, launched)
    }

    fn end_launch(
        &self,
        open: &mut Option<Open>,
        job: &Job,
        launched: Result<Status, WaitError>,
    ) -> Result<Status, WaitError> {
        if matches!(launched, Ok(Status::InProgress)) {
            return launched;
        }
        if launched.is_err() {
            open.iter_mut().for_each(|open| open.stranded.push(Arc::clone(&job.work)));
        }
        let ended = self.streams.end(&job.work.done).map_err(|error| cuda_failure(error).into());
        launched.and_then(|status| ended.map(|()| status))
    }

    /// On a thread: launches a call, or finishes the launch if it has `begun`, and launches those that were started in the meantime.
    fn launch_late(&self, group: &Group, mut job: Job, begun: bool) {
        let mut launched = if begun { self.finish(group, &job) } else { self.launch(group, &job, None) };
        loop {
            if let Err(error) = launched {
                error.end_group(group);
                return self.await_end();
            }
            let abandoned = job.set_launched(group);
            let mut late = lock(&self.late);
            late.abandoned.extend(abandoned);
            late.is_active = !late.jobs.is_empty();
            let Some(next) = late.jobs.pop_front() else { return };
            drop(late);
            launched = self.launch(group, &next, None);
            job = next;
        }
    }

    /// The error that has occurred since the last call. `None` while another thread is in a call, which notices the
    /// error itself.
    pub(super) fn error(&self) -> Option<String> {
        let mut open = match self.open.try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        open.as_mut()?.comm.status("a collective").err().map(|failure| failure.to_string())
    }

    /// Ends all its calls. Returns those to be [released](Self::release) later. A thread that waits in one of NCCL's
    /// calls sees that the group has failed, and unlocks.
    pub(super) fn abort(&self) -> Vec<Arc<NcclWork>> {
        let Some(Open { comm, stranded }) = lock(&self.open).take() else { return Vec::new() };
        if let Err(error) = self.streams.bind() {
            log::debug!("binding the device before an abort: {}", cuda_error(error));
        }
        drop(comm);
        self.end();
        stranded
    }

    fn end(&self) {
        *lock(&self.ended) = true;
        self.changed.notify_all();
    }

    /// Waits until NCCL is done with it. A thread whose call has failed must not end before, see `always_late`.
    pub(super) fn await_end(&self) {
        let mut ended = lock(&self.ended);
        while !*ended {
            ended = wait(&self.changed, ended);
        }
    }

    /// Drops the tensors of `stranded` calls once the GPU has passed them. No more parts of these calls may be
    /// launched.
    pub(super) fn release(&self, stranded: Vec<Arc<NcclWork>>) {
        const PATIENCE: Duration = Duration::from_secs(10);
        const PAUSE: Duration = Duration::from_millis(1);
        if stranded.is_empty() {
            return;
        }
        let (last, deadline) = (Done::new(None), Instant::now() + PATIENCE);
        // After an error of the device, nothing runs on it.
        let marked = self.streams.end(&last).is_ok();
        while marked && matches!(last.is_over(), Ok(false)) {
            if Instant::now() >= deadline {
                log::warn!(
                    "{} tensors of failed collectives stay in memory: the GPU does not end them",
                    stranded.len()
                );
                std::mem::forget(stranded);
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Leaves in good order, or aborts after an error or if the group's other ranks on this host do not leave.
    pub(super) fn finalize(&self, check: CancellationCheck) {
        let Some(Open { comm, stranded }) = lock(&self.open).take() else { return };
        let finalized = self.streams.bind().map_err(cuda_error).map(|()| comm.finalize(check));
        match finalized {
            Ok(Ok(())) => {}
            Ok(Err(WaitError::Nccl(failure))) => log::debug!("leaving: {failure}"),
            Ok(Err(WaitError::Group(_))) => {
                log::debug!("leaving: the other ranks of this host do not, so the remaining communicators are aborted")
            }
            Err(error) => log::debug!("leaving: {error}"),
        }
        self.end();
        self.release(stranded);
    }
}

impl Turn<'_> {
    /// Puts a call on the stream. The host waits until NCCL has launched it, or leaves this to a thread, with all further calls until
    /// then: NCCL may wait for ranks that first wait for something else of this one.
    pub(super) fn launch(&mut self, group: &Arc<Group>, job: Job) -> Result<(), WaitError> {
        let comm_stream = self.comm_stream;
        {
            let mut late = lock(&comm_stream.late);
            late.abandoned.retain(|work| !work.is_completed());
            if late.is_active {
                late.jobs.push_back(job);
                return Ok(());
            }
        }
        let begun = !comm_stream.always_late;
        if begun && comm_stream.launch(group, &job, Some(LAUNCH))? == Status::Done {
            job.work.done.set_started();
            return Ok(());
        }
        lock(&comm_stream.late).is_active = true;
        let (own, own_group, work) = (Arc::clone(comm_stream), Arc::clone(group), Arc::clone(&job.work));
        spawn(group, "launch", move || own.launch_late(&own_group, job, begun)).map(drop).map_err(|error| {
            lock(&comm_stream.open).iter_mut().for_each(|open| open.stranded.push(Arc::clone(&work)));
            NcclFailure::other(STARTING, &error.to_string()).into()
        })
    }

    /// See [`Comm::split`].
    pub(super) fn split(
        &mut self,
        group: &Group,
        member: bool,
        key: usize,
        check: CancellationCheck,
    ) -> Result<Option<Comm>, WaitError> {
        let mut open = lock(&self.comm_stream.open);
        let Some(Open { comm, .. }) = open.as_mut() else { return Err(gone(group)) };
        self.comm_stream.streams.bind().map_err(cuda_failure)?;
        comm.split(member, key, check)
    }
}

const STARTING: &str = "starting a collective";

fn is_alive(group: &Group) -> Result<(), Failure> {
    group.failure().map_or(Ok(()), Err)
}

/// The error if the communicator was aborted because the group has failed.
pub(super) fn gone(group: &Group) -> WaitError {
    let closed = || Failure::PeerFailed { peer: group.rank, reason: "the communicator has been closed".to_string() };
    WaitError::Group(group.root_cause().unwrap_or_else(closed))
}
