//! Products of small matrices, on the calling thread.
// The crate `gemm` takes pointers.
#![allow(unsafe_code)]
use crate::tensor::Real;
use gemm::{Parallelism, gemm};

/// A matrix whose rows lie one behind the other, or its transpose.
#[derive(Clone, Copy)]
pub(super) enum Matrix<'a, R> {
    Plain(&'a [R]),
    Transposed(&'a [R]),
}

impl<R> Matrix<'_, R> {
    /// The first element, and how far apart those of neighbouring columns and rows are, of a matrix of this size, all
    /// of which is there.
    fn parts(&self, rows: usize, columns: usize) -> (*const R, isize, isize) {
        let (Self::Plain(values) | Self::Transposed(values)) = self;
        assert!(values.len() >= rows * columns, "a matrix of {rows} × {columns} in {} elements", values.len());
        match self {
            Self::Plain(_) => (values.as_ptr(), 1, columns as isize),
            Self::Transposed(_) => (values.as_ptr(), rows as isize, 1),
        }
    }
}

/// Writes `scale` × a × b to `to`, or adds it, where a has m rows, b has n columns, and what is summed over has k
/// elements.
pub(super) fn product<R: Real>(
    to: &mut [R],
    a: Matrix<R>,
    b: Matrix<R>,
    [m, n, k]: [usize; 3],
    scale: R,
    accumulate: bool,
) {
    assert!(to.len() >= m * n, "a matrix of {m} × {n} in {} elements", to.len());
    let ((a, a_columns, a_rows), (b, b_columns, b_rows)) = (a.parts(m, k), b.parts(k, n));
    let one = R::from_f64(1.0);
    // SAFETY: `to`, which is borrowed mutably and therefore apart from a and b, has m × n elements, a and b have m × k
    // and k × n at these strides, as was checked; R is f32 or f64, for which gemm has kernels.
    unsafe {
        gemm(
            m,
            n,
            k,
            to.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a,
            a_columns,
            a_rows,
            b,
            b_columns,
            b_rows,
            one,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products() {
        let (a, b) = ([1f64, 2., 3., 4., 5., 6.], [1f64, 0., 2., 1., 0., 3.]);
        let mut to = [100.0; 4];
        // (1 2 3; 4 5 6) × (1 0; 2 1; 0 3)
        product(&mut to, Matrix::Plain(&a), Matrix::Plain(&b), [2, 2, 3], 1.0, false);
        assert_eq!(to, [5., 11., 14., 23.]);
        product(&mut to, Matrix::Plain(&a), Matrix::Plain(&b), [2, 2, 3], 2.0, true);
        assert_eq!(to, [15., 33., 42., 69.]);
        // (1 3 5; 2 4 6) × (1 1; 0 0; 2 3)
        product(&mut to, Matrix::Transposed(&a), Matrix::Transposed(&b), [2, 2, 3], 1.0, false);
        assert_eq!(to, [11., 16., 14., 20.]);
    }
}
