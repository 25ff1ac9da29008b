//! What several test files share.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part, and a failed test may panic
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::{ProcessGroup, Result, SpawnOptions, spawn_with};
use candle_nn::{VarBuilder, VarMap};
use std::time::Duration;

/// Ranks as threads, with a time-out short enough that a hang fails the test.
pub(crate) fn ranks<T: Send>(world_size: usize, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Result<Vec<T>> {
    spawn_with(SpawnOptions { world_size, timeout: Duration::from_secs(30) }, work)
}

/// Reproducible values in -1..1, different for every seed.
pub(crate) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    next();
    (0..count).map(|_| next()).collect()
}

pub(crate) fn tensor(shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(values(shape.iter().product(), seed), shape, &Device::Cpu).unwrap()
}

/// Fills the variables of `varmap` with values that depend on `seed` and on each one's name.
pub(crate) fn fill(varmap: &VarMap, seed: u64) {
    for (name, var) in varmap.data().lock().unwrap().iter() {
        let seed = name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let value = (tensor(var.dims(), seed) * 0.3).unwrap().to_dtype(var.dtype()).unwrap();
        let value = value.to_device(var.device()).unwrap();
        var.set(&value).unwrap();
    }
}

pub(crate) fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub(crate) fn var(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

/// Asserts that two lists of values agree relative to the largest of them.
#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-6f32, |largest, value| largest.max(value.abs()));
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= tolerance * largest, "{what}: element {index} is {a}, expected {e}");
    }
}

/// Adds to its input how many forward passes there were, and counts this one.
pub(crate) struct Counting {
    passes: Var,
}

impl Counting {
    pub(crate) fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        // Copied before the buffer, so that a replica is late to read it.
        vb.get((1 << 20, 4), "large")?;
        Ok(Self { passes: Var::from_tensor(&vb.get(1, "num_batches_tracked")?)? })
    }
}

impl Module for Counting {
    fn forward(&self, xs: &Tensor) -> candle_core::Result<Tensor> {
        let passes = self.passes.as_detached_tensor();
        let output = xs.broadcast_add(&passes)?;
        self.passes.set(&(passes + 1.0)?)?;
        Ok(output)
    }
}
