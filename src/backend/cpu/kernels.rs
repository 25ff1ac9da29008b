//! Reductions over slices, always in rank order, so that every rank computes the same bits.
use crate::backend::ReduceOp;
use crate::backend::call::Element;
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// What is done to values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    pub(super) element: Element,
    pub(super) op: ReduceOp,
    /// Of how many ranks `Avg` is the mean: not always as many as there are parts.
    pub(super) ranks: usize,
}

/// Writes the reduction of `parts`, one for each rank in rank order, to `out`. A part that is `None` is what `out` holds
/// before the call. All have the same length and hold elements of the reduction's type, aligned as such.
///
/// f16 and bf16 are accumulated in f32 and rounded once. NaN wins in Min and Max. Integers wrap.
pub(super) fn reduce(reduction: Reduction, parts: &[Option<&[u8]>], out: &mut [u8]) {
    if out.is_empty() {
        // Empty slices need not be aligned.
        return;
    }
    match reduction.element {
        Element::F32 => reduce_as::<f32>(reduction, parts, out),
        Element::F64 => reduce_as::<f64>(reduction, parts, out),
        Element::F16 => reduce_as::<f16>(reduction, parts, out),
        Element::BF16 => reduce_as::<bf16>(reduction, parts, out),
        Element::I64 => reduce_as::<i64>(reduction, parts, out),
        Element::U32 => reduce_as::<u32>(reduction, parts, out),
        Element::U8 => reduce_as::<u8>(reduction, parts, out),
    }
}

/// Elements that are accumulated at a time: they stay in the first-level cache while the parts pass by.
const BLOCK: usize = 1024;

fn reduce_as<T: Number>(Reduction { op, ranks, .. }: Reduction, parts: &[Option<&[u8]>], out: &mut [u8]) {
    let parts: Vec<Option<&[T]>> = parts.iter().map(|part| part.map(bytemuck::cast_slice)).collect();
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    let mut accumulator = [T::Wide::default(); BLOCK];
    let mut widened = [T::Wide::default(); BLOCK];
    let mut start = 0;
    for out in out.chunks_mut(BLOCK) {
        let accumulator = &mut accumulator[..out.len()];
        let widened = &mut widened[..out.len()];
        for (index, part) in parts.iter().enumerate() {
            let part = match part {
                Some(part) => &part[start..start + out.len()],
                None => &*out,
            };
            let part = T::widen(part, widened);
            if index == 0 { accumulator.copy_from_slice(part) } else { combine(op, accumulator, part) }
        }
        if op == ReduceOp::Avg {
            let factor = T::Wide::reciprocal(ranks);
            accumulator.iter_mut().for_each(|value| *value = value.multiply(factor));
        }
        T::narrow(accumulator, out);
        start += out.len();
    }
}

fn combine<W: Wide>(op: ReduceOp, accumulator: &mut [W], part: &[W]) {
    let pairs = accumulator.iter_mut().zip(part);
    match op {
        ReduceOp::Sum | ReduceOp::Avg => pairs.for_each(|(a, b)| *a = a.plus(*b)),
        ReduceOp::Prod => pairs.for_each(|(a, b)| *a = a.multiply(*b)),
        ReduceOp::Min => pairs.for_each(|(a, b)| *a = a.smaller(*b)),
        ReduceOp::Max => pairs.for_each(|(a, b)| *a = a.larger(*b)),
    }
}

/// An element as it lies in memory.
trait Number: Pod {
    /// The type it is accumulated in.
    type Wide: Wide;

    /// `part` as accumulable values: itself, or converted into `buffer`.
    fn widen<'a>(part: &'a [Self], buffer: &'a mut [Self::Wide]) -> &'a [Self::Wide];

    fn narrow(accumulator: &[Self::Wide], out: &mut [Self]);
}

/// A type to accumulate in.
trait Wide: Copy + Default {
    fn plus(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    /// 1 / `count`; only floating point is ever averaged.
    fn reciprocal(count: usize) -> Self;
}

macro_rules! wide_is_itself {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Wide = Self;
            fn widen<'a>(part: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
                part
            }
            fn narrow(accumulator: &[Self], out: &mut [Self]) {
                out.copy_from_slice(accumulator);
            }
        }
    )*};
}
wide_is_itself!(f32, f64, i64, u32, u8);

macro_rules! wide_is_f32 {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Wide = f32;
            fn widen<'a>(part: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
                part.convert_to_f32_slice(buffer);
                buffer
            }
            fn narrow(accumulator: &[f32], out: &mut [Self]) {
                out.convert_from_f32_slice(accumulator);
            }
        }
    )*};
}
wide_is_f32!(f16, bf16);

macro_rules! wide_float {
    ($($t:ty),*) => {$(
        impl Wide for $t {
            fn plus(self, other: Self) -> Self {
                self + other
            }
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            // The comparison is false when `other` is NaN, which then wins.
            fn smaller(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
            fn larger(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            fn reciprocal(count: usize) -> Self {
                1.0 / count as Self
            }
        }
    )*};
}
wide_float!(f32, f64);

macro_rules! wide_integer {
    ($($t:ty),*) => {$(
        impl Wide for $t {
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn reciprocal(_: usize) -> Self {
                1
            }
        }
    )*};
}
wide_integer!(i64, u32, u8);

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Pod>(element: Element, op: ReduceOp, parts: &[&[T]], own: usize) -> Vec<T> {
        let mut out = parts[own].to_vec();
        let parts: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(rank, part)| if rank == own { None } else { Some(bytemuck::cast_slice(part)) })
            .collect();
        reduce(Reduction { element, op, ranks: parts.len() }, &parts, bytemuck::cast_slice_mut(&mut out));
        out
    }

    #[test]
    fn nan_wins_wherever_it_stands() {
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum] {
            for own in 0..3 {
                let out = run(Element::F32, op, &[&[f32::NAN, 1., 1.], &[2., f32::NAN, 2.], &[3., 3., f32::NAN]], own);
                assert!(out.iter().all(|value| value.is_nan()), "{op}, own part {own}: {out:?}");
            }
        }
    }

    #[test]
    fn half_precision_is_rounded_once() {
        // In bf16, 256 + 1 is 256 again; in f32 the ones add up first.
        let (big, one) = ([bf16::from_f32(256.); 3], [bf16::from_f32(1.); 3]);
        let parts: [&[bf16]; 3] = [&big, &one, &one];
        assert_eq!(run(Element::BF16, ReduceOp::Sum, &parts, 1), [bf16::from_f32(258.); 3]);
        let third = run(Element::F16, ReduceOp::Avg, &[&[f16::ONE], &[f16::ZERO], &[f16::ZERO]], 0);
        assert_eq!(third, [f16::from_f32(1.0 / 3.0)]);
    }

    #[test]
    fn the_order_is_that_of_the_ranks_wherever_the_own_part_stands() {
        // Floating-point addition is not associative: (1e8 + -1e8) + 1 = 1, 1e8 + (-1e8 + 1) = 0.
        let parts: [Vec<f32>; 3] = [vec![1e8; 3000], vec![-1e8; 3000], vec![1.; 3000]];
        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        for own in 0..3 {
            assert_eq!(run(Element::F32, ReduceOp::Sum, &parts, own), vec![1.0; 3000]);
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(run(Element::U8, ReduceOp::Sum, &[&[200_u8], &[100]], 0), [44]);
        assert_eq!(run(Element::I64, ReduceOp::Prod, &[&[i64::MAX], &[2]], 1), [-2]);
    }
}
