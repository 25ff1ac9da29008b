use super::portable::Portable;
use super::*;
use crate::gemm::Strides;
use crate::gemm::blocks::{rounded, sums};
use half::bf16;

/// Numbers that spread over some magnitudes.
pub(super) fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| bf16::from_f32(next() * (4.0 * next()).exp2())).collect()
}

/// A product by `unit` for each layout of the factors, with `f` of the result, what was there before, the exact product, and
/// the exact product of magnitudes.
fn each_layout<U: Unit>(unit: U, (m, n, k): (usize, usize, usize), mut f: impl FnMut(&[f32], f32, &[f64], &[f64])) {
    let layouts = |rows: usize, columns: usize| {
        [
            Strides::rows(columns),
            Strides::transposed(rows),
            Strides { row: columns + 3, column: 1 },
            Strides { row: 2, column: 2 * rows },
        ]
    };
    for (a_strides, b_strides) in layouts(m, k).into_iter().flat_map(|a| layouts(k, n).into_iter().map(move |b| (a, b)))
    {
        let (a, b) = (numbers(a_strides.span(m, k), 1), numbers(b_strides.span(k, n), 2));
        let (mut exact, mut magnitude) = (vec![0.0; m * n], vec![0.0; m * n]);
        for (row, column, at) in (0..m).flat_map(|row| (0..n).flat_map(move |c| (0..k).map(move |k| (row, c, k)))) {
            let a = a[row * a_strides.row + at * a_strides.column].to_f64();
            let product = a * b[at * b_strides.row + column * b_strides.column].to_f64();
            exact[row * n + column] += product;
            magnitude[row * n + column] += product.abs();
        }
        for (accumulate, distance) in [(false, n), (true, n + 5)] {
            const BEFORE: f32 = 0.75;
            let mut result = vec![BEFORE; (m - 1) * distance + n];
            let (a, to) = ((&a[..], a_strides), (m, n, k));
            sums(unit, to, (&mut result, distance), accumulate, a, (&b[..], b_strides), 1);
            // f32 a little off, which rounding brings back.
            let wide: Vec<f32> = b.iter().map(|b| b.to_f32() * 1.001).collect();
            let mut again = vec![BEFORE; result.len()];
            sums(unit, to, (&mut again, distance), accumulate, a, (&wide[..], b_strides), 1);
            assert_eq!(again, result, "rounded while packed, {to:?}, {b_strides:?}");
            let rows = result.chunks(distance);
            assert!(rows.clone().all(|row| row[n..].iter().all(|outside| *outside == BEFORE)));
            let inside: Vec<f32> = rows.flat_map(|row| row[..n].to_vec()).collect();
            f(&inside, if accumulate { BEFORE } else { 0.0 }, &exact, &magnitude);
        }
    }
}

pub(super) fn products_are_exact_up_to_sums<U: Unit>(unit: U) {
    for extents @ (_, _, k) in
        [(1, 1, 1), (14, 32, 2), (15, 33, 3), (29, 16, 32), (3, 70, 31), (31, 17, 65), (43, 48, 70), (2, 1, 129)]
    {
        each_layout(unit, extents, |result, before, exact, magnitude| {
            for ((result, exact), magnitude) in result.iter().zip(exact).zip(magnitude) {
                let error = (f64::from(*result) - f64::from(before) - exact).abs();
                let bound = f64::from(f32::EPSILON) * (k as f64 * magnitude + f64::from(before));
                assert!(error <= bound, "{result} is not {exact} + {before}, in {extents:?}");
            }
        });
    }
}

#[test]
fn packing_and_tiles_cover_every_extent() {
    products_are_exact_up_to_sums(Portable);
}

#[test]
fn products_without_rows_columns_or_depth_have_no_blocks() {
    let bias = numbers(3, 1);
    for (m, n, k) in [(0, 3, 2), (2, 0, 3), (2, 3, 0), (0, 0, 0)] {
        let (a, b) = (numbers(m * k, 2), numbers(k * n, 3));
        let (of_a, of_b) = ((&a[..], Strides::rows(k)), (&b[..], Strides::rows(n)));
        for threads in [1, 2] {
            let (mut sum, mut to) = (vec![0.5; m * n], vec![MaybeUninit::new(bf16::NAN); m * n]);
            sums(Portable, (m, n, k), (&mut sum, n), false, of_a, of_b, threads);
            rounded(Portable, (m, n, k), &mut to, of_a, of_b, Some(&bias[..n]), threads);
            assert_eq!(sum, vec![0.0; m * n]);
            // SAFETY: all were initialised.
            let to: Vec<bf16> = to.into_iter().map(|to| unsafe { to.assume_init() }).collect();
            assert_eq!(to, bias[..n].repeat(m));
        }
    }
}

/// Skipped where the processor does not have the instructions.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_instructions_multiply_exactly_up_to_sums() {
    if let Some(unit) = Avx512::detect().unwrap() {
        products_are_exact_up_to_sums(unit.with_tiles(false));
        blocks_meet(unit.with_tiles(false));
    }
}

/// More than one block of rows, columns and depth, by one thread and by two.
pub(super) fn blocks_meet<U: Unit>(unit: U) {
    let (m, n, k) = (200, 331, 2101);
    let (a, b, bias) = (numbers(m * k, 1), numbers(k * n, 2), numbers(n, 3));
    for (a_strides, b_strides) in
        [(Strides::rows(k), Strides::rows(n)), (Strides::transposed(m), Strides::transposed(k))]
    {
        let (of_a, of_b) = ((&a[..], a_strides), (&b[..], b_strides));
        let results = [1, 2].map(|threads| {
            let (mut sum, mut to) = (vec![0.5; m * n], vec![MaybeUninit::new(bf16::NAN); m * n]);
            sums(unit, (m, n, k), (&mut sum, n), true, of_a, of_b, threads);
            rounded(unit, (m, n, k), &mut to, of_a, of_b, Some(&bias), threads);
            // SAFETY: all were initialised.
            (sum, to.into_iter().map(|to| unsafe { to.assume_init() }.to_f32()).collect::<Vec<_>>())
        });
        assert_eq!(results[0], results[1]);
        for at in (0..m * n).step_by(97).chain([m * n - 1]) {
            let (row, column) = (at / n, at % n);
            let products = (0..k).map(|k| {
                let a = a[row * a_strides.row + k * a_strides.column].to_f64();
                a * b[k * b_strides.row + column * b_strides.column].to_f64()
            });
            let (exact, magnitude) = products.fold((0.0, 0.0), |(sum, all), one| (sum + one, all + one.abs()));
            let (sum, rounded) = (f64::from(results[0].0[at]) - 0.5, f64::from(results[0].1[at]));
            let bound = f64::from(f32::EPSILON) * k as f64 * magnitude;
            assert!((sum - exact).abs() <= bound, "row {row}, column {column}: {sum} is not {exact}");
            let wanted = exact + bias[column].to_f64();
            assert!((rounded - wanted).abs() <= bound + wanted.abs() / 256.0, "{rounded} is not {wanted}, rounded");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn intels_without_tiles_multiply_in_f32() {
    let is_faster = |vendor: &[u8]| [false, true].map(|has_tiles| avx512::is_faster_than_f32(vendor, has_tiles));
    assert_eq!(is_faster(b"GenuineIntel"), [false, true]);
    assert_eq!(is_faster(b"AuthenticAMD"), [true, true]);
}
