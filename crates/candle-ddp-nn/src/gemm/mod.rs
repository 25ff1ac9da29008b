//! Matrix products on the CPU. f32 and f64 are multiplied by the crate `gemm`, which candle uses too. f16 and bf16 are multiplied
//! in f32, but bf16 by the processor's own instructions if it has them and they are faster.
// Matrices are given to `gemm` by their addresses. Every block says why it is sound.
#![allow(unsafe_code)]
pub(super) mod bf16;
mod blocks;
mod panels;
mod strides;

use candle_core::{DType, Result, WithDType};
use candle_ddp_tensor::borrow::narrow_vec;
use candle_ddp_tensor::{Element, vectorise};
use gemm::Parallelism;
pub(super) use panels::{Lanes, Panels};
use std::any::TypeId;
use std::borrow::Cow;
use std::sync::Once;
pub(super) use strides::Strides;

/// The number of threads that a product uses: all of rayon's pool, as in candle.
pub(super) fn threads() -> usize {
    rayon::current_num_threads().max(1)
}

/// a · b, row by row, and to each row `bias` is added if there is one. Sums are in f32 (f64 for f64), and rounded once. If `b` is wider
/// than `T`, its elements are rounded to `T` first.
///
/// # Errors
/// As [`gemm`].
pub(super) fn product<T: Element, B: Element<Real = T::Real>>(
    (m, n, k): (usize, usize, usize),
    a: (&[T], Strides),
    b: (&[B], Strides),
    bias: Option<&[T]>,
    threads: usize,
) -> Result<Vec<T>> {
    // Rust's vectors have no more bytes.
    let elements = m.checked_mul(n).filter(|count| *count <= isize::MAX as usize / size_of::<T::Real>());
    let Some(elements) = elements else {
        candle_core::bail!("a product of {m}×{k} and {k}×{n} has more elements than memory can have")
    };
    check((m, n, k), elements, a, b)?;
    if bias.is_some_and(|bias| bias.len() != n) {
        candle_core::bail!("the bias of a product with {n} columns must have as many elements")
    }
    if let (Some(unit), Some(of_a)) = (unit::<T>()?, same(a.0)) {
        let mut result = Vec::<T>::with_capacity(elements);
        let (of_a, bias) = ((of_a, a.1), bias.and_then(same));
        match (same_mut(&mut result.spare_capacity_mut()[..elements]), same(b.0), same(b.0)) {
            (Some(result), Some(of_b), _) => {
                blocks::rounded::<_, half::bf16>(unit, (m, n, k), result, of_a, (of_b, b.1), bias, threads)
            }
            (Some(result), _, Some(of_b)) => {
                blocks::rounded::<_, f32>(unit, (m, n, k), result, of_a, (of_b, b.1), bias, threads)
            }
            _ => candle_core::bail!("a product of {:?} cannot have a factor of {:?}", T::DTYPE, B::DTYPE),
        }
        // SAFETY: all elements have been written.
        unsafe { result.set_len(elements) };
        return Ok(result);
    }
    if !is_wide::<T>() {
        let (of_a, of_b, bias) = (wide(a.0), rounded::<T, B>(b.0), bias.map(wide));
        let (a, b) = ((&of_a[..], a.1), (&of_b[..], b.1));
        return Ok(narrow_vec::<T>(product((m, n, k), a, b, bias.as_deref(), threads)?));
    }
    let (of_a, of_b) = (wide(a.0), wide(b.0));
    let (a, b) = ((&of_a[..], a.1), (&of_b[..], b.1));
    if let Some(bias) = bias {
        let mut result = wide(bias).repeat(m);
        // SAFETY: the slices span the matrices, as checked above, and the type of sums is f32 or f64.
        unsafe { multiply((m, n, k), result.as_mut_ptr(), true, a, b, threads) };
        return Ok(narrow_vec::<T>(result));
    }
    let mut result = Vec::with_capacity(elements);
    if k == 0 {
        result.resize(elements, T::Real::from_f64(0.0));
        return Ok(narrow_vec::<T>(result));
    }
    // SAFETY: the result has room for m × n elements, and a product that does not accumulate writes all of them
    // before they count as initialised. The factors were checked, and the type of sums is f32 or f64.
    unsafe {
        multiply((m, n, k), result.as_mut_ptr(), false, a, b, threads);
        result.set_len(elements);
    }
    Ok(narrow_vec::<T>(result))
}

/// result = a · b, or result + a · b if `accumulate`; `a` has `m` rows and `k` columns, `b` has `k` rows and `n`
/// columns, the result has `m` consecutive rows. If `b` is wider than `T`, its elements are rounded to `T` first.
///
/// # Errors
/// Returns an error for a slice that is too short for its matrix.
pub(super) fn gemm<T: Element, B: Element<Real = T::Real>>(
    (m, n, k): (usize, usize, usize),
    result: &mut [T::Real],
    accumulate: bool,
    a: (&[T], Strides),
    b: (&[B], Strides),
    threads: usize,
) -> Result<()> {
    check((m, n, k), result.len(), a, b)?;
    match (T::as_reals(a.0), B::as_reals(b.0)) {
        // SAFETY: the slices span the matrices, as checked above, and the result is borrowed mutably, so it overlaps
        // with neither factor.
        (Some(wide_a), Some(wide_b)) => unsafe {
            multiply((m, n, k), result.as_mut_ptr(), accumulate, (wide_a, a.1), (wide_b, b.1), threads);
        },
        _ => {
            if let Some(unit) = unit::<T>()?
                && let (Some(of_a), Some(result)) = (same(a.0), same_mut(result))
            {
                let of_a = (of_a, a.1);
                match (same(b.0), same(b.0)) {
                    (Some(of_b), _) => blocks::sums::<_, half::bf16>(
                        unit,
                        (m, n, k),
                        (result, n),
                        accumulate,
                        of_a,
                        (of_b, b.1),
                        threads,
                    ),
                    (_, Some(of_b)) => {
                        blocks::sums::<_, f32>(unit, (m, n, k), (result, n), accumulate, of_a, (of_b, b.1), threads)
                    }
                    _ => candle_core::bail!("a product of {:?} cannot have a factor of {:?}", T::DTYPE, B::DTYPE),
                }
            } else {
                let (of_a, of_b) = (wide(a.0), rounded::<T, B>(b.0));
                return gemm((m, n, k), result, accumulate, (&of_a[..], a.1), (&of_b[..], b.1), threads);
            }
        }
    }
    Ok(())
}

/// The largest diagonal block of a [`symmetric`] product that is calculated as a whole.
const DIAGONAL: usize = 128;

/// result = a · b, where `b` has the columns of `a`'s transpose, or both are symmetric and commute: the product is then its own transpose, and
/// what is above its diagonal blocks is copied from below them. `a` has `n` rows and `k` columns, and the result `n` consecutive rows.
///
/// # Errors
/// As [`gemm`].
pub(super) fn symmetric<T: Element>(
    (n, k): (usize, usize),
    result: &mut [T::Real],
    a: (&[T], Strides),
    b: (&[T], Strides),
    threads: usize,
) -> Result<()> {
    check((n, n, k), result.len(), a, b)?;
    if !is_wide::<T>() && !is_native::<T>()? {
        let (of_a, of_b) = (wide(a.0), wide(b.0));
        return symmetric((n, k), result, (&of_a[..], a.1), (&of_b[..], b.1), threads);
    }
    let (mut diagonal, mut block) = (vec![(0, n)], Vec::new());
    while let Some((first, size)) = diagonal.pop() {
        // The rows of the block, and its columns, which start with the diagonal block's.
        let (row, columns) = if size > DIAGONAL { (first + size / 2, size / 2) } else { (first, size) };
        let rows = first + size - row;
        if rows == 0 || k == 0 {
            result[..n * n].fill(T::Real::from_f64(0.0));
            return Ok(());
        }
        block.resize(rows * columns, T::Real::from_f64(0.0));
        let (of_a, of_b) = ((&a.0[row * a.1.row..], a.1), (&b.0[first * b.1.column..], b.1));
        gemm((rows, columns, k), &mut block[..], false, of_a, of_b, threads)?;
        for (at, values) in block.chunks_exact(columns).enumerate() {
            result[(row + at) * n + first..][..columns].copy_from_slice(values);
            if row > first {
                let above = result[first * n + row + at..].iter_mut().step_by(n);
                above.zip(values).for_each(|(to, value)| *to = *value);
            }
        }
        if row > first {
            diagonal.extend([(first, columns), (row, rows)]);
        }
    }
    Ok(())
}

/// The elements in the type that they are computed in.
pub(super) fn wide<T: Element>(values: &[T]) -> Cow<'_, [T::Real]> {
    match T::as_reals(values) {
        Some(values) => Cow::Borrowed(values),
        None => vectorise!(|| values.iter().map(|value| value.widen()).collect()),
    }
}

/// The elements, rounded to `T`, in the type that they are computed in.
fn rounded<T: Element, B: Element<Real = T::Real>>(values: &[B]) -> Cow<'_, [T::Real]> {
    if B::DTYPE == T::DTYPE {
        return wide(values);
    }
    vectorise!(|| values.iter().map(|value| T::narrow(value.widen()).widen()).collect())
}

/// The instructions that multiply `T`, which is not the type that it is computed in, if this processor has them and they are faster than
/// those of that type.
pub(super) fn unit<T: Element>() -> Result<Option<bf16::Avx512>> {
    if T::DTYPE != DType::BF16 {
        return Ok(None);
    }
    static SAID: Once = Once::new();
    let unit = bf16::Avx512::detect().map_err(candle_ddp_tensor::Error::from)?;
    let faster = unit.filter(|unit| unit.is_faster_than_f32());
    if unit.is_some() && faster.is_none() {
        SAID.call_once(|| {
            log::info!("bf16 is multiplied in f32: without AMX, this processor's instructions for bf16 are slower")
        });
    }
    Ok(faster)
}

/// Whether there are such instructions for `T`.
pub(super) fn is_native<T: Element>() -> Result<bool> {
    Ok(unit::<T>()?.is_some())
}

/// Whether `T` is the type that it is computed in.
pub(super) fn is_wide<T: Element>() -> bool {
    T::as_reals(&[]).is_some()
}

/// The same elements, if `A` is `B`.
pub(super) fn same<A: 'static, B: 'static>(values: &[A]) -> Option<&[B]> {
    // SAFETY: the two types are the same.
    (TypeId::of::<A>() == TypeId::of::<B>())
        .then(|| unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) })
}

/// The same elements, if `A` is `B`.
pub(super) fn same_mut<A: 'static, B: 'static>(values: &mut [A]) -> Option<&mut [B]> {
    // SAFETY: the two types are the same, and the new borrow ends the old one.
    (TypeId::of::<A>() == TypeId::of::<B>())
        .then(|| unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) })
}

fn check<A: WithDType, B: WithDType>(
    (m, n, k): (usize, usize, usize),
    result: usize,
    (a, a_strides): (&[A], Strides),
    (b, b_strides): (&[B], Strides),
) -> Result<()> {
    if result < m.saturating_mul(n) || a.len() < a_strides.span(m, k) || b.len() < b_strides.span(k, n) {
        candle_core::bail!(
            "a product of {m}×{k} and {k}×{n} needs more elements than the slices have: {}, {} and {result}",
            a.len(),
            b.len(),
        )
    }
    Ok(())
}

/// # Safety
/// `R` must be f32 or f64. `result` must be valid for writes of `m` × `n` elements, and for reads if
/// `accumulate`, and must not overlap with a factor. The slices must span their matrices.
unsafe fn multiply<R: WithDType>(
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums in one order give the same bits on both sides of the diagonal.
    #[test]
    fn symmetric_products_are_products() {
        fn compare<T: Element>(tolerance: f64) {
            for (n, k) in [(0, 3), (1, 0), (1, 1), (5, 7), (128, 3), (129, 65), (300, 33), (517, 20)] {
                let a: Vec<T> = (0..n * k).map(|i| T::from_f64((i as f64 * 0.7).sin())).collect();
                for (of_a, of_b) in
                    [(Strides::rows(k), Strides::transposed(k)), (Strides::transposed(n), Strides::rows(n))]
                {
                    let result = |is_symmetric| {
                        let mut result = vec![T::Real::from_f64(f64::NAN); n * n];
                        match is_symmetric {
                            true => symmetric((n, k), &mut result, (&a, of_a), (&a, of_b), 2).unwrap(),
                            false => gemm((n, n, k), &mut result, false, (&a, of_a), (&a, of_b), 1).unwrap(),
                        }
                        result.iter().map(|value| value.to_f64()).collect::<Vec<f64>>()
                    };
                    let (ours, expected) = (result(true), result(false));
                    for (at, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
                        assert!((ours - expected).abs() <= tolerance * k as f64, "{:?} {n} {k}: {at}", T::DTYPE);
                    }
                    assert!((0..n * n).all(|at| ours[at] == ours[at % n * n + at / n]), "{:?} {n} {k}", T::DTYPE);
                }
            }
        }
        compare::<f32>(1e-6);
        compare::<f64>(1e-15);
        compare::<half::f16>(1e-6);
        compare::<half::bf16>(1e-6);
        let a = [f32::NAN, 1.0, 2.0, 3.0];
        let mut result = [0.0; 4];
        symmetric((2, 2), &mut result, (&a, Strides::rows(2)), (&a, Strides::transposed(2)), 1).unwrap();
        assert!(result[..3].iter().all(|value| value.is_nan()) && result[3] == 13.0);
        assert!(symmetric((2, 3), &mut result, (&a, Strides::rows(3)), (&a, Strides::transposed(3)), 1).is_err());
    }

    /// A product over no elements has no factors that limit it.
    #[test]
    fn more_elements_than_can_be_counted_are_refused() {
        const MANY: usize = 1 << (usize::BITS / 2);
        let empty = |strides| (&[0f32; 0][..], strides);
        let refused = |m, n| product((m, n, 0), empty(Strides::rows(0)), empty(Strides::rows(n)), None, 1).is_err();
        assert!(refused(MANY, MANY) && refused(MANY, MANY / 2) && !refused(2, 3));
        let gemm =
            |m, n| gemm((m, n, 0), &mut [0f32; 6], false, empty(Strides::rows(0)), empty(Strides::rows(n)), 1).is_err();
        assert!(gemm(MANY, MANY) && !gemm(2, 3));
        let one = (&[0f32; 1][..], Strides { row: MANY, column: 1 });
        assert!(product((MANY + 1, 1, 1), one, (&[0f32; 1], Strides::rows(1)), None, 1).is_err());
    }
}
