//! Products of bf16 block by block, so that what is packed stays in a core's cache.
//!
//! Each element of a result is summed in f32 in one order, whatever the number of threads.
use super::bf16::{self, Avx512, Source};
use super::strides::Strides;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::vectorise;
use rayon::prelude::*;

/// The largest block of a product: rows, columns and depth.
const ROWS: usize = 336;
const COLUMNS: usize = 384;
const DEPTH: usize = 512;

/// A matrix and its layout.
type Factor<'a, E> = (&'a [E], Strides);

/// result = a · b, or result + a · b if `accumulate`. The slices must span the matrices.
pub(super) fn sums<B: Source>(
    unit: Avx512,
    (m, n, k): (usize, usize, usize),
    result: &mut [f32],
    accumulate: bool,
    a: Factor<half::bf16>,
    b: Factor<B>,
    threads: usize,
) {
    if k == 0 {
        // The factors have no elements, and so no blocks.
        if !accumulate {
            result[..m * n].fill(0.0);
        }
        return;
    }
    each_rows((m, n), &mut result[..m * n], threads, |workspace, first, rows, result| {
        let a = (&a.0[first * a.1.row..], a.1);
        for column in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - column);
            let b = (&b.0[column * b.1.column..], b.1);
            deep(unit, (rows, columns, k), (&mut result[column..], n), accumulate, a, b, &mut workspace.packed);
        }
    });
}

/// result = a · b + bias, rounded once. The slices must span the matrices.
pub(super) fn rounded<B: Source>(
    unit: Avx512,
    (m, n, k): (usize, usize, usize),
    result: &mut [half::bf16],
    a: Factor<half::bf16>,
    b: Factor<B>,
    bias: Option<&[half::bf16]>,
    threads: usize,
) {
    if k == 0 {
        // The factors have no elements, and so no blocks.
        match bias {
            Some(bias) if n > 0 => result.chunks_exact_mut(n).for_each(|row| row.copy_from_slice(bias)),
            _ => result.fill(half::bf16::ZERO),
        }
        return;
    }
    each_rows((m, n), result, threads, |Workspace { sums, packed }, first, rows, result| {
        let a = (&a.0[first * a.1.row..], a.1);
        for column in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - column);
            let b = (&b.0[column * b.1.column..], b.1);
            sums.resize(rows * columns, 0.0);
            deep(unit, (rows, columns, k), (sums, columns), false, a, b, packed);
            let bias = bias.map(|bias| &bias[column..column + columns]);
            for (result, sums) in result.chunks_exact_mut(n).zip(sums.chunks_exact(columns)) {
                round(&mut result[column..column + columns], sums, bias);
            }
        }
    });
}

fn round(result: &mut [half::bf16], sums: &[f32], bias: Option<&[half::bf16]>) {
    vectorise!(|| {
        match bias {
            None => result.iter_mut().zip(sums).for_each(|(result, sum)| *result = half::bf16::from_f32(*sum)),
            Some(bias) => {
                for ((result, sum), bias) in result.iter_mut().zip(sums).zip(bias) {
                    *result = half::bf16::from_f32(*sum + bias.to_f32());
                }
            }
        }
    });
}

/// A thread's memory.
#[derive(Default)]
struct Workspace {
    sums: Vec<f32>,
    packed: bf16::Packed,
}

/// Lets threads work on their own rows of a result: `work` gets the first row, the number of rows, and these rows.
fn each_rows<E: Send>(
    (m, n): (usize, usize),
    result: &mut [E],
    threads: usize,
    work: impl Fn(&mut Workspace, usize, usize, &mut [E]) + Sync,
) {
    if m == 0 || n == 0 {
        return;
    }
    let size = m.div_ceil(m.div_ceil(ROWS).next_multiple_of(threads.min(m))).max(1);
    let run = |workspace: &mut Workspace, (index, result): (usize, &mut [E])| {
        work(workspace, index * size, result.len() / n, result);
    };
    if threads == 1 {
        let mut workspace = Workspace::default();
        result.chunks_mut(size * n).enumerate().for_each(|rows| run(&mut workspace, rows));
    } else {
        result.par_chunks_mut(size * n).enumerate().each_with(Workspace::default, run);
    }
}

/// result = a · b, or result + a · b if `accumulate`, with rows some distance apart, a block of the depth at a time.
fn deep<B: Source>(
    unit: Avx512,
    (m, n, k): (usize, usize, usize),
    (result, distance): (&mut [f32], usize),
    accumulate: bool,
    (a, a_strides): Factor<half::bf16>,
    (b, b_strides): Factor<B>,
    packed: &mut bf16::Packed,
) {
    // Blocks of the depth are about equal.
    let step = k.div_ceil(k.div_ceil(DEPTH).max(1)).next_multiple_of(2).max(1);
    for start in (0..k).step_by(step) {
        let extents = (m, n, step.min(k - start));
        let a = (&a[start * a_strides.column..], a_strides);
        let b = (&b[start * b_strides.row..], b_strides);
        bf16::multiply(unit, extents, (&mut *result, distance), accumulate || start > 0, a, b, packed);
    }
}
