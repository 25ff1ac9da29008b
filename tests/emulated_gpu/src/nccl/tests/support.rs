//! Ranks for tests.
use super::super::Code;
use super::super::handles::{self, Handle};
use super::super::peer_info::{PRETENDED, PeerInfo};
use super::super::wire::Dtype;
pub(super) use super::super::{calls::*, ffi::*};
use super::LAST_ERROR_HERE;
use crate::stream::{Stream, find};
use half::{bf16, f16};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough to conclude that an operation does not complete.
pub(super) const WHILE: Duration = Duration::from_millis(300);

pub(super) const F32: c_int = 7;
pub(super) const SUM: c_int = 0;

/// A rank with a stream. Dropping it finalizes and destroys the communicator, unless that was taken before.
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) blocking: bool,
    pub(super) comm: Cell<Handle>,
    pub(super) stream: *mut c_void,
}

pub(super) fn id() -> UniqueId {
    let mut id = std::mem::MaybeUninit::uninit();
    // SAFETY: the id is written by the call.
    unsafe {
        assert_eq!(ncclGetUniqueId(id.as_mut_ptr()), 0);
        id.assume_init()
    }
}

fn config(blocking: bool) -> Config {
    Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: c_int::from(blocking),
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: UNDEFINED,
        net_name: std::ptr::null(),
        split_share: UNDEFINED,
        traffic_class: UNDEFINED,
    }
}

/// Sets the calling thread's device and peer info.
pub(super) fn settle_down(host: &str, device: i32, may_share: bool) {
    let mut context = std::ptr::null_mut();
    // SAFETY: the context is written by the call.
    unsafe {
        crate::driver::cuDevicePrimaryCtxRetain(&raw mut context, 0);
        crate::driver::cuCtxSetCurrent(context);
    }
    // All of them are threads on the streams of one device, for which none must wait.
    PRETENDED.set(Some(PeerInfo { host: host.to_string(), device, may_share, context: None }));
}

pub(super) fn new_stream() -> *mut c_void {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the stream is written by the call.
    assert_eq!(unsafe { crate::stream::cuStreamCreate(&raw mut stream, 0) }, 0);
    stream
}

/// Begins to create a communicator, and returns the function's code.
pub(super) fn begin(id: UniqueId, rank: usize, size: usize, blocking: bool) -> (c_int, Rank) {
    let (mut comm, mut config) = (std::ptr::null_mut(), config(blocking));
    // SAFETY: the communicator is written by the call, and the configuration lives.
    let code = unsafe { ncclCommInitRankConfig(&raw mut comm, size as c_int, id, rank as c_int, &raw mut config) };
    (code, Rank { rank, size, blocking, comm: Cell::new(comm), stream: new_stream() })
}

impl Rank {
    pub(super) fn connect(id: UniqueId, rank: usize, size: usize, blocking: bool) -> Self {
        let (code, rank) = begin(id, rank, size, blocking);
        rank.done(code);
        rank
    }

    /// Returns a rank of a communicator that was created by a split.
    pub(super) fn child(&self, comm: Handle) -> Self {
        let fact = |call: unsafe extern "C" fn(Handle, *mut c_int) -> c_int| {
            let mut fact = -1;
            // SAFETY: the property is written by the call.
            assert_eq!(unsafe { call(comm, &raw mut fact) }, 0);
            fact as usize
        };
        // SAFETY: the communicator is alive.
        while !self.blocking && unsafe { async_error(comm) } == Code::InProgress as c_int {}
        Self {
            rank: fact(ncclCommUserRank),
            size: fact(ncclCommCount),
            blocking: self.blocking,
            comm: Cell::new(comm),
            stream: new_stream(),
        }
    }

    /// Waits until no operation is in progress and returns the communicator's state.
    pub(super) fn settle(&self) -> c_int {
        let start = Instant::now();
        loop {
            // SAFETY: the communicator is alive.
            let code = unsafe { async_error(self.comm.get()) };
            if code != Code::InProgress as c_int {
                return code;
            }
            assert!(start.elapsed() < PATIENCE, "an operation never completes");
            std::thread::yield_now();
        }
    }

    /// Checks that a call succeeded, and waits until it has settled.
    pub(super) fn done(&self, code: c_int) {
        if self.blocking {
            assert_eq!(code, 0, "{}", self.text());
        } else {
            assert_eq!(code, Code::InProgress as c_int, "{}", self.text());
            assert_eq!(self.settle(), 0, "{}", self.text());
        }
    }

    /// All-reduces `count` elements of any type.
    pub(super) fn reduce<T>(&self, send: *const T, receive: *mut T, count: usize, dtype: c_int, op: c_int) -> c_int {
        // SAFETY: the tests keep the buffers until the stream has executed the call.
        unsafe { ncclAllReduce(send.cast(), receive.cast(), count, dtype, op, self.comm.get(), self.stream) }
    }

    pub(super) fn all_reduce(&self, send: &[f32], receive: &mut [f32]) -> c_int {
        self.reduce(send.as_ptr(), receive.as_mut_ptr(), send.len(), F32, SUM)
    }

    /// The communicator is written to `comm` until the operation has ended; its configuration is this one's.
    pub(super) fn split(&self, color: c_int, key: c_int, comm: &mut Handle) -> c_int {
        // SAFETY: the tests keep the handle until the operation has ended.
        unsafe { ncclCommSplit(self.comm.get(), color, key, comm, std::ptr::null_mut()) }
    }

    /// All-reduces in place and returns the result.
    pub(super) fn sum(&self, values: &[f32]) -> Vec<f32> {
        let mut buffer = values.to_vec();
        let send = buffer.clone();
        self.done(self.all_reduce(&send, &mut buffer));
        assert!(self.synchronize(PATIENCE), "{}", self.text());
        buffer
    }

    pub(super) fn finalize(&self) -> c_int {
        // SAFETY: the communicator is alive.
        unsafe { ncclCommFinalize(self.comm.get()) }
    }

    pub(super) fn abort(&self) {
        // SAFETY: the communicator is alive, and no longer used.
        assert_eq!(unsafe { ncclCommAbort(self.comm.replace(std::ptr::null_mut())) }, 0);
    }

    pub(super) fn destroy(&self) {
        // SAFETY: the communicator is alive, and no longer used.
        assert_eq!(unsafe { ncclCommDestroy(self.comm.replace(std::ptr::null_mut())) }, 0, "{}", self.text());
    }

    pub(super) fn stream(&self) -> Arc<Stream> {
        find(self.stream).unwrap()
    }

    /// Holds up the stream until the sender is dropped.
    pub(super) fn hold(&self) -> Sender<()> {
        let (sender, end) = channel();
        self.stream().push(move || {
            let _ = end.recv();
        });
        sender
    }

    /// Waits for the stream and returns whether it completed in time.
    pub(super) fn synchronize(&self, patience: Duration) -> bool {
        let (reached, end) = channel();
        self.stream().push(move || {
            let _ = reached.send(());
        });
        end.recv_timeout(patience).is_ok()
    }

    /// The text of the communicator's error, or of the last error of this thread's calls.
    pub(super) fn text(&self) -> String {
        let comm = self.comm.get();
        let communicator = (!comm.is_null()).then(|| handles::find(comm, "a test").unwrap());
        communicator.and_then(|it| it.error_text()).unwrap_or_else(|| LAST_ERROR_HERE.with_borrow(Clone::clone))
    }

    /// Waits for an asynchronous error and returns it.
    pub(super) fn await_error(&self) -> (c_int, String) {
        let start = Instant::now();
        loop {
            match self.settle() {
                0 => assert!(start.elapsed() < PATIENCE, "no error occurred"),
                code => return (code, self.text()),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.comm.get().is_null() {
            return;
        }
        if std::thread::panicking() {
            // Otherwise, the other ranks would wait forever.
            return self.abort();
        }
        self.done(self.finalize());
        self.destroy();
    }
}

/// Makes calls as one group.
pub(super) fn grouped(calls: impl FnOnce()) -> c_int {
    // SAFETY: the function has no requirements.
    assert_eq!(unsafe { ncclGroupStart() }, 0);
    calls();
    // SAFETY: the function has no requirements.
    unsafe { ncclGroupEnd() }
}

/// # Safety
/// The communicator must be alive.
pub(super) unsafe fn async_error(comm: Handle) -> c_int {
    let mut code = -1;
    // SAFETY: guaranteed by the caller, and the code is written by the call.
    unsafe {
        assert_eq!(ncclCommGetAsyncError(comm, &raw mut code), 0);
    }
    code
}

/// Waits for an event; `otherwise` is the message if it does not come.
pub(super) fn wait_until(event: impl Fn() -> bool, otherwise: &str) {
    let start = Instant::now();
    while !event() {
        assert!(start.elapsed() < PATIENCE, "{otherwise}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `body` on threads that are ranks, without communicators.
pub(super) fn threads<T: Send>(size: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    settle_down("host", rank as i32, false);
                    body(rank)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` on the ranks of a communicator, blocking or not.
pub(super) fn ranks<T: Send>(size: usize, blocking: bool, body: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let (id, all_are_there) = (id(), Barrier::new(size));
    threads(size, |rank| {
        let rank = Rank::connect(id, rank, size, blocking);
        all_are_there.wait();
        body(&rank)
    })
}

/// Runs `body` in worlds of one to three ranks, blocking or not.
pub(super) fn in_all_worlds(body: impl Fn(&Rank) + Sync) {
    for size in 1..=3 {
        for blocking in [true, false] {
            ranks(size, blocking, &body);
        }
    }
}

/// All types, as NCCL's numbers.
pub(super) const DTYPES: std::ops::Range<c_int> = 0..10;

fn dtype(number: c_int) -> Dtype {
    Dtype::from_number(number as usize).unwrap()
}

pub(super) fn is_float(number: c_int) -> bool {
    (6..10).contains(&number)
}

/// Encodes numbers as in a buffer.
pub(super) fn encode(number: c_int, values: impl Iterator<Item = f64>) -> Vec<u8> {
    values
        .flat_map(|value| match dtype(number) {
            Dtype::I8 => (value as i8).to_le_bytes().to_vec(),
            Dtype::U8 => (value as u8).to_le_bytes().to_vec(),
            Dtype::I32 => (value as i32).to_le_bytes().to_vec(),
            Dtype::U32 => (value as u32).to_le_bytes().to_vec(),
            Dtype::I64 => (value as i64).to_le_bytes().to_vec(),
            Dtype::U64 => (value as u64).to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
            Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
            Dtype::F64 => value.to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        })
        .collect()
}
