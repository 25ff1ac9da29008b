//! Device memory, which is the process's own memory with checks, and pinned host memory.
use crate::count::{ALLOCATION, count};
use crate::driver::{
    Answer, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, context_device, driver_lock, fatal,
};
use crate::object::give;
use crate::stream::{Origin, find, is_idle, push};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_uchar, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The content of memory before it is written and after it is freed: NaN in every dtype that has one.
const POISON: u8 = 0xFF;
/// How much freed memory is retained to detect writes after the free.
const KEPT_BACK: usize = 256 << 20;
const ALIGNMENT: usize = 256;

struct Memory {
    /// The sizes in bytes, by address.
    live: BTreeMap<usize, usize>,
    /// The retained allocations by address, and their addresses, oldest first.
    freed: BTreeMap<usize, Freed>,
    order: VecDeque<usize>,
    freed_bytes: usize,
}

struct Freed {
    bytes: usize,
    by: Origin,
}

impl Memory {
    /// Returns the origin of the call that freed the memory at `address`, if that memory is retained.
    fn freed_at(&self, address: usize) -> Option<&Origin> {
        let (start, freed) = self.freed.range(..=address).next_back()?;
        (address < start + freed.bytes).then_some(&freed.by)
    }
}

/// The sizes of pinned host memory in bytes, by address.
static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Whether the whole range is pinned host memory.
fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
    pinned.range(..=address).next_back().is_some_and(|(start, length)| address + bytes <= start + length)
}

static MEMORY: Mutex<Memory> =
    Mutex::new(Memory { live: BTreeMap::new(), freed: BTreeMap::new(), order: VecDeque::new(), freed_bytes: 0 });

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGNMENT).unwrap_or_else(|_| fatal("an allocation larger than the address space"))
}

/// Copies of at most so many bytes are made even if the GPU is idle.
const SMALL: usize = 1 << 20;

/// How much the emulated GPU has at most. A system may promise more than it has.
const MOST: usize = 1 << 40;

fn allocate(bytes: usize) -> Option<usize> {
    if bytes > MOST {
        return None;
    }
    // SAFETY: the size is never zero.
    let start = unsafe { alloc(layout(bytes)) };
    if start.is_null() {
        return None;
    }
    if !is_idle() {
        // SAFETY: the memory was just allocated.
        unsafe { start.write_bytes(POISON, bytes) };
    }
    memory().live.insert(start as usize, bytes);
    Some(start as usize)
}

/// Poisons an allocation and retains it for a while.
fn free(address: usize) {
    let mut memory = memory();
    let Some(bytes) = memory.live.remove(&address) else { fatal("memory was freed twice, or never allocated") };
    if is_idle() {
        // What was not touched takes no memory.
        return;
    }
    // SAFETY: the memory is still allocated, and no work on a stream should use it any more.
    unsafe { (address as *mut u8).write_bytes(POISON, bytes) };
    memory.freed.insert(address, Freed { bytes, by: Origin::current() });
    memory.order.push_back(address);
    memory.freed_bytes += bytes;
    while memory.freed_bytes > KEPT_BACK {
        let Some(address) = memory.order.pop_front() else { break };
        let Some(Freed { bytes, by }) = memory.freed.remove(&address) else { break };
        memory.freed_bytes -= bytes;
        // SAFETY: the memory is still allocated.
        let contents = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        if contents.iter().any(|byte| *byte != POISON) {
            fatal(&format!("memory was written after it was freed: {bytes} bytes at {address:#x}, freed by {by}"));
        }
        // SAFETY: it was allocated with this layout and is no longer in any list.
        unsafe { dealloc(address as *mut u8, layout(bytes)) };
    }
}

/// Ends the process unless the whole range is allocated, as it must be when a stream uses it.
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
        fatal(&format!("{what}: {bytes} bytes at {address:#x} are not allocated, or were freed; on {user}{freed}"));
    }
}

/// Ends the process if `value`, an argument of a kernel, is the address of freed memory.
pub(crate) fn check_argument(value: u64, kernel: &str) {
    if let Some(by) = memory().freed_at(value as usize) {
        let user = Origin::current();
        fatal(&format!("the kernel {kernel} uses memory that was freed: {value:#x}; on {user}\nIt was freed by {by}"));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) -> Answer {
    if find(stream).is_none() {
        return INVALID_HANDLE;
    }
    count(ALLOCATION, bytes);
    // Allocating zero bytes succeeds, because programs rely on that, although it is an error of `cuMemAlloc`.
    let start = if bytes == 0 { Some(0) } else { allocate(bytes) };
    let Some(start) = start else { return OUT_OF_MEMORY };
    if start != 0 && !crate::pool::took(start, bytes) {
        free(start);
        return OUT_OF_MEMORY;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { *address = start as u64 };
    // On a GPU, work before this point of the stream may still use the memory for something else, and write it.
    push(stream, move || {
        if start != 0 {
            check(start as u64, bytes, "an allocation");
            // SAFETY: the memory is allocated, and nothing may use it before the stream has come here.
            unsafe { (start as *mut u8).write_bytes(POISON, bytes) };
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> Answer {
    if address == 0 {
        count("free", 0);
    }
    let free = move || {
        if address != 0 {
            crate::pool::gave_back(address as usize);
            free(address as usize)
        }
    };
    if is_idle() {
        free();
        return SUCCESS;
    }
    push(stream, free)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Answer {
    if bytes == 0 {
        return INVALID_VALUE;
    }
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    count(ALLOCATION, bytes);
    let Some(start) = allocate(bytes) else { return OUT_OF_MEMORY };
    // SAFETY: guaranteed by the caller.
    unsafe { give(address, start as u64) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> Answer {
    let Some(device) = context_device() else { return INVALID_CONTEXT };
    // Waits for the device, like CUDA's function.
    crate::stream::synchronize_device(device);
    free(address as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Answer {
    let all = crate::pool::size();
    let used = || memory().live.values().sum();
    let left = crate::pool::free().unwrap_or_else(|| all.saturating_sub(used()));
    // SAFETY: guaranteed by the caller.
    unsafe { (*free, *total) = (left, all) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(address: u64, value: c_uchar, bytes: usize, stream: *mut c_void) -> Answer {
    count("memset", bytes);
    push(stream, move || {
        check(address, bytes, "cuMemsetD8Async");
        // SAFETY: the memory is allocated.
        unsafe { (address as *mut u8).write_bytes(value, bytes) };
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Answer {
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    if bytes == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the size is not zero, and there are as many bytes.
    let start = unsafe {
        let start = alloc(layout(bytes));
        if start.is_null() {
            return OUT_OF_MEMORY;
        }
        start.write_bytes(POISON, bytes);
        start
    };
    PINNED.lock().unwrap_or_else(PoisonError::into_inner).insert(start as usize, bytes);
    // SAFETY: guaranteed by the caller.
    unsafe { give(address, start.cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(address: *mut c_void) -> Answer {
    match PINNED.lock().unwrap_or_else(PoisonError::into_inner).remove(&(address as usize)) {
        Some(bytes) => {
            // SAFETY: it was allocated with this layout, and is poisoned for a copy that did not end before.
            unsafe {
                address.cast::<u8>().write_bytes(POISON, bytes);
                dealloc(address.cast(), layout(bytes));
            }
            SUCCESS
        }
        None => fatal("pinned host memory was freed twice, or never allocated"),
    }
}

/// Copies from host memory. The stream reads pinned memory when it comes to it, and must find it there; other memory is read at
/// once, and the stream writes it.
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
    count("copy to the GPU", bytes);
    if is_idle() {
        // SAFETY: guaranteed by the caller. What ranks tell each other arrives.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(host.cast::<u8>(), bytes) };
        return SUCCESS;
    }
    let source = host as usize;
    if is_pinned(source, bytes) {
        return push(stream, move || {
            check(address, bytes, "cuMemcpyHtoDAsync");
            if !is_pinned(source, bytes) {
                fatal("cuMemcpyHtoDAsync: the pinned host memory was freed before the copy");
            }
            // SAFETY: both are allocated.
            unsafe { (address as *mut u8).copy_from_nonoverlapping(source as *const u8, bytes) };
        });
    }
    // SAFETY: guaranteed by the caller.
    let data = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), bytes) }.to_vec();
    push(stream, move || {
        check(address, bytes, "cuMemcpyHtoDAsync");
        // SAFETY: the memory is allocated.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(data.as_ptr(), bytes) };
    })
}

/// Copies to host memory. The stream writes pinned memory when it comes to it, and must find it there; with other memory, the host waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    host: *mut c_void,
    address: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Answer {
    let Some(stream) = find(stream) else { return INVALID_HANDLE };
    count("copy from the GPU", bytes);
    let to = host as usize;
    if is_pinned(to, bytes) && !is_idle() {
        stream.push(move || {
            check(address, bytes, "cuMemcpyDtoHAsync");
            if !is_pinned(to, bytes) {
                fatal("cuMemcpyDtoHAsync: the pinned host memory was freed before the copy");
            }
            // SAFETY: both are allocated.
            unsafe { (to as *mut u8).copy_from_nonoverlapping(address as *const u8, bytes) };
        });
        return SUCCESS;
    }
    let _lock = driver_lock();
    stream.synchronize();
    crate::pool::synchronized();
    check(address, bytes, "cuMemcpyDtoHAsync");
    // SAFETY: guaranteed by the caller, and the device memory is allocated.
    unsafe { host.cast::<u8>().copy_from_nonoverlapping(address as *const u8, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void) -> Answer {
    count("copy", bytes);
    if is_idle() && bytes <= SMALL {
        let Some(stream) = find(stream) else { return INVALID_HANDLE };
        stream.synchronize();
        // SAFETY: guaranteed by the caller.
        unsafe { (to as *mut u8).copy_from(from as *const u8, bytes) };
        return SUCCESS;
    }
    push(stream, move || {
        check(from, bytes, "the source of cuMemcpyDtoDAsync");
        check(to, bytes, "the destination of cuMemcpyDtoDAsync");
        // SAFETY: both ranges are allocated.
        unsafe { (to as *mut u8).copy_from(from as *const u8, bytes) };
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_context: *mut c_void,
    from: u64,
    _from_context: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Answer {
    // SAFETY: guaranteed by the caller.
    unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
}
