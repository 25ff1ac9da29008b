//! Products of a few rows with one matrix, which is packed once for all of them.
use super::strides::Strides;
use candle_ddp_tensor::Real;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// The vectors of a panel's row.
const VECTORS: usize = 2;

/// A matrix in panels of columns, which lie row by row: a product reads it once, from the start to the end.
pub(crate) struct Panels<R> {
    rows: usize,
    columns: usize,
    kernel: Shape,
    values: Vec<R>,
}

impl<R: Lanes> Panels<R> {
    /// Packs the matrix of `rows` rows and `columns` columns, which `from` spans.
    pub(crate) fn new((rows, columns): (usize, usize), (from, strides): (&[R], Strides)) -> Self {
        let kernel = Arch::new().dispatch(Detect::<R>(std::marker::PhantomData));
        let width = kernel.width;
        let mut values = vec![R::default(); columns.div_ceil(width) * rows * width];
        if rows > 0 {
            for (panel, values) in values.chunks_exact_mut(rows * width).enumerate() {
                let first = panel * width;
                for (row, values) in values.chunks_exact_mut(width).enumerate() {
                    for (column, value) in (first..columns).zip(values) {
                        *value = from[row * strides.row + column * strides.column];
                    }
                }
            }
        }
        Self { rows, columns, kernel, values }
    }

    /// result += a · this matrix, for all rows of `a`. Each sum has one order, whatever the numbers of rows and threads are.
    pub(crate) fn add_product(&self, a: &[R], result: &mut [R], threads: usize) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let (count, width) = (a.len() / self.rows, self.kernel.width);
        let blocks = self.blocks(a, count);
        let mut sums = vec![R::default(); count * self.columns.next_multiple_of(width)];
        let multiply = |(panel, sums): (&[R], &mut [R])| {
            let mut first = 0;
            for (rows, a) in &blocks {
                let sums = &mut sums[first * width..(first + rows) * width];
                Arch::new().dispatch(Multiply { rows: *rows, a, panel, sums });
                first += rows;
            }
        };
        let size = (self.rows * width, (count * width).max(1));
        if threads > 1 {
            self.values.par_chunks_exact(size.0).zip(sums.par_chunks_exact_mut(size.1)).each(multiply);
        } else {
            self.values.chunks_exact(size.0).zip(sums.chunks_exact_mut(size.1)).for_each(multiply);
        }
        for (panel, sums) in sums.chunks_exact(size.1).enumerate() {
            let first = panel * width;
            for (sums, row) in sums.chunks_exact(width).zip(result.chunks_exact_mut(self.columns)) {
                row[first..].iter_mut().zip(sums).for_each(|(result, sum)| *result += *sum);
            }
        }
    }

    /// Blocks of rows of about equal size, in which the rows' elements alternate.
    fn blocks(&self, a: &[R], count: usize) -> Vec<(usize, Vec<R>)> {
        let size = count.div_ceil(count.div_ceil(self.kernel.rows).max(1)).max(1);
        let block = |rows: &[R]| {
            let count = rows.len() / self.rows;
            let mut block = vec![R::default(); rows.len()];
            for (row, values) in rows.chunks_exact(self.rows).enumerate() {
                block[row..].iter_mut().step_by(count).zip(values).for_each(|(to, value)| *to = *value);
            }
            (count, block)
        };
        a.chunks(size * self.rows).map(block).collect()
    }
}

/// The block that a kernel multiplies at a time.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    width: usize,
}

struct Detect<R>(std::marker::PhantomData<R>);

impl<R: Lanes> WithSimd for Detect<R> {
    type Output = Shape;

    /// The sums take most of the registers.
    fn with_simd<S: Simd>(self, _: S) -> Shape {
        Shape { rows: if S::REGISTER_COUNT >= 32 { 10 } else { 6 }, width: VECTORS * R::lanes::<S>() }
    }
}

/// A block of rows times a panel.
struct Multiply<'a, R> {
    rows: usize,
    a: &'a [R],
    panel: &'a [R],
    sums: &'a mut [R],
}

impl<R: Lanes> WithSimd for Multiply<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.rows {
            1 => self.run::<S, 1>(simd),
            2 => self.run::<S, 2>(simd),
            3 => self.run::<S, 3>(simd),
            4 => self.run::<S, 4>(simd),
            5 => self.run::<S, 5>(simd),
            6 => self.run::<S, 6>(simd),
            7 => self.run::<S, 7>(simd),
            8 => self.run::<S, 8>(simd),
            9 => self.run::<S, 9>(simd),
            _ => self.run::<S, 10>(simd),
        }
    }
}

impl<R: Lanes> Multiply<'_, R> {
    #[inline(always)]
    fn run<S: Simd, const ROWS: usize>(self, simd: S) {
        let mut sums = [[R::splat(simd, R::default()); VECTORS]; ROWS];
        let (a, _) = self.a.as_chunks::<ROWS>();
        let (panel, _) = R::vectors::<S>(self.panel).as_chunks::<VECTORS>();
        for (a, b) in a.iter().zip(panel) {
            for (sums, a) in sums.iter_mut().zip(a) {
                let a = R::splat(simd, *a);
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = R::multiply_add(simd, a, *b, *sum);
                }
            }
        }
        R::vectors_mut::<S>(self.sums).copy_from_slice(sums.as_flattened());
    }
}

/// Numbers that fill the processor's vectors.
pub(crate) trait Lanes: Real {
    /// A vector.
    type Vector<S: Simd>: Copy;
    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// a · b + c.
    fn multiply_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
    /// The whole vectors of a slice.
    fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>];
    fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>];
}

macro_rules! lanes {
    ($number:ident, $vector:ident, $lanes:ident, $splat:ident, $multiply_add:ident, $vectors:ident, $vectors_mut:ident) => {
        impl Lanes for $number {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                S::$lanes
            }

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S> {
                simd.$splat(value)
            }

            #[inline(always)]
            fn multiply_add<S: Simd>(
                simd: S,
                a: Self::Vector<S>,
                b: Self::Vector<S>,
                c: Self::Vector<S>,
            ) -> Self::Vector<S> {
                simd.$multiply_add(a, b, c)
            }

            #[inline(always)]
            fn vectors<S: Simd>(values: &[Self]) -> &[Self::Vector<S>] {
                S::$vectors(values).0
            }

            #[inline(always)]
            fn vectors_mut<S: Simd>(values: &mut [Self]) -> &mut [Self::Vector<S>] {
                S::$vectors_mut(values).0
            }
        }
    };
}

lanes!(f32, f32s, F32_LANES, splat_f32s, mul_add_e_f32s, as_simd_f32s, as_mut_simd_f32s);
lanes!(f64, f64s, F64_LANES, splat_f64s, mul_add_e_f64s, as_simd_f64s, as_mut_simd_f64s);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::gemm;

    fn numbers(count: usize, step: f64) -> Vec<f64> {
        (0..count).map(|index| (index as f64 * step).sin()).collect()
    }

    /// Blocks and panels that are not full, both layouts, and none at all.
    #[test]
    fn products_are_those_of_gemm() {
        for (m, n, k) in
            [(1, 1, 1), (3, 33, 5), (10, 64, 9), (20, 130, 17), (27, 7, 40), (0, 5, 4), (2, 0, 3), (2, 4, 0)]
        {
            for transposed in [false, true] {
                let strides = if transposed { Strides::transposed(k) } else { Strides::rows(n) };
                let (a, b) = (numbers(m * k, 0.7), numbers(k * n, 1.3));
                let mut expected = numbers(m * n, 0.2);
                let mut results = [expected.clone(), expected.clone()];
                gemm((m, n, k), &mut expected, true, (&a[..], Strides::rows(k)), (&b[..], strides), 1).unwrap();
                let panels = Panels::new((k, n), (&b, strides));
                for (result, threads) in results.iter_mut().zip([1, 2]) {
                    panels.add_product(&a, result, threads);
                }
                assert_eq!(results[0], results[1]);
                let error = results[0].iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
                assert!(error < 1e-13, "{m} × {n} × {k}, {transposed}: {error}");
                let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect::<Vec<_>>();
                let mut result = narrow(&numbers(m * n, 0.2));
                Panels::new((k, n), (&narrow(&b), strides)).add_product(&narrow(&a), &mut result, 1);
                let error = result.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0., f64::max);
                assert!(error < 1e-5, "{m} × {n} × {k}, {transposed}: {error}");
            }
        }
    }
}
