//! Options of the conformance suite.
use super::matrix::Case;
use crate::backend::ReduceOp;
use candle_core::{DType, Device};
use std::time::Duration;

/// Options of the conformance suite.
#[derive(Clone, Debug)]
pub struct ConformanceOptions {
    /// The cases to test, in this order. Default: [`Case::ALL`].
    pub cases: Vec<Case>,
    /// The sizes of the worlds that [`run`](super::run) creates, from 1 to 14. Default: 1, 2, 3, 4 and 7.
    pub world_sizes: Vec<usize>,
    /// The element counts of a rank's part. Most useful are small counts, counts around the sizes at which the engine
    /// changes its algorithm, and a count that the number of ranks does not divide. Counts above 1000 are tested only
    /// with the first of the `reductions`, counts above 10 000 only with f32 and bf16. Default: 0 (on the CPU; candle
    /// has no empty tensors on a GPU), 1, 2, 3, 7, 64, 1000, 10 000 and 70 001.
    pub counts: Vec<usize>,
    /// The dtypes of the tensors. Default: f32, f64, f16, bf16, i64, u32 and u8.
    pub dtypes: Vec<DType>,
    /// The reductions; averages are tested with floating-point tensors only. Default: all.
    pub reductions: Vec<ReduceOp>,
    /// Whether an average is rounded to the tensor's dtype only once, as in the CPU engine. NCCL instead rounds each
    /// value divided by the number of ranks, and the sums. Default: false.
    pub average_is_rounded_once: bool,
    /// The device of the tensors. Default: the CPU.
    pub device: Device,
    /// How long a rank waits for a key in the store from which [`run`](super::run) creates the groups. The engine's own
    /// time-out limits the calls. Default: 60 seconds.
    pub timeout: Duration,
}

impl Default for ConformanceOptions {
    fn default() -> Self {
        use {DType::*, ReduceOp::*};
        Self {
            cases: Case::ALL.to_vec(),
            world_sizes: vec![1, 2, 3, 4, 7],
            counts: vec![0, 1, 2, 3, 7, 64, 1000, 10_000, 70_001],
            dtypes: vec![F32, F64, F16, BF16, I64, U32, U8],
            reductions: vec![Sum, Avg, Min, Max, Prod],
            average_is_rounded_once: false,
            device: Device::Cpu,
            timeout: Duration::from_secs(60),
        }
    }
}
