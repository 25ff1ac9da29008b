//! CUDA's driver: devices, contexts and errors.
use crate::object::give;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A `CUresult`.
pub(crate) type Answer = c_int;
pub(crate) const SUCCESS: Answer = 0;
pub(crate) const INVALID_VALUE: Answer = 1;
pub(crate) const OUT_OF_MEMORY: Answer = 2;
const NO_DEVICE: Answer = 100;
const INVALID_DEVICE: Answer = 101;
pub(crate) const INVALID_IMAGE: Answer = 200;
pub(crate) const INVALID_CONTEXT: Answer = 201;
pub(crate) const INVALID_HANDLE: Answer = 400;
pub(crate) const NOT_FOUND: Answer = 500;
pub(crate) const NOT_READY: Answer = 600;

/// Ends the process in situations where the behaviour of a GPU is undefined.
pub(crate) fn fatal(reason: &str) -> ! {
    eprintln!("emulated GPU: {reason}");
    std::process::abort()
}

/// Returns the GPUs that the process sees: `EMULATED_GPUS` of them (default: 1), restricted to those that
/// `CUDA_VISIBLE_DEVICES` lists by number.
fn visible() -> &'static [i32] {
    static VISIBLE: OnceLock<Vec<i32>> = OnceLock::new();
    VISIBLE.get_or_init(|| {
        let count = std::env::var("EMULATED_GPUS").ok().and_then(|count| count.parse().ok()).unwrap_or(1);
        match std::env::var("CUDA_VISIBLE_DEVICES") {
            // Like CUDA, stops at the first device that does not exist.
            Ok(list) => list.split(',').map_while(|device| device.trim().parse().ok().filter(|n| *n < count)).collect(),
            Err(_) => (0..count).collect(),
        }
    })
}

thread_local! {
    static CURRENT: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
}

/// Returns a device's only context: its number, counted from 1.
fn context(device: i32) -> *mut c_void {
    (device as usize + 1) as *mut c_void
}

/// Returns the device of the calling thread's context.
pub(crate) fn context_device() -> Option<i32> {
    (CURRENT.get() as i32).checked_sub(1).filter(|device| *device >= 0)
}

/// Returns the number of the calling thread's device among all devices of the machine, including those that this
/// process does not see.
pub(crate) fn current_device() -> i32 {
    let device = context_device().unwrap_or(0);
    visible().get(device as usize).copied().unwrap_or(0)
}

fn known(device: c_int) -> bool {
    (0..visible().len() as c_int).contains(&device)
}

/// The driver's lock, if `EMULATED_GPU_DRIVER_LOCK` is set: functions that wait hold it, and queries of events wait for it. The driver
/// is known to behave so at times.
pub(crate) fn driver_lock() -> Option<MutexGuard<'static, ()>> {
    static WANTED: OnceLock<bool> = OnceLock::new();
    static LOCK: Mutex<()> = Mutex::new(());
    let wanted = *WANTED.get_or_init(|| std::env::var_os("EMULATED_GPU_DRIVER_LOCK").is_some());
    wanted.then(|| LOCK.lock().unwrap_or_else(PoisonError::into_inner))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> Answer {
    if visible().is_empty() { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { give(count, visible().len() as c_int) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Answer {
    if !known(ordinal) {
        return INVALID_DEVICE;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { give(device, ordinal) }
}

/// The number of multiprocessors of a GPU.
pub(crate) fn multiprocessors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::env::var("EMULATED_GPU_BLOCKS").ok().and_then(|count| count.parse().ok()).unwrap_or(132))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> Answer {
    let Some(physical) = visible().get(device as usize) else { return INVALID_DEVICE };
    let answer = match attribute {
        1 => 1024,     // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024, // MAX_BLOCK_DIM_X, _Y
        4 => 64,       // MAX_BLOCK_DIM_Z
        8 => 48 << 10, // MAX_SHARED_MEMORY_PER_BLOCK
        10 => 32,      // WARP_SIZE
        16 => multiprocessors() as c_int,
        33 if is_split() => 1, // PCI_BUS_ID
        33 => physical + 1,
        34 | 50 => 0, // PCI_DEVICE_ID, PCI_DOMAIN_ID
        75 => 9,      // COMPUTE_CAPABILITY_MAJOR
        76 => 0,      // COMPUTE_CAPABILITY_MINOR
        115 => 1,     // MEMORY_POOLS_SUPPORTED
        other => fatal(&format!("cuDeviceGetAttribute: attribute {other} is not supported")),
    };
    // SAFETY: guaranteed by the caller.
    unsafe { give(value, answer) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> Answer {
    let Some(physical) = visible().get(device as usize) else { return INVALID_VALUE };
    let names = std::env::var("EMULATED_GPU_NAMES").unwrap_or_default();
    let own = names.split(',').nth(*physical as usize).filter(|own| !own.is_empty()).unwrap_or("Emulated GPU");
    let Ok(own) = CString::new(own) else { return INVALID_VALUE };
    if (length as usize) < own.count_bytes() + 1 {
        return INVALID_VALUE;
    }
    // SAFETY: there is room for the name.
    unsafe { name.copy_from_nonoverlapping(own.as_ptr(), own.count_bytes() + 1) };
    SUCCESS
}

/// Whether the devices are instances (MIG) of one GPU, if `EMULATED_GPU_MIG` is set.
fn is_split() -> bool {
    std::env::var_os("EMULATED_GPU_MIG").is_some()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Answer {
    let Some(physical) = visible().get(device as usize) else { return INVALID_DEVICE };
    // SAFETY: guaranteed by the caller.
    unsafe { uuid.write([*physical as u8 + 1; 16]) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(handle: *mut *mut c_void, device: c_int) -> Answer {
    if !known(device) {
        return INVALID_DEVICE;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { give(handle, context(device)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Answer {
    if known(device) { SUCCESS } else { INVALID_DEVICE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(handle: *mut c_void) -> Answer {
    CURRENT.set(handle);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(handle: *mut *mut c_void) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { give(handle, CURRENT.get()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> Answer {
    let Some(device) = context_device() else { return INVALID_CONTEXT };
    let _lock = driver_lock();
    crate::stream::synchronize_device(device);
    crate::pool::synchronized();
    SUCCESS
}

fn describe(error: Answer) -> &'static CStr {
    match error {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        _ => c"an error of CUDA",
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { give(text, describe(error).as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { cuGetErrorName(error, text) }
}
