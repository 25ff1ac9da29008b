//! Products of matrices on the CPU, by the crate `gemm`, which candle multiplies with as well.
// Matrices are given to `gemm` by their addresses. Every block says why it is sound.
#![allow(unsafe_code)]
use candle_core::Result;
use candle_ddp_tensor::Real;
use gemm::Parallelism;

/// How the elements of a matrix lie in memory: the distances from one row, and from one column, to the next.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) row: usize,
    pub(super) column: usize,
}

impl Strides {
    /// Row by row, each of `columns` elements.
    pub(super) fn rows(columns: usize) -> Self {
        Self { row: columns, column: 1 }
    }

    /// The transpose of a matrix that lies row by row in rows of `columns` elements.
    pub(super) fn transposed(columns: usize) -> Self {
        Self { row: 1, column: columns }
    }

    /// How many elements a matrix spans.
    fn span(self, rows: usize, columns: usize) -> usize {
        if rows == 0 || columns == 0 { 0 } else { (rows - 1) * self.row + (columns - 1) * self.column + 1 }
    }
}

/// The number of threads that a product uses: those of rayon's pool, as in candle.
pub(super) fn threads() -> usize {
    rayon::current_num_threads().max(1)
}

/// a · b, row by row.
///
/// # Errors
/// As [`gemm`].
pub(super) fn product<R: Real>(
    (m, n, k): (usize, usize, usize),
    a: (&[R], Strides),
    b: (&[R], Strides),
    threads: usize,
) -> Result<Vec<R>> {
    let mut result = Vec::with_capacity(m * n);
    check((m, n, k), m * n, a, b)?;
    if k == 0 {
        result.resize(m * n, R::from_f64(0.0));
        return Ok(result);
    }
    // SAFETY: the result has room for m × n elements, all of which a product that does not accumulate writes before they
    // count as there; the factors were checked.
    unsafe {
        multiply((m, n, k), result.as_mut_ptr(), false, a, b, threads);
        result.set_len(m * n);
    }
    Ok(result)
}

/// result = a · b, or result + a · b if `accumulate`; `a` has `m` rows and `k` columns, `b` has `k` rows and `n` columns,
/// the result has `m` rows, which lie one behind the other.
///
/// # Errors
/// A slice that is too short for its matrix.
pub(super) fn gemm<R: Real>(
    (m, n, k): (usize, usize, usize),
    result: &mut [R],
    accumulate: bool,
    a: (&[R], Strides),
    b: (&[R], Strides),
    threads: usize,
) -> Result<()> {
    check((m, n, k), result.len(), a, b)?;
    // SAFETY: the slices span the matrices, as was checked, and the result is borrowed mutably, so that it overlaps with
    // neither factor.
    unsafe { multiply((m, n, k), result.as_mut_ptr(), accumulate, a, b, threads) };
    Ok(())
}

fn check<R: Real>(
    (m, n, k): (usize, usize, usize),
    result: usize,
    (a, a_strides): (&[R], Strides),
    (b, b_strides): (&[R], Strides),
) -> Result<()> {
    if result < m * n || a.len() < a_strides.span(m, k) || b.len() < b_strides.span(k, n) {
        candle_core::bail!(
            "a product of {m}×{k} and {k}×{n} needs more elements than the {}, {} and {result} that there are",
            a.len(),
            b.len(),
        )
    }
    Ok(())
}

/// # Safety
/// `result` is valid for writes of m × n elements, and for reads if `accumulate`, and overlaps with no factor; the slices
/// span their matrices.
unsafe fn multiply<R: Real>(
    (m, n, k): (usize, usize, usize),
    result: *mut R,
    accumulate: bool,
    (a, a_strides): (&[R], Strides),
    (b, b_strides): (&[R], Strides),
    threads: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let one = R::from_f64(1.0);
    let old = if accumulate { one } else { R::from_f64(0.0) };
    // SAFETY: as the caller promises; `R` is f32 or f64, which `gemm` takes.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            result,
            1,
            n as isize,
            accumulate,
            a.as_ptr(),
            a_strides.column as isize,
            a_strides.row as isize,
            b.as_ptr(),
            b_strides.column as isize,
            b_strides.row as isize,
            old,
            one,
            false,
            false,
            false,
            parallelism,
        );
    }
}
