//! One rank of a communicator: its current operation and its state.
use super::ffi::Wishes;
use super::peer_info::PeerInfo;
use super::wire::{Call, Kind};
use super::{Code, Failure, Outcome, die, failure, lock, set_last_error};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A nonblocking operation stays in progress until it was polled this many times...
const LOOKS: u32 = 3;
/// ...or was not polled for this long.
const UNSEEN: Duration = Duration::from_millis(50);

/// The memory of a communicator on the GPU, in bytes.
pub(super) const MEMORY: u64 = 64 << 20;
/// The same for each kind of calls.
const KIND_MEMORY: u64 = 8 << 20;

/// The number of blocks of kernels that are running, by device.
static OCCUPIED: Mutex<BTreeMap<i32, usize>> = Mutex::new(BTreeMap::new());

/// Whether there was room for so many blocks. A kernel begins when all of its blocks can run at once, and takes a whole multiprocessor for
/// each of them.
fn occupy(device: i32, blocks: usize) -> bool {
    let mut occupied = lock(&OCCUPIED);
    let occupied = occupied.entry(device).or_default();
    let fits = *occupied + blocks <= crate::driver::multiprocessors();
    if fits {
        *occupied += blocks;
    }
    fits
}

pub(super) struct Communicator {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) peer_info: PeerInfo,
    pub(super) wishes: Wishes,
    /// How many communicators this process made before.
    pub(super) number: usize,
    /// The name of the hub.
    pub(super) hub: String,
    /// The thread that uses the communicator, and its nesting depth: NCCL allows one thread at a time.
    user: Mutex<Option<(ThreadId, usize)>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    /// How often the operation in progress was polled.
    in_progress: Option<u32>,
    /// The first error. After it, only an abort is possible.
    error: Option<Failure>,
    /// Whether `ncclCommFinalize` was called.
    pub(super) finalizing: bool,
    /// Whether the hub has reported the end of the finalization.
    pub(super) finalized: bool,
    /// Whether the end of the hub is no error.
    pub(super) orphaned: bool,
    /// Whether the hub has ended in that state.
    pub(super) alone: bool,
    /// Whether all ranks of this host are being destroyed.
    pub(super) destroyed: bool,
    /// The bytes that it has on the GPU.
    pub(super) memory: u64,
    /// The kinds of calls for which it has memory.
    known: BTreeSet<(Kind, u32)>,
    /// Whether the communicator was aborted or destroyed.
    ended: bool,
    /// Whether all ranks have made their first call.
    pub(super) connected: bool,
    /// The hub's reply to a split.
    pub(super) child: Option<Option<(usize, usize, String)>>,
    pub(super) control: Option<Arc<UnixStream>>,
    pub(super) data: Option<Arc<UnixStream>>,
    /// The thread whose launch is in progress. NCCL keeps its state in that thread's memory.
    launcher: Option<Weak<()>>,
    /// The numbers of launched and of finished jobs: jobs run in this order, whatever their streams.
    launched: u64,
    passed: u64,
}

impl Communicator {
    /// Creates a communicator whose construction is in progress.
    pub(super) fn new(hub: String, rank: usize, size: usize, peer_info: PeerInfo, wishes: Wishes) -> Arc<Self> {
        let state = State { in_progress: Some(0), ..State::default() };
        let (user, changed) = (Mutex::new(None), Condvar::new());
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { rank, size, peer_info, wishes, number, hub, user, state: Mutex::new(state), changed })
    }

    /// Changes the state and wakes all waiting threads.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut lock(&self.state));
        self.changed.notify_all();
        result
    }

    /// Waits until `found` returns a value or until `deadline`. Also returns `None` if the communicator fails or ends.
    fn wait_until<T>(&self, deadline: Option<Instant>, found: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut state = lock(&self.state);
        loop {
            if state.ended || state.error.is_some() {
                return None;
            }
            if let Some(result) = found(&state) {
                return Some(result);
            }
            state = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return None,
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Like `wait_until` without a deadline; returns the failure if that comes first.
    pub(super) fn wait_for<T>(&self, found: impl Fn(&State) -> Option<T>) -> Outcome<T> {
        self.wait_until(None, found).ok_or_else(|| self.why_not())
    }

    fn why_not(&self) -> Failure {
        let ended = || failure(Code::InternalError, "the communicator was aborted");
        lock(&self.state).error.clone().unwrap_or_else(ended)
    }

    /// The text of the error that ended the communicator's operations.
    #[cfg(test)]
    pub(super) fn error_text(&self) -> Option<String> {
        lock(&self.state).error.as_ref().map(|error| error.text.clone())
    }

    /// Records the first error, unless the communicator has ended. Operations and calls in progress never complete.
    pub(super) fn fail(&self, failure: Failure) {
        self.change(|state| {
            if state.error.is_none() && !state.ended {
                set_last_error(&failure.text);
                state.error = Some(failure);
            }
        });
    }

    /// Checks that the next operation can begin.
    pub(super) fn check(&self, call: &str) -> Outcome<()> {
        if lock(&self.state).finalizing {
            die(&format!("{call} on a communicator that was finalized"));
        }
        self.check_ready(call)
    }

    /// Checks that no operation is in progress and that there was no error.
    pub(super) fn check_ready(&self, call: &str) -> Outcome<()> {
        let state = lock(&self.state);
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        if state.in_progress.is_some() {
            let text = format!("{call}: the previous operation has not returned ncclSuccess yet");
            return Err(failure(Code::InvalidArgument, text));
        }
        Ok(())
    }

    /// Begins an operation, which a thread executes and settles.
    pub(super) fn begin(&self) {
        lock(&self.state).in_progress = Some(0);
    }

    /// Begins a launch by the calling thread.
    pub(super) fn begin_launch(&self) {
        thread_local! {
            static LIFE: Arc<()> = Arc::default();
        }
        let launcher = LIFE.with(Arc::downgrade);
        let mut state = lock(&self.state);
        (state.in_progress, state.launcher) = (Some(0), Some(launcher));
    }

    /// Ends the operation in progress.
    pub(super) fn settle(&self) {
        self.change(|state| (state.in_progress, state.launcher) = (None, None));
    }

    /// Called by an abort, which uses the state of a launch in progress, up to 2.27.2.
    pub(super) fn use_launcher(&self) {
        if super::peer_info::pretences().version >= 22_703 {
            return;
        }
        let launcher = lock(&self.state).launcher.clone();
        if let Some(launcher) = launcher {
            std::thread::sleep(UNSEEN);
            if launcher.strong_count() == 0 {
                die("an abort of a call in progress whose thread has ended");
            }
        }
    }

    /// Called by a launch: takes memory for calls of a new kind and power of two of bytes, for which NCCL may choose another algorithm.
    pub(super) fn prepare<'a>(&self, mut calls: impl Iterator<Item = &'a Call>) -> Outcome<()> {
        calls.try_for_each(|call| {
            let kind = (call.kind, call.bytes().checked_ilog2().unwrap_or(0));
            if self.change(|state| !state.known.insert(kind)) {
                return Ok(());
            }
            if !crate::pool::took_outside(KIND_MEMORY) {
                return Err(failure(Code::UnhandledCudaError, "Cuda failure 2 'out of memory'"));
            }
            self.change(|state| state.memory += KIND_MEMORY);
            Ok(())
        })
    }

    /// Waits until no operation is in progress.
    pub(super) fn await_settled(&self) -> Outcome<()> {
        self.wait_for(|state| state.in_progress.is_none().then_some(()))
    }

    pub(super) fn is_settled(&self) -> bool {
        lock(&self.state).in_progress.is_none()
    }

    pub(super) fn is_finalizing(&self) -> bool {
        lock(&self.state).finalizing
    }

    /// Returns the result of `ncclCommGetAsyncError`.
    pub(super) fn look(&self) -> Code {
        self.change(|state| {
            if let Some(error) = &state.error {
                return error.code;
            }
            match &mut state.in_progress {
                Some(looks) => {
                    *looks += 1;
                    Code::InProgress
                }
                None => Code::Success,
            }
        })
    }

    /// Called by the thread of an operation: waits until a nonblocking caller has seen the operation in progress.
    pub(super) fn be_seen(&self) {
        if !self.wishes.blocking {
            self.wait_until(Some(Instant::now() + UNSEEN), |state| {
                state.in_progress.is_none_or(|looks| looks >= LOOKS).then_some(())
            });
        }
    }

    /// Returns the number of a job that is put on a stream.
    pub(super) fn launch(&self) -> u64 {
        self.change(|state| {
            state.launched += 1;
            state.launched
        })
    }

    /// Called by a job: waits for its turn and returns the connection.
    pub(super) fn await_turn(&self, job: u64) -> Outcome<Arc<UnixStream>> {
        self.wait_for(|state| state.data.clone().filter(|_| state.passed + 1 == job))
    }

    pub(super) fn pass(&self) {
        self.change(|state| state.passed += 1);
    }

    pub(super) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.passed == state.launched
    }

    pub(super) fn await_idle(&self) -> Outcome<()> {
        self.wait_for(|state| (state.passed == state.launched).then_some(()))
    }

    /// Emulates a kernel whose peers do not respond: hangs until the communicator is aborted.
    pub(super) fn hang(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Occupies a part of the GPU, as soon as there is room, while `kernel` runs. Does nothing if the communicator ends before.
    pub(super) fn resident(&self, kernel: impl FnOnce()) {
        let Some(device) = self.peer_info.context else { return kernel() };
        while !occupy(device, self.wishes.blocks) {
            std::thread::sleep(Duration::from_millis(2));
            if lock(&self.state).ended {
                return;
            }
        }
        kernel();
        if let Some(occupied) = lock(&OCCUPIED).get_mut(&device) {
            *occupied -= self.wishes.blocks;
        }
    }

    /// Sleeps, unless the communicator ends in the meantime.
    pub(super) fn linger(&self, duration: Duration) {
        if !duration.is_zero() {
            self.wait_until::<()>(Some(Instant::now() + duration), |_| None);
        }
    }

    /// Ends the communicator, successfully or not. Unfinished jobs end now.
    pub(super) fn end(&self) {
        let connections = self.change(|state| {
            state.ended = true;
            [state.control.take(), state.data.take()]
        });
        for connection in connections.into_iter().flatten() {
            // This also wakes the thread that reads from the connection. The other side may have closed it.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Frees its memory, for which the driver waits for everything on the GPU: kernels of other communicators too.
    pub(super) fn free(&self) {
        crate::pool::gave_back_outside(self.change(|state| std::mem::take(&mut state.memory)));
        self.peer_info.context.into_iter().for_each(crate::stream::synchronize_device);
    }

    /// Calls `last`, unless the communicator has ended; an end waits for this call.
    pub(super) fn unless_ended(&self, last: impl FnOnce(&mut State)) -> Outcome<()> {
        self.change(|state| {
            if state.ended {
                return Err(failure(Code::InternalError, "the communicator was aborted"));
            }
            last(state);
            Ok(())
        })
    }
}

/// A thread's exclusive use of a communicator.
pub(super) struct Visit(pub(super) Arc<Communicator>);

impl Visit {
    pub(super) fn new(communicator: Arc<Communicator>, call: &str) -> Self {
        let mut user = lock(&communicator.user);
        let thread = std::thread::current().id();
        match &mut *user {
            Some((other, _)) if *other != thread => {
                die(&format!("{call} on a communicator that another thread is using at the same time"))
            }
            Some((_, visits)) => *visits += 1,
            none => *none = Some((thread, 1)),
        }
        drop(user);
        Self(communicator)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut user = lock(&self.0.user);
        match &mut *user {
            Some((_, visits)) if *visits > 1 => *visits -= 1,
            other => *other = None,
        }
    }
}
