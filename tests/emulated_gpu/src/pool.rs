//! The memory pool of the device: how much memory it holds. All devices share one.
//!
//! With `EMULATED_GPU_MEMORY`, it and NCCL's communicators share so many bytes. Memory that was freed stays in the pool until a synchronisation, which returns what exceeds the release threshold.
use crate::driver::{Answer, INVALID_VALUE, SUCCESS};
use crate::object::give;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_CURRENT: c_int = 5;
const USED_CURRENT: c_int = 7;
const USED_HIGH: c_int = 8;

#[derive(Default)]
struct Pool {
    threshold: u64,
    reserved: u64,
    used: u64,
    /// The most that was in use at a time.
    high: u64,
    /// What does not come from the pool.
    outside: u64,
    /// The sizes of what is in use, by address.
    live: Option<HashMap<usize, u64>>,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { threshold: 0, reserved: 0, used: 0, high: 0, outside: 0, live: None });

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limit() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        std::env::var("EMULATED_GPU_MEMORY").ok().and_then(|bytes| bytes.parse().ok()).unwrap_or(u64::MAX)
    })
}

/// What the GPU says that it has.
pub(crate) fn size() -> usize {
    if limit() == u64::MAX { 16 << 30 } else { limit() as usize }
}

/// The part of a limited memory that neither the pool nor NCCL's communicators have.
pub(crate) fn free() -> Option<usize> {
    let Pool { reserved, outside, .. } = *pool();
    (limit() < u64::MAX).then(|| limit().saturating_sub(reserved.saturating_add(outside)) as usize)
}

/// Whether there was room in the pool, or on the GPU, for an allocation at `address`.
pub(crate) fn took(address: usize, bytes: usize) -> bool {
    let mut pool = pool();
    let reserved = pool.reserved.max(pool.used + bytes as u64);
    let fits = reserved.saturating_add(pool.outside) <= limit();
    if fits {
        pool.used += bytes as u64;
        pool.high = pool.high.max(pool.used);
        pool.reserved = reserved;
        pool.live.get_or_insert_default().insert(address, bytes as u64);
    }
    fits
}

/// Whether there was room on the GPU for memory that does not come from the pool.
pub(crate) fn took_outside(bytes: u64) -> bool {
    let mut pool = pool();
    let fits = pool.reserved.saturating_add(pool.outside + bytes) <= limit();
    if fits {
        pool.outside += bytes;
    }
    fits
}

pub(crate) fn gave_back_outside(bytes: u64) {
    pool().outside -= bytes;
}

pub(crate) fn gave_back(address: usize) {
    let mut pool = pool();
    let bytes = pool.live.as_mut().and_then(|live| live.remove(&address));
    pool.used -= bytes.unwrap_or(0);
}

/// Called after a stream, an event or the device was waited for.
pub(crate) fn synchronized() {
    let mut pool = pool();
    if pool.reserved > pool.threshold {
        pool.reserved = pool.used.max(pool.threshold);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(handle: *mut *mut c_void, _device: c_int) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { give(handle, std::ptr::dangling_mut::<Pool>().cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetMemPool(handle: *mut *mut c_void, device: c_int) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { cuDeviceGetDefaultMemPool(handle, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAttribute(_pool: *mut c_void, attribute: c_int, value: *mut c_void) -> Answer {
    if attribute != RELEASE_THRESHOLD {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller, for this attribute.
    pool().threshold = unsafe { value.cast::<u64>().read() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolTrimTo(_pool: *mut c_void, bytes: usize) -> Answer {
    let mut pool = pool();
    pool.reserved = pool.reserved.min(pool.used.max(bytes as u64));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolGetAttribute(_pool: *mut c_void, attribute: c_int, value: *mut c_void) -> Answer {
    let pool = pool();
    let answer = match attribute {
        RELEASE_THRESHOLD => pool.threshold,
        RESERVED_CURRENT => pool.reserved,
        USED_CURRENT => pool.used,
        USED_HIGH => pool.high,
        _ => return INVALID_VALUE,
    };
    // SAFETY: guaranteed by the caller, for these attributes.
    unsafe { value.cast::<u64>().write(answer) };
    SUCCESS
}
