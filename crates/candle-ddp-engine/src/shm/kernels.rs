//! Reductions over slices and over slots of shared memory: one pass over all parts, always in rank order, so that every
//! rank computes the same bits, except those of a NaN that is computed, which Rust does not define.
use super::slot::Slot;
use crate::call::Element;
use crate::reduce_op::ReduceOp;
use crate::reduction::Reduction;
use candle_ddp_simd::{Arithmetic, Number, vectorise};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// The bytes of a result that are computed before they are copied.
const BLOCK: usize = 32 << 10;

/// The data of one rank.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The contents of the output before the call.
    Output,
    Private(&'a [u8]),
    Shared(Slot<'a>),
}

impl<'a> Source<'a> {
    /// By rank: the contents of the output for rank `own`, and the first `length` bytes of the slots of the others.
    pub(crate) fn by_rank(own: usize, slots: &'a [&mut [u8]], length: usize) -> Vec<Self> {
        let part = |(rank, slot): (usize, &'a &mut [u8])| match rank == own {
            true => Self::Output,
            false => Self::Private(&slot[..length]),
        };
        slots.iter().enumerate().map(part).collect()
    }
}

/// Writes the reduction of `sources`, one for each rank in rank order and all as long as `out`, to `out` and, if given,
/// to `result`. Nothing needs to be aligned.
///
/// f16 and bf16 are accumulated in f32 and rounded once. Min and Max return NaN if a value is NaN. Integers wrap.
pub(crate) fn reduce(reduction: Reduction, sources: &[Source], out: &mut [u8], result: Option<Slot>) {
    match reduction.element {
        Element::F32 => by_operation::<f32>(reduction, sources, out, result),
        Element::F64 => by_operation::<f64>(reduction, sources, out, result),
        Element::F16 => by_operation::<f16>(reduction, sources, out, result),
        Element::BF16 => by_operation::<bf16>(reduction, sources, out, result),
        Element::I64 => by_operation::<i64>(reduction, sources, out, result),
        Element::U32 => by_operation::<u32>(reduction, sources, out, result),
        Element::U8 => by_operation::<u8>(reduction, sources, out, result),
    }
}

fn by_operation<T: Number>(
    Reduction { op, ranks, .. }: Reduction,
    sources: &[Source],
    out: &mut [u8],
    result: Option<Slot>,
) {
    match op {
        ReduceOp::Sum => over_parts::<T, Sum>(sources, out, result, None),
        ReduceOp::Avg => over_parts::<T, Sum>(sources, out, result, Some(T::Wide::reciprocal(ranks))),
        ReduceOp::Min => over_parts::<T, Min>(sources, out, result, None),
        ReduceOp::Max => over_parts::<T, Max>(sources, out, result, None),
        ReduceOp::Prod => over_parts::<T, Product>(sources, out, result, None),
    }
}

/// An operation on two values.
trait Operation {
    fn combine<W: Arithmetic>(a: W, b: W) -> W;
}

struct Sum;
struct Product;
struct Min;
struct Max;

impl Operation for Sum {
    #[inline(always)]
    fn combine<W: Arithmetic>(a: W, b: W) -> W {
        a.plus(b)
    }
}

impl Operation for Product {
    #[inline(always)]
    fn combine<W: Arithmetic>(a: W, b: W) -> W {
        a.times(b)
    }
}

impl Operation for Min {
    #[inline(always)]
    fn combine<W: Arithmetic>(a: W, b: W) -> W {
        a.smaller(b)
    }
}

impl Operation for Max {
    #[inline(always)]
    fn combine<W: Arithmetic>(a: W, b: W) -> W {
        a.larger(b)
    }
}

/// The memory that [`fold`] reads and writes.
struct Pointers<'a, T, O> {
    sources: &'a [*const T],
    out: *mut T,
    /// The elements.
    range: Range<usize>,
    operation: PhantomData<O>,
}

/// The reduction of `sources` by `O`, times `factor` if given.
fn over_parts<T: Number, O: Operation>(
    sources: &[Source],
    out: &mut [u8],
    result: Option<Slot>,
    factor: Option<T::Wide>,
) {
    for source in sources {
        match source {
            Source::Output => {}
            Source::Private(bytes) => assert!(bytes.len() == out.len()),
            Source::Shared(slot) => assert!(slot.len() == out.len()),
        }
    }
    assert!(result.is_none_or(|result| result.len() == out.len()));
    let count = out.len() / size_of::<T>();
    let out: *mut T = out.as_mut_ptr().cast();
    let pointers: Vec<*const T> = sources
        .iter()
        .map(|source| match source {
            Source::Output => out.cast_const(),
            Source::Private(bytes) => bytes.as_ptr().cast(),
            Source::Shared(slot) => slot.as_ptr().cast_const().cast(),
        })
        .collect();
    // Copied in blocks that stay in the cache. With both written in the same loop, an all-reduce of 1 MiB took twice as long on a Zen 5 whose
    // cores shared no level-3 cache: other ranks have the lines of `result`, and such writes are slow among others.
    let block = if result.is_some() { BLOCK / size_of::<T>() } else { count.max(1) };
    for start in (0..count).step_by(block) {
        let range = start..(start + block).min(count);
        let pointers = Pointers { sources: &pointers, out, range: range.clone(), operation: PhantomData::<O> };
        // SAFETY: all are as long as `out`, as was checked above. `out` is borrowed exclusively and, if it is also a
        // source, used through the same pointer only; the others are borrowed as long.
        vectorise!(|| unsafe { fold::<T, O>(pointers, factor) });
        if let Some(result) = result {
            let [start, bytes] = [start, range.len()].map(|elements| elements * size_of::<T>());
            // SAFETY: both have these bytes, and `out` is private memory.
            unsafe { result.as_ptr().add(start).copy_from_nonoverlapping(out.cast::<u8>().add(start), bytes) };
        }
    }
}

/// Processes all parts at once, a few elements at a time, which stay in registers.
///
/// # Safety
/// All pointers are valid for the elements of the range, to read (`sources`) or to write. Nothing needs to be aligned, and
/// contents of shared memory may change meanwhile: the values are only computed with.
#[inline(always)]
unsafe fn fold<T: Number, O: Operation>(pointers: Pointers<T, O>, factor: Option<T::Wide>) {
    /// The number of elements of a step. With 64, sums of f32 in private memory took a third less time, but an
    /// all-reduce of 16 MiB between two ranks a fifth more (CPU time, AVX-512 Xeon, 2026-11-22).
    const STEP: usize = 32;
    let Pointers { sources, out, range, .. } = pointers;
    let whole = range.start + range.len() / STEP * STEP;
    let (first, others) = (sources[0], &sources[1..]);
    let mut start = range.start;
    // SAFETY: every access is to elements of the range, see above.
    unsafe {
        while start < whole {
            // Loops, since closures would be compiled separately, without the vector instructions.
            let mut block: [T; STEP] = first.add(start).cast::<[T; STEP]>().read_unaligned();
            let mut values = [T::Wide::default(); STEP];
            for (value, element) in values.iter_mut().zip(block) {
                *value = element.widen();
            }
            for other in others {
                let other: [T; STEP] = other.add(start).cast::<[T; STEP]>().read_unaligned();
                for (value, other) in values.iter_mut().zip(other) {
                    *value = O::combine(*value, other.widen());
                }
            }
            if let Some(factor) = factor {
                for value in &mut values {
                    *value = value.times(factor);
                }
            }
            for (element, value) in block.iter_mut().zip(values) {
                *element = T::narrow(value);
            }
            out.add(start).cast::<[T; STEP]>().write_unaligned(block);
            start += STEP;
        }
        for index in whole..range.end {
            let mut value = first.add(index).read_unaligned().widen();
            for other in others {
                value = O::combine(value, other.add(index).read_unaligned().widen());
            }
            if let Some(factor) = factor {
                value = value.times(factor);
            }
            out.add(index).write_unaligned(T::narrow(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::segment::{Memory, Segment};
    use bytemuck::Pod;
    use std::sync::Arc;

    const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

    /// Runs the reduction; rank `own` has its part in the output.
    fn run<T: Pod>(element: Element, op: ReduceOp, parts: &[&[T]], own: usize) -> Vec<T> {
        let mut out = parts[own].to_vec();
        let mut parts: Vec<Source> = parts.iter().map(|part| Source::Private(bytemuck::cast_slice(part))).collect();
        parts[own] = Source::Output;
        reduce(Reduction { element, op, ranks: parts.len() }, &parts, bytemuck::cast_slice_mut(&mut out), None);
        out
    }

    /// Values of many magnitudes and, for 16-bit types, of every kind, so that the order of additions changes the bits.
    fn bytes(seed: u64, length: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f32 / 1000.0 - (state >> 50) as f32 * 100.0
        };
        (0..length.div_ceil(4)).flat_map(|_| next().to_le_bytes()).take(length).collect()
    }

    /// Reduces one element after the other, with the conversions of the crate `half`.
    fn expected(element: Element, op: ReduceOp, parts: &[Vec<u8>]) -> Vec<u8> {
        fn fold<T: Pod, W: Arithmetic>(
            op: ReduceOp,
            parts: &[Vec<u8>],
            widen: impl Fn(T) -> W,
            narrow: impl Fn(W) -> T,
        ) -> Vec<u8> {
            let value = |rank: usize, index: usize| {
                let bytes = &parts[rank][index * size_of::<T>()..(index + 1) * size_of::<T>()];
                widen(bytemuck::pod_read_unaligned(bytes))
            };
            let element = |index: usize| {
                let total = (1..parts.len()).fold(value(0, index), |a, rank| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.plus(value(rank, index)),
                    ReduceOp::Prod => a.times(value(rank, index)),
                    ReduceOp::Min => a.smaller(value(rank, index)),
                    ReduceOp::Max => a.larger(value(rank, index)),
                });
                narrow(if op == ReduceOp::Avg { total.times(W::reciprocal(parts.len())) } else { total })
            };
            let elements: Vec<T> = (0..parts[0].len() / size_of::<T>()).map(element).collect();
            bytemuck::cast_slice(&elements).to_vec()
        }
        match element {
            Element::F32 => fold(op, parts, |value: f32| value, |value| value),
            Element::F64 => fold(op, parts, |value: f64| value, |value| value),
            Element::F16 => fold(op, parts, f16::to_f32, f16::from_f32),
            Element::BF16 => fold(op, parts, bf16::to_f32, bf16::from_f32),
            Element::I64 => fold(op, parts, |value: i64| value, |value| value),
            Element::U32 => fold(op, parts, |value: u32| value, |value| value),
            Element::U8 => fold(op, parts, |value: u8| value, |value| value),
        }
    }

    /// Whether two outputs have the same bits. The bits of a computed NaN do not count.
    fn are_same(element: Element, op: ReduceOp, one: &[u8], other: &[u8]) -> bool {
        fn compare<T: Pod>(one: &[u8], other: &[u8], is_nan: impl Fn(T) -> bool) -> bool {
            let is_nan = |bytes| is_nan(bytemuck::pod_read_unaligned(bytes));
            let (one, other) = (one.chunks(size_of::<T>()), other.chunks(size_of::<T>()));
            one.len() == other.len() && one.zip(other).all(|(a, b)| a == b || is_nan(a) && is_nan(b))
        }
        // These choose one of two values.
        if matches!(op, ReduceOp::Min | ReduceOp::Max) {
            return one == other;
        }
        match element {
            Element::F32 => compare(one, other, f32::is_nan),
            Element::F64 => compare(one, other, f64::is_nan),
            Element::F16 => compare(one, other, f16::is_nan),
            Element::BF16 => compare(one, other, bf16::is_nan),
            Element::I64 | Element::U32 | Element::U8 => one == other,
        }
    }

    #[test]
    fn bits_are_those_of_one_element_after_the_other() {
        let memory = Arc::new(Memory::create("candle-ddp-test", 1 << 20, 1 << 20).unwrap());
        let segment = Segment::new(&memory, 0..1 << 20);
        let elements =
            [Element::F32, Element::F64, Element::BF16, Element::F16, Element::I64, Element::U32, Element::U8];
        for (element, op) in elements.into_iter().flat_map(|element| OPS.map(|op| (element, op))) {
            if op == ReduceOp::Avg && !element.is_float() {
                continue;
            }
            for (count, own) in [(1, 0), (31, 1), (100, 2), (3000, 1)] {
                let length = count * element.size();
                let parts: Vec<Vec<u8>> = (0..3).map(|rank| bytes(rank + 1, length)).collect();
                let expected = expected(element, op, &parts);
                let slot = |index: usize| Slot::new(&segment, index * 24_064..index * 24_064 + length);
                let sources: Vec<Source> = (0..3)
                    .map(|rank| {
                        slot(rank).write(&parts[rank]);
                        if rank == own { Source::Output } else { Source::Shared(slot(rank)) }
                    })
                    .collect();
                let mut out = parts[own].clone();
                reduce(Reduction { element, op, ranks: 3 }, &sources, &mut out, Some(slot(4)));
                assert!(are_same(element, op, &out, &expected), "{element:?}[{count}], {op}");
                let mut result = vec![0; length];
                slot(4).read(&mut result);
                assert!(result == out, "{element:?}[{count}], {op}: what is published");
            }
        }
    }

    /// A minimum or maximum keeps the first of two NaNs, with its sign and its other bits.
    #[test]
    fn the_first_of_two_nans_remains() {
        let [first, second] = [0xffc0_1234, 0x7fc0_5678].map(f32::from_bits);
        for (op, count) in [1, 64, 200].into_iter().flat_map(|count| [(ReduceOp::Min, count), (ReduceOp::Max, count)]) {
            for own in 0..2 {
                let out = run(Element::F32, op, &[&vec![first; count], &vec![second; count]], own);
                assert!(out.iter().all(|value| value.to_bits() == first.to_bits()), "{op} of {count}, own part {own}");
            }
        }
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
