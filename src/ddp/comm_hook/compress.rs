//! Hooks of one stage: all-reduce as it is, in half the precision, or not at all.
use super::{CommHook, GradBucket, HookWork};
use crate::kernels::Assignment;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{ReduceOp, Result};
use candle_core::{DType, Tensor};

/// The mean over the ranks, as DDP makes it without a hook (which is a little faster): PyTorch's `allreduce_hook`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce {
    bytes: u64,
}

/// Sends gradients as f16, and converts their mean back: PyTorch's `fp16_compress_hook`.
///
/// What is larger than 65504 when divided by the number of ranks becomes infinite, and what is smaller than 6e-8 zero. A
/// [`GradScaler`](crate::GradScaler) helps with the one as with the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fp16Compress {
    bytes: u64,
}

/// Sends gradients as bf16, and converts their mean back: PyTorch's `bf16_compress_hook`. bf16 has the range of f32, and
/// 8 bits of precision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16Compress {
    bytes: u64,
}

/// Sends nothing: gradients stay each rank's own, undivided. For measuring what communication costs, and for programs
/// that average parameters instead (PyTorch's `noop_hook`).
///
/// Buffers are still broadcast, unless `DdpOptions::broadcast_buffers` is off: with it off, ranks may make as many steps
/// as they like.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noop;

/// Starts the mean of a bucket over the ranks, in place: divided first, so that sums do not overflow.
pub(super) fn all_reduce<H>(bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<H>> {
    copy::scale(bucket.buffer(), 1.0 / group.world_size() as f64)?;
    Ok(HookWork::wait([group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?]))
}

/// Starts the mean of a bucket in `dtype`. It is divided and converted in one step, which rounds once.
fn compressed<H>(bucket: &GradBucket, group: &ProcessGroup, dtype: DType) -> Result<HookWork<H>> {
    if bucket.buffer().dtype() == dtype {
        return all_reduce(bucket, group);
    }
    let compressed = Tensor::zeros(bucket.buffer().elem_count(), dtype, bucket.buffer().device())?;
    let factor = 1.0 / group.world_size() as f64;
    let compression = Assignment { destination: &compressed, source: bucket.buffer(), factor, accumulate: false };
    copy::assign(&[compression])?;
    let work = group.all_reduce_async(&compressed, ReduceOp::Sum)?;
    Ok(HookWork::then([work], move |_, bucket, _| {
        bucket.set_buffer(&compressed)?;
        Ok(HookWork::done())
    }))
}

impl CommHook for AllReduce {
    fn describe(&self) -> String {
        "all-reduce".to_string()
    }

    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        self.bytes += bucket.bytes() as u64;
        all_reduce(bucket, group)
    }

    fn bytes_sent(&self) -> Option<u64> {
        Some(self.bytes)
    }
}

/// Both halves are alike.
macro_rules! half {
    ($($hook:ident: $dtype:expr, $name:literal;)*) => {$(
        impl CommHook for $hook {
            fn describe(&self) -> String {
                $name.to_string()
            }

            fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
                self.bytes += (bucket.buffer().elem_count() * $dtype.size_in_bytes()) as u64;
                compressed(bucket, group, $dtype)
            }

            fn bytes_sent(&self) -> Option<u64> {
                Some(self.bytes)
            }
        }
    )*};
}
half! {
    Fp16Compress: DType::F16, "fp16 compression";
    Bf16Compress: DType::BF16, "bf16 compression";
}

impl CommHook for Noop {
    fn describe(&self) -> String {
        "no-op".to_string()
    }

    fn run(&mut self, _: &GradBucket, _: &ProcessGroup) -> Result<HookWork<Self>> {
        Ok(HookWork::done())
    }

    fn is_local(&self) -> bool {
        true
    }

    fn bytes_sent(&self) -> Option<u64> {
        Some(0)
    }
}
