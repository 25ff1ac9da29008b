//! The values of the tensors, chosen so that every element of every result is known.
//!
//! Small pseudo-random integers repeat with a prime period, so that a chunk that is misplaced, comes from the wrong
//! rank, is left out or is counted twice shows up. Their sums are exact in every dtype, up to about 85 ranks in bf16.
use candle_core::{DType, Device, Tensor, WithDType};
use candle_ddp::{Error, ReduceOp, Result};
use half::{bf16, f16};

const PERIOD: usize = 4093;

/// Evaluates an expression with `$T` as the element type of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        with_type!(@ $dtype, $T, $body, U8 u8, U32 u32, I64 i64, F16 f16, BF16 bf16, F32 f32, F64 f64)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $($variant:ident $type:ty),*) => {
        match $dtype {
            $(DType::$variant => {
                type $T = $type;
                $body
            })*
            dtype => Err(Error::UnsupportedDType {
                operation: "the benchmark".to_string(),
                dtype,
                supported: "f32, f64, f16, bf16, i64, u32, u8",
            }),
        }
    };
}

/// Returns one period of the values of `rank`: 0 to 3.
pub(crate) fn of(rank: usize) -> Vec<f64> {
    let seed = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let value = |index: u64| {
        let mixed = (seed ^ index).wrapping_mul(0xff51_afd7_ed55_8ccd);
        ((mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53) >> 62) as f64
    };
    (0..PERIOD as u64).map(value).collect()
}

/// Returns one period of the reduction of all ranks' values.
pub(crate) fn reduced(dtype: DType, op: ReduceOp, world_size: usize) -> Vec<f64> {
    let combine = |a: f64, b: f64| match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Prod => a * b,
    };
    let mut values = of(0);
    for rank in 1..world_size {
        values.iter_mut().zip(of(rank)).for_each(|(value, other)| *value = combine(*value, other));
    }
    match (op, dtype) {
        (ReduceOp::Avg, _) => values.iter_mut().for_each(|value| *value /= world_size as f64),
        (_, DType::U8) => values.iter_mut().for_each(|value| *value %= 256.),
        _ => {}
    }
    values
}

/// Returns a tensor with `len` of the values of `rank`.
pub(crate) fn tensor(dtype: DType, rank: usize, len: usize, device: &Device) -> Result<Tensor> {
    let values = of(rank);
    with_type!(dtype, T => {
        let values: Vec<T> = values.iter().cycle().take(len).map(|value| T::from_f64(*value)).collect();
        Ok(Tensor::from_vec(values, len, device)?)
    })
}

/// Returns how many elements of `tensor` differ from `expected`, which repeats and starts at its element `offset`. One
/// rounding error is tolerated, because an average needs it.
pub(crate) fn differences(tensor: &Tensor, expected: &[f64], offset: usize) -> Result<u64> {
    let relative = match tensor.dtype() {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => f16::EPSILON.to_f64(),
        DType::BF16 => bf16::EPSILON.to_f64(),
        _ => 0.,
    };
    let expected = expected.iter().cycle().skip(offset % expected.len());
    with_type!(tensor.dtype(), T => {
        let right = |value: T, expected: &f64| {
            let value = value.to_f64();
            value == *expected || (value - expected).abs() <= relative * expected.abs()
        };
        Ok(tensor.to_vec1::<T>()?.into_iter().zip(expected).filter(|(value, expected)| !right(*value, expected)).count() as u64)
    })
}
