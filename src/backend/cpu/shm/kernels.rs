//! Reductions that read the peers' parts straight from shared memory.
//!
//! They give the same bits as the engine's other kernels: the ranks' values in rank order.
use super::block_kernels;
use super::call::Element;
use super::slot::Slot;
use crate::backend::ReduceOp;

/// The part of one rank.
#[derive(Clone, Copy)]
pub(in super::super) enum Source<'a> {
    /// What the output holds before the call.
    Output,
    Private(&'a [u8]),
    Shared(Slot<'a>),
}

/// Bytes that are copied out of shared memory at a time where the kernels need slices.
const BLOCK: usize = 4096;

/// Writes the reduction of `sources`, one for each rank in rank order and all as long as `out`, to `out` and, if there
/// is one, to `result`.
pub(in super::super) fn reduce(
    element: Element,
    op: ReduceOp,
    sources: &[Source],
    out: &mut [u8],
    result: Option<Slot>,
) {
    for source in sources {
        match source {
            Source::Output => {}
            Source::Private(bytes) => assert!(bytes.len() == out.len()),
            Source::Shared(slot) => assert!(slot.len() == out.len()),
        }
    }
    assert!(result.is_none_or(|result| result.len() == out.len()));
    match (element, op) {
        (Element::F32, ReduceOp::Sum) => sum::<f32>(sources, out, result, None),
        (Element::F32, ReduceOp::Avg) => sum::<f32>(sources, out, result, Some(1.0 / sources.len() as f32)),
        (Element::F64, ReduceOp::Sum) => sum::<f64>(sources, out, result, None),
        (Element::F64, ReduceOp::Avg) => sum::<f64>(sources, out, result, Some(1.0 / sources.len() as f64)),
        _ => in_blocks(element, op, sources, out, result),
    }
}

/// Copies a block of every part into the first-level cache and reduces it there.
fn in_blocks(element: Element, op: ReduceOp, sources: &[Source], out: &mut [u8], result: Option<Slot>) {
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
        block_kernels::reduce(element, op, &parts, out);
        if let Some(result) = result {
            result.part(range).write(out);
        }
    }
}

trait Float: Copy + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> {}
impl Float for f32 {}
impl Float for f64 {}

/// Where [`sum_as`] reads and writes.
struct Pointers<'a, T> {
    sources: &'a [*const T],
    out: *mut T,
    result: Option<*mut T>,
    count: usize,
}

/// The sum of `sources`, times `factor` if there is one, in one pass.
fn sum<T: Float>(sources: &[Source], out: &mut [u8], result: Option<Slot>, factor: Option<T>) {
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
unsafe fn sum_avx512<T: Float>(pointers: Pointers<T>, factor: Option<T>) {
    // SAFETY: the caller's.
    unsafe { sum_as(pointers, factor) }
}

/// # Safety
/// As [`sum_as`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2<T: Float>(pointers: Pointers<T>, factor: Option<T>) {
    // SAFETY: the caller's.
    unsafe { sum_as(pointers, factor) }
}

/// # Safety
/// All pointers are valid for `count` elements, to read (`sources`) or to write; `sources` is not empty. Nothing needs to
/// be aligned, and what lies in shared memory may change meanwhile: the values are only computed with.
#[inline(always)]
unsafe fn sum_as<T: Float>(pointers: Pointers<T>, factor: Option<T>) {
    /// Elements of a step, which stay in registers.
    const STEP: usize = 32;
    let Pointers { sources, out, result, count } = pointers;
    let whole = count / STEP * STEP;
    let (first, others) = (sources[0], &sources[1..]);
    let mut start = 0;
    // SAFETY: every access is to elements below `count`, see above.
    unsafe {
        while start < whole {
            let mut values: [T; STEP] = first.add(start).cast::<[T; STEP]>().read_unaligned();
            for other in others {
                let other: [T; STEP] = other.add(start).cast::<[T; STEP]>().read_unaligned();
                for (value, other) in values.iter_mut().zip(other) {
                    *value = *value + other;
                }
            }
            if let Some(factor) = factor {
                for value in &mut values {
                    *value = *value * factor;
                }
            }
            out.add(start).cast::<[T; STEP]>().write_unaligned(values);
            if let Some(result) = result {
                result.add(start).cast::<[T; STEP]>().write_unaligned(values);
            }
            start += STEP;
        }
        for index in whole..count {
            let mut value = first.add(index).read_unaligned();
            for other in others {
                value = value + other.add(index).read_unaligned();
            }
            if let Some(factor) = factor {
                value = value * factor;
            }
            out.add(index).write_unaligned(value);
            if let Some(result) = result {
                result.add(index).write_unaligned(value);
            }
        }
    }
}
