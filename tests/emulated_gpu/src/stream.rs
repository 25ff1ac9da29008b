//! Streams, which are queues of work with a thread each, and events, which are marks in them.
use crate::count::{EARLY_WAIT, WAIT, count};
use crate::driver::{Answer, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, SUCCESS, context_device, driver_lock, fatal};
use crate::object::{create, destroyers, give};
use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

type Job = Box<dyn FnOnce() + Send>;

/// A queue of work and the thread that executes it. Pushing does not wait. Work that was pushed is still executed after
/// the stream is dropped.
pub(crate) struct Stream {
    pub(crate) device: i32,
    jobs: Mutex<Sender<Job>>,
    /// The number of jobs so far.
    pushed: Arc<AtomicU64>,
}

impl Stream {
    fn new(device: i32) -> Arc<Self> {
        let (jobs, work): (Sender<Job>, Receiver<Job>) = channel();
        std::thread::spawn(move || work.into_iter().for_each(|job| job()));
        let stream = Arc::new(Self { device, jobs: Mutex::new(jobs), pushed: Arc::default() });
        let mut streams = streams();
        streams.known.retain(|stream| stream.strong_count() > 0);
        streams.known.push(Arc::downgrade(&stream));
        stream
    }

    /// Appends `job` to the queue.
    pub(crate) fn push(&self, job: impl FnOnce() + Send + 'static) {
        let origin = Origin::new(self);
        let job = move || {
            origin.enter();
            job();
        };
        self.pushed.fetch_add(1, Ordering::Relaxed);
        self.enqueue(Box::new(job));
    }

    fn enqueue(&self, job: Job) {
        if lock(&self.jobs).send(job).is_err() {
            fatal("the thread of a stream is gone: one of its jobs panicked");
        }
    }

    /// Appends a mark to the queue, which is no work.
    fn mark(&self) -> Arc<Mark> {
        let (before, pushed) = (self.pushed.load(Ordering::Relaxed), self.pushed.clone());
        let mark = Arc::new(Mark { before, pushed, reached: Mutex::default(), changed: Condvar::new() });
        let reached = mark.clone();
        let origin = Origin::new(self);
        self.enqueue(Box::new(move || {
            origin.enter();
            reached.reach();
        }));
        mark
    }

    /// Waits on the host until all previous work has completed.
    pub(crate) fn synchronize(&self) {
        self.mark().wait_on_host();
    }
}

/// The origin of work on a stream.
#[derive(Clone, Default)]
pub(crate) struct Origin {
    device: i32,
    stream: usize,
    /// Where in the program it was pushed, if `EMULATED_GPU_BACKTRACE` is set.
    backtrace: Option<Arc<Backtrace>>,
}

impl Origin {
    fn new(stream: &Stream) -> Self {
        static WANTED: OnceLock<bool> = OnceLock::new();
        let wanted = *WANTED.get_or_init(|| std::env::var_os("EMULATED_GPU_BACKTRACE").is_some());
        let backtrace = wanted.then(|| Arc::new(Backtrace::force_capture()));
        Self { device: stream.device, stream: std::ptr::from_ref(stream) as usize, backtrace }
    }

    fn enter(self) {
        ORIGIN.set(self);
    }

    /// Returns the origin of the job that the calling thread is executing.
    pub(crate) fn current() -> Self {
        ORIGIN.with_borrow(Self::clone)
    }
}

impl Display for Origin {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "stream {:#x} of device {}", self.stream, self.device)?;
        match &self.backtrace {
            Some(backtrace) => write!(f, "{backtrace}"),
            None => write!(f, "(set EMULATED_GPU_BACKTRACE=1 to show where in the program)"),
        }
    }
}

thread_local! {
    static ORIGIN: RefCell<Origin> = RefCell::default();
}

/// A point in a stream.
struct Mark {
    /// The number of jobs of the stream before it, and of all so far.
    before: u64,
    pushed: Arc<AtomicU64>,
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Mark {
    /// Returns when the stream reached the mark, if it has.
    fn time(&self) -> Option<Instant> {
        *lock(&self.reached)
    }

    fn reach(&self) {
        *lock(&self.reached) = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Counts whether the stream has later work, and how much, which it does while the host learns of this and enqueues more.
    fn wait_on_host(&self) {
        match self.pushed.load(Ordering::Relaxed) - self.before {
            0 => count(WAIT, 1),
            later => count(&format!("{EARLY_WAIT} with {later} operations behind it"), 1),
        }
        self.wait();
    }

    fn wait(&self) {
        let reached = lock(&self.reached);
        let _reached = self.changed.wait_while(reached, |reached| reached.is_none());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Streams {
    /// By handle.
    created: HashMap<usize, Arc<Stream>>,
    /// By device. Unlike CUDA's, this stream does not synchronise with others.
    legacy: HashMap<i32, Arc<Stream>>,
    known: Vec<Weak<Stream>>,
}

fn streams() -> MutexGuard<'static, Streams> {
    static STREAMS: OnceLock<Mutex<Streams>> = OnceLock::new();
    lock(STREAMS.get_or_init(Mutex::default))
}

/// The handles `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// Returns the stream of a handle. A default stream belongs to the current device, and `CU_STREAM_PER_THREAD` to
/// the calling thread, which must have a context. Returns `None` if there is none.
pub(crate) fn find(handle: *mut c_void) -> Option<Arc<Stream>> {
    thread_local! {
        static OWN: RefCell<HashMap<i32, Arc<Stream>>> = RefCell::default();
    }
    match handle as usize {
        PER_THREAD => {
            let device = context_device()?;
            Some(OWN.with_borrow_mut(|own| own.entry(device).or_insert_with(|| Stream::new(device)).clone()))
        }
        0 | LEGACY => {
            let device = context_device()?;
            if let Some(stream) = streams().legacy.get(&device) {
                return Some(stream.clone());
            }
            let stream = Stream::new(device);
            Some(streams().legacy.entry(device).or_insert(stream).clone())
        }
        other => streams().created.get(&other).cloned(),
    }
}

/// Waits for all streams of a device.
pub(crate) fn synchronize_device(device: i32) {
    let known: Vec<_> = streams().known.iter().filter_map(Weak::upgrade).collect();
    known.iter().filter(|stream| stream.device == device).for_each(|stream| stream.synchronize());
}

/// Whether `EMULATED_GPU_IDLE` is set: then kernels are not executed, and little memory is touched.
pub(crate) fn is_idle() -> bool {
    static IDLE: OnceLock<bool> = OnceLock::new();
    *IDLE.get_or_init(|| std::env::var_os("EMULATED_GPU_IDLE").is_some())
}

/// Puts `job` on a stream, which may belong to a device other than the current one.
pub(crate) fn push(handle: *mut c_void, job: impl FnOnce() + Send + 'static) -> Answer {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    if !is_idle() {
        stream.push(job);
    }
    SUCCESS
}

destroyers!(cuEventDestroy_v2: Event);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(handle: *mut *mut c_void, _flags: c_uint) -> Answer {
    let Some(device) = context_device() else { return INVALID_CONTEXT };
    let stream = Stream::new(device);
    let address = Arc::as_ptr(&stream).cast_mut().cast();
    streams().created.insert(address as usize, stream);
    // SAFETY: guaranteed by the caller.
    unsafe { give(handle, address) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    handle: *mut *mut c_void,
    flags: c_uint,
    _priority: c_int,
) -> Answer {
    // SAFETY: guaranteed by the caller. All streams run at the same time.
    unsafe { cuStreamCreate(handle, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> Answer {
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    // SAFETY: guaranteed by the caller. The numbers are those of an H100.
    unsafe { (*least, *greatest) = (0, -5) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(handle: *mut c_void) -> Answer {
    if streams().created.remove(&(handle as usize)).is_some() { SUCCESS } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> Answer {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    let _lock = driver_lock();
    stream.synchronize();
    crate::pool::synchronized();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(handle: *mut c_void, status: *mut c_int) -> Answer {
    if find(handle).is_none() {
        return INVALID_HANDLE;
    }
    // SAFETY: guaranteed by the caller. Nothing is ever captured.
    unsafe { give(status, 0) }
}

/// An event with its latest mark, if it was recorded.
struct Event {
    device: i32,
    mark: Mutex<Option<Arc<Mark>>>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(handle: *mut *mut c_void, _flags: c_uint) -> Answer {
    let Some(device) = context_device() else { return INVALID_CONTEXT };
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, Event { device, mark: Mutex::default() }) }
}

/// # Safety
/// `handle` must be an event.
unsafe fn event<'a>(handle: *mut c_void) -> &'a Event {
    // SAFETY: the handle came from `cuEventCreate`, and the caller guarantees that it has not been destroyed.
    unsafe { &*handle.cast::<Event>() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(handle: *mut c_void, stream: *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    let event = unsafe { event(handle) };
    let Some(stream) = find(stream).filter(|stream| stream.device == event.device) else { return INVALID_HANDLE };
    *lock(&event.mark) = Some(stream.mark());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(handle: *mut c_void) -> Answer {
    let _lock = driver_lock();
    // SAFETY: guaranteed by the caller.
    let mark = lock(&unsafe { event(handle) }.mark).clone();
    if mark.is_none_or(|mark| mark.time().is_some()) { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(handle: *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    let mark = lock(&unsafe { event(handle) }.mark).clone();
    if let Some(mark) = mark {
        let _lock = driver_lock();
        mark.wait_on_host();
    }
    crate::pool::synchronized();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    let marks = [start, end].map(|handle| lock(&unsafe { event(handle) }.mark).clone());
    let [Some(start), Some(end)] = marks else { return INVALID_HANDLE };
    let (Some(start), Some(end)) = (start.time(), end.time()) else { return NOT_READY };
    // SAFETY: guaranteed by the caller.
    unsafe { give(milliseconds, end.saturating_duration_since(start).as_secs_f32() * 1e3) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: *mut c_void, handle: *mut c_void, _flags: c_uint) -> Answer {
    // SAFETY: guaranteed by the caller.
    let mark = lock(&unsafe { event(handle) }.mark).clone();
    match mark {
        Some(mark) => push(stream, move || mark.wait()),
        None => SUCCESS,
    }
}
