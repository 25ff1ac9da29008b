//! All communicators of a group, and their end.
//!
//! `ncclCommAbort` first sets its communicator's flag, which ends its kernels, and then frees memory, for which the driver waits
//! for everything on the GPU. A kernel of another communicator that waits for a dead rank would hold it up for ever. So all
//! communicators of a group are aborted at once, on a thread each. If another group's kernels hold them up, that group ends too. A
//! process that hangs in the driver even then ends itself, if its environment says so: it could not even exit.
use super::comm::WaitError;
use super::comm_stream::{CommStream, gone};
use super::work::NcclWork;
use crate::Result;
use crate::error::Failure;
use crate::panic::lock;
use crate::warnings::warn_aloud;
use candle_ddp_engine::device_group::{DeviceGroup, Watched};
use candle_ddp_env::PROCESS;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long the kernels of other groups may hold up an abort.
const GRACE: Duration = Duration::from_secs(2);

/// The environment variable with the number of seconds after which a process ends itself that cannot abort its communicators.
const ABORT_TIMEOUT: &str = "CANDLE_DDP_ABORT_TIMEOUT";

/// The value of the variable; without one, or with 0, such a process stays.
pub(super) fn abort_timeout() -> Result<Option<Duration>> {
    Ok(PROCESS.number(ABORT_TIMEOUT)?.filter(|seconds| *seconds > 0).map(Duration::from_secs))
}

/// The groups of this process.
static GROUPS: Mutex<Vec<Weak<CommStreams>>> = Mutex::new(Vec::new());

/// All communicators of a group: the one for collectives, and those for messages from one rank to another. They are in
/// the same order on all ranks, which finalize them one after the other.
pub(super) struct CommStreams {
    group: Arc<DeviceGroup>,
    members: Mutex<Members>,
    device: usize,
}

#[derive(Default)]
struct Members {
    open: BTreeMap<Direction, Arc<CommStream>>,
    is_aborted: bool,
}

/// The sender and the receiver; `None` is the communicator of the collectives.
type Direction = Option<(usize, usize)>;

impl CommStreams {
    pub(super) fn new(group: Arc<DeviceGroup>, collectives: Arc<CommStream>) -> Arc<Self> {
        let device = collectives.streams.device();
        let members = Members { open: BTreeMap::from([(None, collectives)]), is_aborted: false };
        let comm_streams = Arc::new(Self { group, members: Mutex::new(members), device });
        let mut groups = lock(&GROUPS);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&comm_streams));
        drop(groups);
        comm_streams
    }

    /// Adds a communicator for messages. After an abort, it belongs to the caller, and the result is the group's failure.
    pub(super) fn add(
        &self,
        from: usize,
        to: usize,
        comm_stream: Arc<CommStream>,
    ) -> std::result::Result<(), WaitError> {
        let mut members = lock(&self.members);
        if members.is_aborted {
            drop(members);
            return Err(gone(&self.group));
        }
        members.open.insert(Some((from, to)), comm_stream);
        Ok(())
    }

    pub(super) fn all(&self) -> Vec<Arc<CommStream>> {
        lock(&self.members).open.values().cloned().collect()
    }

    /// All of them, to be aborted. None is added any more.
    fn close(&self) -> Vec<Arc<CommStream>> {
        lock(&self.members).is_aborted = true;
        self.all()
    }

    /// Whether its kernels may hold up the abort of another group.
    fn holds_up(&self, other: &Self) -> bool {
        !std::ptr::eq(self, other) && self.device == other.device && self.group.is_busy()
    }
}

impl Watched for CommStreams {
    fn error(&self) -> Option<String> {
        self.all().iter().find_map(|comm_stream| comm_stream.error())
    }

    fn abort(&self) {
        let mut aborts = Aborts::new();
        aborts.begin(self.close());
        if !aborts.wait(GRACE) {
            let reason =
                "another group on its GPU has failed, and that group's calls cannot be ended before this one's";
            let others: Vec<_> = lock(&GROUPS).iter().filter_map(Weak::upgrade).collect();
            for other in others.into_iter().filter(|other| other.holds_up(self)) {
                // Its threads that wait in NCCL's calls see the failure, and unlock.
                other.group.fail(Failure::PeerFailed { peer: other.group.rank, reason: reason.to_string() });
                aborts.begin(other.close());
            }
            aborts.wait_or_end(self.group.rank);
        }
        aborts.release();
    }
}

/// Aborts in progress.
struct Aborts {
    comm_streams: Vec<Arc<CommStream>>,
    /// Calls to be released, by the positions of their communicators.
    stranded: Vec<(usize, Vec<Arc<NcclWork>>)>,
    sender: Sender<(usize, Vec<Arc<NcclWork>>)>,
    receiver: Receiver<(usize, Vec<Arc<NcclWork>>)>,
}

impl Aborts {
    fn new() -> Self {
        let (sender, receiver) = channel();
        Self { comm_streams: Vec::new(), stranded: Vec::new(), sender, receiver }
    }

    fn begin(&mut self, comm_streams: Vec<Arc<CommStream>>) {
        for comm_stream in comm_streams {
            let (index, sender, own) = (self.comm_streams.len(), self.sender.clone(), Arc::clone(&comm_stream));
            self.comm_streams.push(comm_stream);
            let abort = move || {
                let _ = sender.send((index, own.abort()));
            };
            if let Err(error) = std::thread::Builder::new().name("nccl-abort".to_string()).spawn(abort) {
                log::warn!("a communicator is aborted without a thread of its own, which may hang: {error}");
                self.stranded.push((index, self.comm_streams[index].abort()));
            }
        }
    }

    /// Whether all have ended, at the latest after `patience`.
    fn wait(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.stranded.len() < self.comm_streams.len() {
            match self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(ended) => self.stranded.push(ended),
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until all have ended, or ends the process.
    fn wait_or_end(&mut self, rank: usize) {
        /// The time between two warnings.
        const TICK: Duration = Duration::from_secs(60);
        // It was checked before the group was made.
        let (begin, limit) = (Instant::now(), abort_timeout().unwrap_or_default());
        let left = || limit.map_or(TICK, |limit| TICK.min(limit.saturating_sub(begin.elapsed())));
        while !self.wait(left()) {
            let hung = format!("rank {rank}: NCCL or the driver does not end communicators that were aborted");
            if limit.is_none_or(|limit| begin.elapsed() < limit) {
                warn_aloud(format_args!("{hung}"));
                continue;
            }
            warn_aloud(format_args!("{hung}, so this process ends itself after the time that {ABORT_TIMEOUT} gives"));
            std::process::abort();
        }
    }

    fn release(self) {
        for (index, stranded) in self.stranded {
            self.comm_streams[index].release(stranded);
        }
    }
}
