//! Products of bf16 block by block, so that what is packed stays in a core's cache.
//!
//! Each element of a result is summed in f32 in one order, whatever the number of threads.
use super::bf16::{Block, PackedColumns, PackedRows, Source, Unit, at_least, round};
use super::strides::Strides;
use candle_ddp_tensor::parallel::Each;
use half::bf16;
use rayon::prelude::*;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;

/// A matrix and its layout.
type Factor<'a, E> = (&'a [E], Strides);

/// result = a · b, or result + a · b if `accumulate`. Rows of the result are `distance` apart. The slices must span the matrices.
pub(super) fn sums<U: Unit, B: Source>(
    unit: U,
    (m, n, k): (usize, usize, usize),
    (result, distance): (&mut [f32], usize),
    accumulate: bool,
    (a, a_strides): Factor<bf16>,
    (b, b_strides): Factor<B>,
    threads: usize,
) {
    if k == 0 && !accumulate {
        // The factors have no elements, and so no blocks.
        result.chunks_mut(distance.max(1)).take(m).for_each(|row| row[..n].fill(0.0));
    }
    let block = unit.block(k);
    for depth in ranges(k, depth_of(block, k)) {
        let a = &a[depth.start * a_strides.column..];
        for columns in ranges(n, block.columns) {
            let b = &b[depth.start * b_strides.row + columns.start * b_strides.column..];
            let b = PackedColumns::new(unit, (depth.len(), columns.len()), (b, b_strides), threads);
            each_rows(block, (m, &mut *result, distance), threads, |memory, rows, result| {
                let a = (&a[rows.start * a_strides.row..], a_strides);
                let product = b.with(unit, &mut memory.rows, (rows.len(), depth.len()), a);
                unit.multiply(product, (&mut result[columns.start..], distance), accumulate || depth.start > 0);
            });
        }
    }
}

/// Writes a · b + bias, rounded once, to all of `result`. The slices must span the matrices.
pub(super) fn rounded<U: Unit, B: Source>(
    unit: U,
    (m, n, k): (usize, usize, usize),
    result: &mut [MaybeUninit<bf16>],
    (a, a_strides): Factor<bf16>,
    (b, b_strides): Factor<B>,
    bias: Option<&[bf16]>,
    threads: usize,
) {
    if k == 0 {
        // The factors have no elements, and so no blocks.
        for row in result.chunks_exact_mut(n.max(1)) {
            for (column, to) in row.iter_mut().enumerate() {
                to.write(bias.map_or(bf16::ZERO, |bias| bias[column]));
            }
        }
        return;
    }
    let block = unit.block(k);
    if !unit.is_by_row() {
        // The sums of some rows, to which blocks of the depth are added.
        let depth = depth_of(block, k);
        return each_rows(block, (m, result, n), threads, |Memory { sums, rows: packed }, rows, result| {
            let a = &a[rows.start * a_strides.row..];
            for columns in ranges(n, block.columns) {
                let sums = at_least(sums, rows.len() * columns.len());
                for depth in ranges(k, depth) {
                    let b = &b[depth.start * b_strides.row + columns.start * b_strides.column..];
                    let b = PackedColumns::new(unit, (depth.len(), columns.len()), (b, b_strides), 1);
                    let a = (&a[depth.start * a_strides.column..], a_strides);
                    let product = b.with(unit, packed, (rows.len(), depth.len()), a);
                    unit.multiply(product, (&mut *sums, columns.len()), depth.start > 0);
                }
                let bias = bias.map(|bias| &bias[columns.clone()]);
                for (to, sums) in result.chunks_exact_mut(n).zip(sums.chunks_exact(columns.len())) {
                    round(&mut to[columns.clone()], sums, bias);
                }
            }
        });
    }
    for columns in ranges(n, block.columns) {
        let b = &b[columns.start * b_strides.column..];
        let b = PackedColumns::new(unit, (k, columns.len()), (b, b_strides), threads);
        let bias = bias.map(|bias| &bias[columns.clone()]);
        each_rows(block, (m, &mut *result, n), threads, |memory, rows, result| {
            let a = (&a[rows.start * a_strides.row..], a_strides);
            let product = b.with(unit, &mut memory.rows, (rows.len(), k), a);
            unit.multiply_rounded(product, (&mut result[columns.start..], n), bias);
        });
    }
}

/// Blocks of the depth are about equal.
fn depth_of(block: Block, k: usize) -> usize {
    k.div_ceil(k.div_ceil(block.depth).max(1)).next_multiple_of(32)
}

/// Parts of 0..`count` of this size, and the rest.
fn ranges(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size.max(1)).map(move |start| start..(start + size).min(count))
}

thread_local! {
    /// Where the next product on this thread finds its memory.
    static MEMORY: Cell<Memory> = Cell::default();
}

/// A thread's memory.
#[derive(Default)]
struct Memory {
    sums: Vec<f32>,
    rows: PackedRows,
}

/// Lets threads work on their own rows of a result.
fn each_rows<E: Send>(
    block: Block,
    (m, result, distance): (usize, &mut [E], usize),
    threads: usize,
    work: impl Fn(&mut Memory, Range<usize>, &mut [E]) + Sync,
) {
    let size = m.div_ceil(m.div_ceil(block.rows).next_multiple_of(threads.min(m).max(1)).max(1)).max(1);
    let run = |(index, result): (usize, &mut [E])| {
        let mut memory = MEMORY.take();
        work(&mut memory, index * size..((index + 1) * size).min(m), result);
        MEMORY.set(memory);
    };
    // A slice may be longer than its rows, and its last row may end early.
    let end = result.len().min(m * distance);
    let result = &mut result[..end];
    if result.is_empty() {
        return;
    }
    if threads == 1 {
        result.chunks_mut(size * distance).enumerate().for_each(run);
    } else {
        result.par_chunks_mut(size * distance).enumerate().each(run);
    }
}
