//! cuRAND's random numbers, with the same distributions as cuRAND's but different values.
use crate::count::count as calls;
use crate::memory::check;
use crate::object::{create, destroyers};
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
    /// The number of values generated so far.
    position: u64,
}

/// # Safety
/// `generator` must come from `curandCreateGenerator`.
unsafe fn generator<'a>(generator: *mut c_void) -> MutexGuard<'a, Generator> {
    // SAFETY: guaranteed by the caller.
    unsafe { &*generator.cast::<Mutex<Generator>>() }.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Generator {
    /// Returns number `index` from the generator's position on, above 0 and at most 1: SplitMix64 of seed and position.
    fn uniform(&self, index: usize) -> f64 {
        let mut bits = self.seed.wrapping_add((self.position + index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON / 4.
    }

    /// Returns a normally distributed number by the Box-Muller method, which uses two uniform numbers per index.
    fn normal(&self, index: usize) -> f64 {
        let (first, second) = (self.uniform(index & !1), self.uniform(index | 1));
        let angle = std::f64::consts::TAU * second;
        (-2. * first.ln()).sqrt() * if index.is_multiple_of(2) { angle.cos() } else { angle.sin() }
    }
}

/// Fills `count` elements with `value`, on the generator's stream.
///
/// # Safety
/// `handle` must be a generator, and `output` an array in device memory.
unsafe fn fill<T: Copy + 'static>(
    handle: *mut c_void,
    output: *mut T,
    count: usize,
    value: impl Fn(&Generator, usize) -> T + Send + 'static,
) -> Status {
    // SAFETY: guaranteed by the caller.
    let mut locked = unsafe { generator(handle) };
    let here = *locked;
    locked.position += count as u64;
    let address = output as u64;
    calls("random numbers", count);
    let pushed = push(here.stream as *mut c_void, move || {
        check(address, count * size_of::<T>(), "random numbers");
        for index in 0..count {
            // SAFETY: the array is allocated; the program guarantees that nothing else uses it.
            unsafe { *(address as *mut T).add(index) = value(&here, index) };
        }
    });
    if pushed == 0 { SUCCESS } else { LAUNCH_FAILURE }
}

destroyers!(curandDestroyGenerator: Mutex<Generator>);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandCreateGenerator(handle: *mut *mut c_void, _kind: c_int) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, Mutex::new(Generator::default())) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetStream(handle: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { generator(handle) }.stream = stream as usize;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetPseudoRandomGeneratorSeed(handle: *mut c_void, seed: c_ulonglong) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { generator(handle) }.seed = seed;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandSetGeneratorOffset(handle: *mut c_void, offset: c_ulonglong) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { generator(handle) }.position = offset;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateUniform(handle: *mut c_void, output: *mut f32, count: usize) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { fill(handle, output, count, |generator, index| generator.uniform(index) as f32) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn curandGenerateUniformDouble(handle: *mut c_void, output: *mut f64, count: usize) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { fill(handle, output, count, Generator::uniform) }
}

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
    // SAFETY: guaranteed by the caller.
    unsafe { fill(handle, output, count, move |generator, index| mean + stddev * generator.normal(index) as f32) }
}

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
    // SAFETY: guaranteed by the caller.
    unsafe { fill(handle, output, count, move |generator, index| mean + stddev * generator.normal(index)) }
}
