//! A communicator and the stream for its calls, on which collectives are started.
use super::NcclOptions;
use super::comm::{CancellationCheck, Comm, WaitError};
use super::device::reserve;
use super::limit::{Ctas, Room};
use super::prepared::{Kind, Prepared};
use super::status::Status;
use super::stream::{Done, Event, Streams};
use super::threads::spawn;
use super::work::{Behind, NcclWork};
use super::{cuda_error, cuda_failure};
use crate::error::Failure;
use crate::panic::{lock, wait};
use candle_ddp_engine::device_group::{DeviceGroup, Fence};
use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A call that is to be launched.
pub(super) struct Job {
    pub(super) prepared: Prepared,
    pub(super) ready: Event,
    pub(super) behind: Option<Behind>,
    pub(super) work: Arc<NcclWork>,
}

impl Job {
    /// Tells those that wait for the work that it is launched. Returns the work if nobody waits: the calling thread must not be the
    /// last to hold its tensors before the GPU has passed it.
    pub(super) fn set_launched(self, group: &DeviceGroup) -> Option<NcclWork> {
        let done = Arc::clone(&self.work.done);
        let abandoned = Arc::into_inner(self.work);
        done.set_started();
        group.notify();
        abandoned
    }
}

pub(super) struct CommStream {
    /// `None` once the communicator was aborted or finalized. The lock lets one thread at a time call NCCL.
    open: Mutex<Option<Open>>,
    /// Whether NCCL is done with it.
    ended: Mutex<bool>,
    changed: Condvar,
    pub(super) streams: Streams,
}

struct Open {
    comm: Comm,
    room: Room,
    /// The kinds of calls that it has made.
    known: HashSet<Kind>,
    /// Calls that failed after they had begun: NCCL may launch more parts of them until the communicator is aborted.
    stranded: Vec<Arc<NcclWork>>,
}

impl CommStream {
    pub(super) fn new(comm: Comm, room: Room, streams: Streams) -> Self {
        let open = Mutex::new(Some(Open { comm, room, known: HashSet::new(), stranded: Vec::new() }));
        Self { open, ended: Mutex::default(), changed: Condvar::new(), streams }
    }

    /// Puts a call on the stream after its `ready`, followed by its work's fence. Waits until NCCL has launched it.
    pub(super) fn launch(&self, group: &DeviceGroup, job: &Job) -> Result<(), WaitError> {
        let mut open = lock(&self.open);
        let Some(Open { comm, known, stranded, .. }) = open.as_mut() else { return Err(gone(group)) };
        self.streams.bind().map_err(cuda_failure)?;
        for kind in job.prepared.kinds() {
            if known.insert(kind) {
                // It was checked before the group was made.
                self.streams.make_room(reserve().unwrap_or_default());
            }
        }
        self.streams.after(&job.ready).map_err(cuda_failure)?;
        if let Some(mark) = job.behind.as_ref().and_then(|behind| behind.done.mark()) {
            self.streams.after(mark).map_err(cuda_failure)?;
        }
        self.streams.begin(&job.work.done).map_err(cuda_failure)?;
        // SAFETY: the work has the tensors, and lets go of them behind its fence.
        let launched = match unsafe { job.prepared.start(comm, self.streams.target()) } {
            Ok(Status::InProgress) => comm.settle("starting a collective", &mut || is_alive(group)),
            other => other.map(drop).map_err(WaitError::from),
        };
        if launched.is_err() {
            stranded.push(Arc::clone(&job.work));
        }
        let ended = self.streams.end(&job.work.done).map_err(|error| cuda_failure(error).into());
        launched.and(ended)
    }

    /// See [`Comm::split`].
    pub(super) fn split(
        &self,
        group: &DeviceGroup,
        member: bool,
        key: usize,
        config: (&NcclOptions, Ctas),
        check: CancellationCheck,
    ) -> Result<Option<Comm>, WaitError> {
        let mut open = lock(&self.open);
        let Some(Open { comm, .. }) = open.as_mut() else { return Err(gone(group)) };
        self.streams.bind().map_err(cuda_failure)?;
        comm.split(member, key, config, check)
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
        let Some(Open { comm, room, stranded, .. }) = lock(&self.open).take() else { return Vec::new() };
        if let Err(error) = self.streams.bind() {
            log::debug!("binding the device before an abort: {}", cuda_error(error));
        }
        drop(comm);
        drop(room);
        self.end();
        stranded
    }

    fn end(&self) {
        *lock(&self.ended) = true;
        self.changed.notify_all();
    }

    /// Waits until NCCL is done with it. A thread whose call has failed must not end before: see [`launcher`](super::launcher).
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

    /// Leaves in good order, or aborts after an error or if the group's other ranks on this host do not leave. Returns the thread of the
    /// last step: one rank of this host that does not make it may hold it up for ever, as it would the end of all other communicators.
    pub(super) fn finalize(
        self: &Arc<Self>,
        group: &Arc<DeviceGroup>,
        check: CancellationCheck,
    ) -> Option<JoinHandle<()>> {
        let Open { mut comm, room, stranded, .. } = lock(&self.open).take()?;
        let finalized = self.streams.bind().map_err(cuda_error).map(|()| comm.finalize(check));
        match finalized {
            Ok(Ok(())) => {
                drop(room);
                let own = Arc::clone(self);
                let destroy = move || {
                    let destroyed = own.streams.bind().map_err(cuda_failure).and_then(|()| comm.destroy());
                    if let Err(failure) = destroyed {
                        log::debug!("leaving: {failure}");
                    }
                    own.end();
                    own.release(stranded);
                };
                let thread = spawn(group, "destroy", destroy);
                return thread.inspect_err(|error| log::debug!("leaving: {error}")).ok();
            }
            Ok(Err(WaitError::Nccl(failure))) => log::debug!("leaving: {failure}"),
            Ok(Err(WaitError::Group(_))) => {
                log::debug!("leaving: the other ranks of this host do not, so the remaining communicators are aborted")
            }
            Err(error) => log::debug!("leaving: {error}"),
        }
        self.end();
        self.release(stranded);
        None
    }
}

fn is_alive(group: &DeviceGroup) -> Result<(), Failure> {
    group.failure().map_or(Ok(()), Err)
}

/// The error if the communicator was aborted because the group has failed.
pub(super) fn gone(group: &DeviceGroup) -> WaitError {
    let closed = || Failure::PeerFailed { peer: group.rank, reason: "the communicator has been closed".to_string() };
    WaitError::Group(group.root_cause().unwrap_or_else(closed))
}
