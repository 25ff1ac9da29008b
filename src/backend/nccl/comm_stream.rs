//! A communicator and the stream for its calls, on which collectives are started.
use super::calls::Target;
use super::comm::{CancellationCheck, Comm, WaitError};
use super::group::{Fence, Group};
use super::status::{CallResult, Status};
use super::stream::{Done, Streams};
use super::watchdog::Watched;
use super::work::NcclWork;
use super::{cuda_error, cuda_failure};
use crate::error::Failure;
use crate::panic::lock;
use cudarc::driver::CudaEvent;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

pub(super) struct CommStream {
    /// `None` once the communicator was aborted or finalized. The lock lets one thread at a time call NCCL.
    open: Mutex<Option<Open>>,
    pub(super) streams: Streams,
}

struct Open {
    comm: Comm,
    /// Calls that failed after they had begun: NCCL may launch more parts of them until the communicator is aborted.
    stranded: Vec<Arc<NcclWork>>,
}

/// Exclusive use of a [`CommStream`]; calls run in the order in which they obtained it.
pub(super) struct Turn<'a> {
    open: MutexGuard<'a, Option<Open>>,
    streams: &'a Streams,
}

impl CommStream {
    pub(super) fn new(comm: Comm, streams: Streams) -> Self {
        Self { open: Mutex::new(Some(Open { comm, stranded: Vec::new() })), streams }
    }

    pub(super) fn turn(&self) -> Turn<'_> {
        Turn { open: lock(&self.open), streams: &self.streams }
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
    fn abort(&self) -> Vec<Arc<NcclWork>> {
        let Some(Open { comm, stranded }) = lock(&self.open).take() else { return Vec::new() };
        if let Err(error) = self.streams.bind() {
            log::debug!("binding the device before an abort: {}", cuda_error(error));
        }
        drop(comm);
        stranded
    }

    /// Drops the tensors of `stranded` calls once the GPU has passed them. No more parts of these calls may be
    /// launched.
    fn release(&self, stranded: Vec<Arc<NcclWork>>) {
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
                log::debug!("leaving: the other ranks of this host do not, so the rest is aborted")
            }
            Err(error) => log::debug!("leaving: {error}"),
        }
        self.release(stranded);
    }
}

impl Turn<'_> {
    /// Puts `calls` on the stream after `ready`, followed by the work's fence. The host waits only until NCCL has
    /// launched them.
    pub(super) fn launch(
        &mut self,
        group: &Group,
        ready: &CudaEvent,
        work: &Arc<NcclWork>,
        calls: impl FnOnce(&mut Comm, Target) -> CallResult,
    ) -> Result<(), WaitError> {
        let Some(Open { comm, stranded }) = self.open.as_mut() else { return Err(gone(group)) };
        let done = &work.done;
        self.streams.bind().map_err(cuda_failure)?;
        self.streams.after(ready).map_err(cuda_failure)?;
        self.streams.begin(done).map_err(cuda_failure)?;
        let launched = match calls(comm, self.streams.target()) {
            Ok(Status::Done) => Ok(()),
            Ok(Status::InProgress) => comm.settle("starting a collective", &mut || group.failure().map_or(Ok(()), Err)),
            Err(failure) => Err(failure.into()),
        };
        if launched.is_err() {
            stranded.push(Arc::clone(work));
        }
        let ended = self.streams.end(done).map_err(|error| cuda_failure(error).into());
        launched.and(ended)
    }

    /// See [`Comm::split`].
    pub(super) fn split(
        &mut self,
        group: &Group,
        member: bool,
        key: usize,
        check: CancellationCheck,
    ) -> Result<Option<Comm>, WaitError> {
        let Some(Open { comm, .. }) = self.open.as_mut() else { return Err(gone(group)) };
        self.streams.bind().map_err(cuda_failure)?;
        comm.split(member, key, check)
    }
}

/// The error if the communicator was aborted because the group has failed.
fn gone(group: &Group) -> WaitError {
    let closed = || Failure::PeerFailed { peer: group.rank, reason: "the communicator has been closed".to_string() };
    WaitError::Group(group.root_cause().unwrap_or_else(closed))
}

/// All communicators of a group: the one for collectives, and those for messages from one rank to another. They are in
/// the same order on all ranks, which finalize them one after the other.
pub(super) struct CommStreams(Mutex<BTreeMap<Direction, Arc<CommStream>>>);

/// The sender and the receiver; `None` is the communicator of the collectives.
type Direction = Option<(usize, usize)>;

impl CommStreams {
    pub(super) fn new(collectives: Arc<CommStream>) -> Self {
        Self(Mutex::new(BTreeMap::from([(None, collectives)])))
    }

    pub(super) fn add(&self, from: usize, to: usize, comm_stream: Arc<CommStream>) {
        lock(&self.0).insert(Some((from, to)), comm_stream);
    }

    pub(super) fn all(&self) -> Vec<Arc<CommStream>> {
        lock(&self.0).values().cloned().collect()
    }
}

impl Watched for CommStreams {
    fn error(&self) -> Option<String> {
        self.all().iter().find_map(|comm_stream| comm_stream.error())
    }

    fn abort(&self) {
        let comm_streams = self.all();
        let stranded: Vec<_> = comm_streams.iter().map(|comm_stream| comm_stream.abort()).collect();
        comm_streams.iter().zip(stranded).for_each(|(comm_stream, stranded)| comm_stream.release(stranded));
    }
}
