//! The memory of devices: the process's own, watched over.
use crate::driver::{Answer, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, SUCCESS, context_device, fatal};
use crate::stream::{Origin, find, push};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_uchar, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What memory holds before it is written and after it is freed: NaN, in every dtype that has one.
const POISON: u8 = 0xFF;
/// How much freed memory is kept back, to see whether somebody still writes to it.
const KEPT_BACK: usize = 256 << 20;
const ALIGNMENT: usize = 256;

struct Memory {
    /// Bytes by address.
    live: BTreeMap<usize, usize>,
    /// What is kept back, by address; and the addresses, the oldest first.
    freed: BTreeMap<usize, Freed>,
    order: VecDeque<usize>,
    freed_bytes: usize,
}

struct Freed {
    bytes: usize,
    by: Origin,
}

impl Memory {
    /// Who freed the memory at `address`, if it is kept back.
    fn freed_at(&self, address: usize) -> Option<&Origin> {
        let (start, freed) = self.freed.range(..=address).next_back()?;
        (address < start + freed.bytes).then_some(&freed.by)
    }
}

static MEMORY: Mutex<Memory> =
    Mutex::new(Memory { live: BTreeMap::new(), freed: BTreeMap::new(), order: VecDeque::new(), freed_bytes: 0 });

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGNMENT).unwrap_or_else(|_| fatal("an allocation larger than the address space"))
}

fn allocate(bytes: usize) -> usize {
    // SAFETY: nobody allocates zero bytes.
    let start = unsafe { alloc(layout(bytes)) };
    if start.is_null() {
        fatal("out of memory");
    }
    // SAFETY: just allocated.
    unsafe { start.write_bytes(POISON, bytes) };
    memory().live.insert(start as usize, bytes);
    start as usize
}

/// Poisons it, and keeps it back for a while.
fn free(address: usize) {
    let mut memory = memory();
    let Some(bytes) = memory.live.remove(&address) else { fatal("memory was freed twice, or never allocated") };
    // SAFETY: it is still allocated, and nothing that runs on a stream should use it any more.
    unsafe { (address as *mut u8).write_bytes(POISON, bytes) };
    memory.freed.insert(address, Freed { bytes, by: Origin::current() });
    memory.order.push_back(address);
    memory.freed_bytes += bytes;
    while memory.freed_bytes > KEPT_BACK {
        let Some(address) = memory.order.pop_front() else { break };
        let Some(Freed { bytes, by }) = memory.freed.remove(&address) else { break };
        memory.freed_bytes -= bytes;
        // SAFETY: still allocated.
        let contents = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        if contents.iter().any(|byte| *byte != POISON) {
            fatal(&format!("memory was written after it was freed: {bytes} bytes at {address:#x}, freed by {by}"));
        }
        // SAFETY: allocated with this layout, and in no list any more.
        unsafe { dealloc(address as *mut u8, layout(bytes)) };
    }
}

/// Ends the process unless all of it is allocated, as what a stream uses must be when it gets there.
pub(crate) fn check(address: u64, bytes: usize, what: &str) {
    if bytes == 0 {
        return;
    }
    let address = address as usize;
    let memory = memory();
    let inside = memory.live.range(..=address).next_back();
    if inside.is_none_or(|(start, length)| address + bytes > start + length) {
        let freed = memory.freed_at(address).map_or(String::new(), |by| format!("\nThey were freed by {by}"));
        let user = Origin::current();
        fatal(&format!("{what}: {bytes} bytes at {address:#x} are not, or no longer, allocated; on {user}{freed}"));
    }
}

/// Ends the process if `value`, which a kernel gets, is the address of memory that was freed.
pub(crate) fn check_argument(value: u64, kernel: &str) {
    if let Some(by) = memory().freed_at(value as usize) {
        let user = Origin::current();
        fatal(&format!("the kernel {kernel} uses memory that was freed: {value:#x}; on {user}\nIt was freed by {by}"));
    }
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) -> Answer {
    if find(stream).is_none() {
        return INVALID_HANDLE;
    }
    // Nothing is nowhere: programs rely on it that this is no error, as it is one of `cuMemAlloc`.
    let start = if bytes == 0 { 0 } else { allocate(bytes) as u64 };
    // SAFETY: the caller's promise.
    unsafe { *address = start };
    SUCCESS
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> Answer {
    push(stream, move || {
        if address != 0 {
            free(address as usize)
        }
    })
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Answer {
    if bytes == 0 {
        return INVALID_VALUE;
    }
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    // SAFETY: the caller's promise.
    unsafe { *address = allocate(bytes) as u64 };
    SUCCESS
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> Answer {
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    // It waits for the device, as CUDA's does.
    crate::stream::synchronize_device();
    free(address as usize);
    SUCCESS
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Answer {
    const TOTAL: usize = 16 << 30;
    let used: usize = memory().live.values().sum();
    // SAFETY: the caller's promise.
    unsafe { (*free, *total) = (TOTAL.saturating_sub(used), TOTAL) };
    SUCCESS
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(address: u64, value: c_uchar, bytes: usize, stream: *mut c_void) -> Answer {
    push(stream, move || {
        check(address, bytes, "cuMemsetD8Async");
        // SAFETY: it is allocated.
        unsafe { (address as *mut u8).write_bytes(value, bytes) };
    })
}

/// From memory that is not pinned, as all is here: the data is taken at once, and written by the stream.
///
/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    address: u64,
    host: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Answer {
    if bytes == 0 {
        return if find(stream).is_some() { SUCCESS } else { INVALID_HANDLE };
    }
    // SAFETY: the caller's promise.
    let data = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), bytes) }.to_vec();
    push(stream, move || {
        check(address, bytes, "cuMemcpyHtoDAsync");
        // SAFETY: it is allocated.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(data.as_ptr(), bytes) };
    })
}

/// To memory that is not pinned, as all is here: waits for the stream.
///
/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    host: *mut c_void,
    address: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Answer {
    let Some(stream) = find(stream) else { return INVALID_HANDLE };
    stream.synchronize();
    check(address, bytes, "cuMemcpyDtoHAsync");
    // SAFETY: the caller's promise, and it is allocated.
    unsafe { host.cast::<u8>().copy_from_nonoverlapping(address as *const u8, bytes) };
    SUCCESS
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void) -> Answer {
    push(stream, move || {
        check(from, bytes, "the source of cuMemcpyDtoDAsync");
        check(to, bytes, "the destination of cuMemcpyDtoDAsync");
        // SAFETY: both are allocated.
        unsafe { (to as *mut u8).copy_from(from as *const u8, bytes) };
    })
}

/// # Safety
/// As CUDA's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_context: *mut c_void,
    from: u64,
    _from_context: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
}
