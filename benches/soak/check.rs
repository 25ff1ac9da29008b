//! The contents of tensors, before a call and after it.
use crate::random::mix;
use candle_core::{DType, Device, Tensor, WithDType};
use candle_ddp::{Error, ReduceOp, Result};
use half::{bf16, f16};

/// The number of values that a part repeats.
const VALUES: usize = 12;

/// A part of a tensor: `count` elements, which repeat these values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) count: usize,
    pub(crate) values: [f64; VALUES],
}

impl Part {
    /// Small positive integers, whose sums and products are exact here, and over a few ranks in all dtypes. `key` distinguishes
    /// parts.
    pub(crate) fn of(key: u64, count: usize, op: ReduceOp) -> Self {
        let largest = if op == ReduceOp::Prod { 2 } else { 11 };
        Self { count, values: std::array::from_fn(|index| (1 + mix(key + index as u64) % largest) as f64) }
    }

    /// A value that no call writes.
    pub(crate) fn blank(count: usize) -> Self {
        Self { count, values: [99.; VALUES] }
    }

    /// The reduction of parts that have the same count.
    pub(crate) fn reduced(parts: &[Self], op: ReduceOp) -> Self {
        let value = |index: usize| {
            let values = parts.iter().map(|part| part.values[index]);
            match op {
                ReduceOp::Sum => values.sum(),
                ReduceOp::Avg => values.sum::<f64>() / parts.len() as f64,
                ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
                ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
                ReduceOp::Prod => values.product(),
            }
        };
        Self { count: parts.first().map_or(0, |part| part.count), values: std::array::from_fn(value) }
    }
}

/// The elements before and behind a tensor that is a view, which no call may change.
const BORDER: usize = 3;

/// A tensor and its expected contents after the call.
pub(crate) struct Expected {
    /// All of the storage.
    whole: Tensor,
    /// The call's argument.
    pub(crate) tensor: Tensor,
    dtype: DType,
    parts: Vec<Part>,
}

/// Calls `$body` with `$element` as the type of `$dtype`'s elements.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $element = f32;
                $body
            }
            DType::F64 => {
                type $element = f64;
                $body
            }
            DType::F16 => {
                type $element = f16;
                $body
            }
            DType::BF16 => {
                type $element = bf16;
                $body
            }
            DType::I64 => {
                type $element = i64;
                $body
            }
            DType::U32 => {
                type $element = u32;
                $body
            }
            _ => {
                type $element = u8;
                $body
            }
        }
    };
}

fn elements<T: WithDType>(parts: &[Part]) -> Vec<T> {
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.count).sum());
    // Over many ranks, results exceed the smaller integers, which wrap.
    let range = match T::DTYPE {
        DType::U8 => 2_f64.powi(8),
        DType::U32 => 2_f64.powi(32),
        _ => f64::INFINITY,
    };
    for part in parts {
        let values = part.values.map(|value| T::from_f64(value % range));
        all.extend(values.iter().copied().cycle().take(part.count));
    }
    all
}

impl Expected {
    /// A tensor that holds `before`, and `after` after the call. With `view`, it is a part of a larger one.
    pub(crate) fn new(dtype: DType, before: &[Part], after: Vec<Part>, view: bool) -> Result<Self> {
        let count = before.iter().map(|part| part.count).sum();
        let border = Part::blank(if view { BORDER } else { 0 });
        let whole = [&[border][..], before, &[border][..]].concat();
        let length = count + 2 * border.count;
        let whole = with_element!(dtype, T => Tensor::from_vec(elements::<T>(&whole), length, &Device::Cpu)?);
        let tensor = if view { whole.narrow(0, border.count, count)? } else { whole.clone() };
        Ok(Self { whole, tensor, dtype, parts: [vec![border], after, vec![border]].concat() })
    }

    /// Compares with the contents after the call. `what` is for the error.
    pub(crate) fn check(&self, what: &str, rank: usize) -> Result<()> {
        let wrong = with_element!(self.dtype, T => {
            let found = self.whole.to_vec1::<T>()?;
            let expected = elements::<T>(&self.parts);
            // Averages are rounded, once or twice.
            let tolerance = match self.dtype {
                DType::BF16 => 1e-2,
                DType::F16 => 2e-3,
                _ => 1e-6,
            };
            let is_right = |a: T, b: T| a == b || (a.to_f64() - b.to_f64()).abs() <= tolerance * b.to_f64().abs();
            let index = found.iter().zip(&expected).position(|(a, b)| !is_right(*a, *b));
            let index = index.or((found.len() != expected.len()).then_some(found.len().min(expected.len())));
            index.map(|index| (index, found.get(index).map(|a| a.to_f64()), expected.get(index).map(|b| b.to_f64())))
        });
        match wrong {
            None => Ok(()),
            Some((index, found, expected)) => {
                let reason = format!("{what}: element {index} must be {expected:?}, and is {found:?}");
                Err(Error::RankFailed { rank, reason })
            }
        }
    }
}
