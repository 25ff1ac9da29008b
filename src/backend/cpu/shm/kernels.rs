//! Reductions that read the peers' parts straight from shared memory.
//!
//! They give the same bits as the engine's other kernels: the ranks' values in rank order.
use super::slot::Slot;
use crate::backend::ReduceOp;
use crate::backend::call::Element;
use crate::backend::cpu::kernels::{self as block_kernels, Reduction};
use crate::tensor;
use half::{bf16, f16};

/// The part of one rank.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// What the output holds before the call.
    Output,
    Private(&'a [u8]),
    Shared(Slot<'a>),
}

/// Bytes that are copied out of shared memory at a time where the kernels need slices.
const BLOCK: usize = 4096;

/// Writes the reduction of `sources`, one for each rank in rank order and all as long as `out`, to `out` and, if there
/// is one, to `result`.
pub(crate) fn reduce(reduction: Reduction, sources: &[Source], out: &mut [u8], result: Option<Slot>) {
    for source in sources {
        match source {
            Source::Output => {}
            Source::Private(bytes) => assert!(bytes.len() == out.len()),
            Source::Shared(slot) => assert!(slot.len() == out.len()),
        }
    }
    assert!(result.is_none_or(|result| result.len() == out.len()));
    let Reduction { element, op, ranks } = reduction;
    let factor = (op == ReduceOp::Avg).then(|| 1.0 / ranks as f64);
    // As the engine's other kernels: the reciprocal is rounded to the type of the sum.
    let factor32 = (op == ReduceOp::Avg).then(|| 1.0 / ranks as f32);
    match (element, op) {
        (Element::F32, ReduceOp::Sum | ReduceOp::Avg) => sum::<f32>(sources, out, result, factor32),
        (Element::F16, ReduceOp::Sum | ReduceOp::Avg) => sum::<f16>(sources, out, result, factor32),
        (Element::BF16, ReduceOp::Sum | ReduceOp::Avg) => sum::<bf16>(sources, out, result, factor32),
        (Element::F64, ReduceOp::Sum | ReduceOp::Avg) => sum::<f64>(sources, out, result, factor),
        _ => in_blocks(reduction, sources, out, result),
    }
}

/// Copies a block of every part into the first-level cache and reduces it there.
fn in_blocks(reduction: Reduction, sources: &[Source], out: &mut [u8], result: Option<Slot>) {
    let block = BLOCK.min(out.len().next_multiple_of(8));
    let mut memory = vec![0_u64; sources.len() * block / 8];
    for start in (0..out.len()).step_by(block.max(1)) {
        let range = start..(start + block).min(out.len());
        let blocks = bytemuck::cast_slice_mut(&mut memory).chunks_exact_mut(block);
        let parts: Vec<Option<&[u8]>> = (sources.iter().zip(blocks))
            .map(|(source, block)| {
                let block: &mut [u8] = &mut block[..range.len()];
                match source {
                    Source::Output => return None,
                    Source::Private(bytes) => block.copy_from_slice(&bytes[range.clone()]),
                    Source::Shared(slot) => slot.part(range.clone()).read(block),
                }
                Some(&*block)
            })
            .collect();
        let out = &mut out[range.clone()];
        block_kernels::reduce(reduction, &parts, out);
        if let Some(result) = result {
            result.part(range).write(out);
        }
    }
}

/// Where [`sum_as`] reads and writes.
struct Pointers<'a, T> {
    sources: &'a [*const T],
    out: *mut T,
    result: Option<*mut T>,
    count: usize,
}

/// The sum of `sources`, times `factor` if there is one, in one pass.
fn sum<T: tensor::Element>(sources: &[Source], out: &mut [u8], result: Option<Slot>, factor: Option<T::Real>) {
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
    let result = result.map(|result| result.as_ptr().cast());
    let pointers = Pointers { sources: &pointers, out, result, count };
    // SAFETY: `reduce` has checked that all are as long as `out`, which is borrowed exclusively (and, where it is also a
    // source, only used through the same pointer); the others are borrowed as long. The features are there.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                return sum_avx512(pointers, factor);
            }
            if std::arch::is_x86_feature_detected!("avx2") {
                return sum_avx2(pointers, factor);
            }
        }
        sum_as(pointers, factor);
    }
}

/// # Safety
/// As [`sum_as`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn sum_avx512<T: tensor::Element>(pointers: Pointers<T>, factor: Option<T::Real>) {
    // SAFETY: the caller's.
    unsafe { sum_as(pointers, factor) }
}

/// # Safety
/// As [`sum_as`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2<T: tensor::Element>(pointers: Pointers<T>, factor: Option<T::Real>) {
    // SAFETY: the caller's.
    unsafe { sum_as(pointers, factor) }
}

/// # Safety
/// All pointers are valid for `count` elements, to read (`sources`) or to write; `sources` is not empty. Nothing needs to
/// be aligned, and what lies in shared memory may change meanwhile: the values are only computed with.
#[inline(always)]
#[allow(clippy::assign_op_pattern)] // the order of the operands decides which of two NaNs remains
unsafe fn sum_as<T: tensor::Element>(pointers: Pointers<T>, factor: Option<T::Real>) {
    /// Elements of a step, which stay in registers.
    const STEP: usize = 32;
    let Pointers { sources, out, result, count } = pointers;
    let whole = count / STEP * STEP;
    let (first, others) = (sources[0], &sources[1..]);
    let mut start = 0;
    // SAFETY: every access is to elements below `count`, see above.
    unsafe {
        while start < whole {
            // Loops, since closures become functions of their own, without the vector instructions.
            let mut block: [T; STEP] = first.add(start).cast::<[T; STEP]>().read_unaligned();
            let mut values = [T::Real::default(); STEP];
            for (value, element) in values.iter_mut().zip(block) {
                *value = element.widen();
            }
            for other in others {
                let other: [T; STEP] = other.add(start).cast::<[T; STEP]>().read_unaligned();
                for (value, other) in values.iter_mut().zip(other) {
                    *value = *value + other.widen();
                }
            }
            if let Some(factor) = factor {
                for value in &mut values {
                    *value = *value * factor;
                }
            }
            for (element, value) in block.iter_mut().zip(values) {
                *element = T::narrow(value);
            }
            out.add(start).cast::<[T; STEP]>().write_unaligned(block);
            if let Some(result) = result {
                result.add(start).cast::<[T; STEP]>().write_unaligned(block);
            }
            start += STEP;
        }
        for index in whole..count {
            let mut value = first.add(index).read_unaligned().widen();
            for other in others {
                value = value + other.add(index).read_unaligned().widen();
            }
            if let Some(factor) = factor {
                value = value * factor;
            }
            let value = T::narrow(value);
            out.add(index).write_unaligned(value);
            if let Some(result) = result {
                result.add(index).write_unaligned(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::shm::segment::Segment;

    /// Values of many magnitudes, so that the order of additions shows in the bits.
    fn bytes(seed: u64, length: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f32 / 1000.0 - (state >> 50) as f32 * 100.0
        };
        (0..length.div_ceil(4)).flat_map(|_| next().to_le_bytes()).take(length).collect()
    }

    #[test]
    fn bits_are_those_of_the_other_kernels() {
        let (segment, _fd) = Segment::create("candle-ddp-test", 1 << 20).unwrap();
        let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];
        let elements = [Element::F32, Element::F64, Element::BF16, Element::F16, Element::I64];
        for (element, op) in elements.into_iter().flat_map(|element| ops.map(|op| (element, op))) {
            for (count, own) in [(1, 0), (31, 1), (100, 2), (3000, 1)] {
                let length = count * element.size();
                let parts: Vec<Vec<u8>> = (0..3).map(|rank| bytes(rank + 1, length)).collect();
                let mut expected = parts[own].clone();
                let slices: Vec<_> = (0..3).map(|rank| (rank != own).then_some(parts[rank].as_slice())).collect();
                let mut aligned = vec![0_u64; 3 * 3000];
                let (a, rest) = bytemuck::cast_slice_mut::<u64, u8>(&mut aligned).split_at_mut(24_000);
                let (b, c) = rest.split_at_mut(24_000);
                for (to, from) in [&mut *a, b, c].into_iter().zip(&parts) {
                    to[..length].copy_from_slice(from);
                }
                let copies = [&a[..length], &b[..length], &c[..length]];
                let slices: Vec<_> = slices.iter().zip(copies).map(|(part, copy)| part.map(|_| copy)).collect();
                let mut out = vec![0_u64; 3000];
                let out: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut out)[..length];
                out.copy_from_slice(&expected);
                let reduction = Reduction { element, op, ranks: 3 };
                block_kernels::reduce(reduction, &slices, out);
                expected.copy_from_slice(out);

                let slot = |index: usize| Slot::new(&segment, index * 24_064..index * 24_064 + length);
                let sources: Vec<Source> = (0..3)
                    .map(|rank| {
                        slot(rank).write(&parts[rank]);
                        if rank == own { Source::Output } else { Source::Shared(slot(rank)) }
                    })
                    .collect();
                out.copy_from_slice(&parts[own]);
                reduce(reduction, &sources, out, Some(slot(4)));
                assert!(*out == expected[..], "{element:?}[{count}], {op}");
                let mut result = vec![0; length];
                slot(4).read(&mut result);
                assert!(result == expected, "{element:?}[{count}], {op}: what is published");
            }
        }
    }
}
