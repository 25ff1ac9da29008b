//! The random numbers of cuRAND: other numbers than cuRAND's own, of the same distributions.
use crate::memory::check;
use crate::stream::push;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A `curandStatus_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const LENGTH_NOT_MULTIPLE: Status = 105;
const LAUNCH_FAILURE: Status = 201;

/// A `curandGenerator_t`.
#[derive(Clone, Copy, Default)]
struct Generator {
    stream: usize,
    seed: u64,
    /// How many numbers it has given.
    position: u64,
}

/// # Safety
/// `generator` came from `curandCreateGenerator`.
unsafe fn generator<'a>(generator: *mut c_void) -> MutexGuard<'a, Generator> {
    // SAFETY: the caller's promise.
    unsafe { &*generator.cast::<Mutex<Generator>>() }.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Generator {
    /// Number `index` from where the generator stands, above 0 and at most 1: SplitMix64 of seed and position.
    fn uniform(&self, index: usize) -> f64 {
        let mut bits = self.seed.wrapping_add((self.position + index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON / 4.
    }

    /// Two numbers of the normal distribution, by Box and Muller, of which every index has one.
    fn normal(&self, index: usize) -> f64 {
        let (first, second) = (self.uniform(index & !1), self.uniform(index | 1));
        let angle = std::f64::consts::TAU * second;
        (-2. * first.ln()).sqrt() * if index.is_multiple_of(2) { angle.cos() } else { angle.sin() }
    }
}

/// Fills `count` elements by `value`, on the generator's stream.
///
/// # Safety
/// `handle` is a generator, and `output` an array in the device's memory.
unsafe fn fill<T: Copy + 'static>(
    handle: *mut c_void,
    output: *mut T,
    count: usize,
    value: impl Fn(&Generator, usize) -> T + Send + 'static,
) -> Status {
    // SAFETY: the caller's promise.
    let mut locked = unsafe { generator(handle) };
    let here = *locked;
    locked.position += count as u64;
    let address = output as u64;
    let pushed = push(here.stream as *mut c_void, move || {
        check(address, count * size_of::<T>(), "random numbers");
        for index in 0..count {
            // SAFETY: it is allocated; that nobody else uses it is the program's promise.
            unsafe { *(address as *mut T).add(index) = value(&here, index) };
        }
    });
    if pushed == 0 { SUCCESS } else { LAUNCH_FAILURE }
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandCreateGenerator(handle: *mut *mut c_void, _kind: c_int) -> Status {
    // SAFETY: the caller's promise.
    unsafe { *handle = Box::into_raw(Box::<Mutex<Generator>>::default()).cast() };
    SUCCESS
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandDestroyGenerator(handle: *mut c_void) -> Status {
    // SAFETY: it came from `curandCreateGenerator`.
    drop(unsafe { Box::from_raw(handle.cast::<Mutex<Generator>>()) });
    SUCCESS
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetStream(handle: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: the caller's promise.
    unsafe { generator(handle) }.stream = stream as usize;
    SUCCESS
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetPseudoRandomGeneratorSeed(handle: *mut c_void, seed: c_ulonglong) -> Status {
    // SAFETY: the caller's promise.
    unsafe { generator(handle) }.seed = seed;
    SUCCESS
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetGeneratorOffset(handle: *mut c_void, offset: c_ulonglong) -> Status {
    // SAFETY: the caller's promise.
    unsafe { generator(handle) }.position = offset;
    SUCCESS
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateUniform(handle: *mut c_void, output: *mut f32, count: usize) -> Status {
    // SAFETY: the caller's promise.
    unsafe { fill(handle, output, count, |generator, index| generator.uniform(index) as f32) }
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateUniformDouble(handle: *mut c_void, output: *mut f64, count: usize) -> Status {
    // SAFETY: the caller's promise.
    unsafe { fill(handle, output, count, Generator::uniform) }
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateNormal(
    handle: *mut c_void,
    output: *mut f32,
    count: usize,
    mean: f32,
    stddev: f32,
) -> Status {
    if !count.is_multiple_of(2) {
        return LENGTH_NOT_MULTIPLE;
    }
    // SAFETY: the caller's promise.
    unsafe { fill(handle, output, count, move |generator, index| mean + stddev * generator.normal(index) as f32) }
}

/// # Safety
/// As cuRAND's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateNormalDouble(
    handle: *mut c_void,
    output: *mut f64,
    count: usize,
    mean: f64,
    stddev: f64,
) -> Status {
    if !count.is_multiple_of(2) {
        return LENGTH_NOT_MULTIPLE;
    }
    // SAFETY: the caller's promise.
    unsafe { fill(handle, output, count, move |generator, index| mean + stddev * generator.normal(index)) }
}
