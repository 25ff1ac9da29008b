//! Leaving out fences, to see that results are wrong without them.
//!
//! The library is the one that everybody uses: this test binary defines `cuStreamWaitEvent`, to which the library's calls are
//! linked, and passes calls on to the driver, except for those that are to be left out.
#![allow(unsafe_code)] // the driver's function is called through its address
use candle_core::Device;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// The variable that says which fences a rank leaves out.
pub(crate) const VARIABLE: &str = "CANDLE_DDP_TEST_LEFT_OUT";

/// Which streams do not wait for others.
#[derive(Clone, Copy)]
pub(crate) enum Waits {
    /// candle's, for results.
    Candles,
    /// The streams of NCCL and of copies to the GPU, for the memory that they read or overwrite.
    Others,
}

impl Waits {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Candles => "candle",
            Self::Others => "others",
        }
    }
}

/// The handle of candle's stream, and whether it (1) or any other stream (2) does not wait.
static CANDLE: AtomicUsize = AtomicUsize::new(0);
static LEFT_OUT: AtomicUsize = AtomicUsize::new(0);

/// Leaves out, from now on, the fences that the environment names, if it does.
pub(crate) fn begin(device: &Device) {
    let waits = match std::env::var(VARIABLE).as_deref() {
        Ok("candle") => 1,
        Ok("others") => 2,
        _ => return,
    };
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    CANDLE.store(stream.cu_stream() as usize, Ordering::Relaxed);
    LEFT_OUT.store(waits, Ordering::Relaxed);
}

static WAITS: AtomicUsize = AtomicUsize::new(0);

/// How often any stream was made to wait for an event.
pub(crate) fn waits() -> usize {
    WAITS.load(Ordering::Relaxed)
}

/// The priorities of the streams that were created with one.
static PRIORITIES: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

pub(crate) fn priorities() -> Vec<c_int> {
    PRIORITIES.lock().unwrap().clone()
}

type WaitEvent = unsafe extern "C" fn(*mut c_void, *mut c_void, c_uint) -> c_int;
type CreateStream = unsafe extern "C" fn(*mut *mut c_void, c_uint, c_int) -> c_int;

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The function of the driver, or of an emulated GPU.
fn driver(name: &CStr) -> *mut c_void {
    /// `RTLD_NEXT`: the first definition after this program's own.
    const NEXT: *mut c_void = usize::MAX as *mut c_void;
    // SAFETY: the name ends with a zero.
    let found = unsafe { dlsym(NEXT, name.as_ptr()) };
    assert!(!found.is_null(), "there is no {name:?} in the driver");
    found
}

/// # Safety
/// The requirements are those of the driver's function of the same name.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut *mut c_void, flags: c_uint, priority: c_int) -> c_int {
    PRIORITIES.lock().unwrap().push(priority);
    // SAFETY: this is the type of the driver's function; the rest is guaranteed by the caller.
    unsafe {
        let create = std::mem::transmute::<*mut c_void, CreateStream>(driver(c"cuStreamCreateWithPriority"));
        create(stream, flags, priority)
    }
}

/// # Safety
/// The requirements are those of the driver's function of the same name.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> c_int {
    WAITS.fetch_add(1, Ordering::Relaxed);
    let is_candles = stream as usize == CANDLE.load(Ordering::Relaxed);
    if LEFT_OUT.load(Ordering::Relaxed) == if is_candles { 1 } else { 2 } {
        return 0; // CUDA_SUCCESS
    }
    static DRIVER: OnceLock<WaitEvent> = OnceLock::new();
    let wait = *DRIVER.get_or_init(|| {
        // SAFETY: this is the type of the driver's function.
        unsafe { std::mem::transmute::<*mut c_void, WaitEvent>(driver(c"cuStreamWaitEvent")) }
    });
    // SAFETY: guaranteed by the caller.
    unsafe { wait(stream, event, flags) }
}
