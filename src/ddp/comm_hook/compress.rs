//! Hooks with one stage: all-reduce in full precision, in half precision, or not at all.
use super::{CommHook, GradBucket, HookWork};
use crate::kernels::Assignment;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{ReduceOp, Result};
use candle_core::{DType, Tensor};

/// The mean over the ranks, as DDP computes it without a hook (which is slightly faster): PyTorch's `allreduce_hook`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce {
    bytes: u64,
}

/// Sends gradients as f16 and converts the mean back: PyTorch's `fp16_compress_hook`.
///
/// Values above 65504 after division by the number of ranks become infinite, and values below 6e-8 become zero. A
/// [`GradScaler`](crate::amp::GradScaler) helps with both.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fp16Compress {
    bytes: u64,
}

/// Sends gradients as bf16 and converts the mean back: PyTorch's `bf16_compress_hook`. bf16 has the range of f32 and 8
/// bits of precision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16Compress {
    bytes: u64,
}

/// Sends nothing: each rank keeps its own gradients, undivided. Use it to measure the cost of communication, or if the
/// program averages parameters instead (PyTorch's `noop_hook`).
///
/// Buffers are still broadcast unless `DdpOptions::broadcast_buffers` is off. With it off, ranks may run different
/// numbers of steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noop;

/// Starts averaging a bucket over the ranks, in place. It divides first, so that sums do not overflow.
pub(super) fn all_reduce<H>(bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<H>> {
    copy::scale(bucket.buffer(), 1.0 / group.world_size() as f64)?;
    Ok(HookWork::wait([group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?]))
}

/// Starts averaging a bucket in `dtype`. Dividing and converting in one step rounds only once.
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

/// Implements both 16-bit hooks.
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
