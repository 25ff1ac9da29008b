use super::*;
use crate::conv::geometry::positions;
use crate::conv::products;
use crate::gemm::bf16::{Avx512, portable::Portable};

/// Numbers between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| bf16::from_f32(next())).collect()
}

fn exactly(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// Checks that errors are those of sums in f32 of about this many products, and of one rounding to bf16 if `rounded`.
fn check(name: &str, geometry: &Geometry, values: &[f64], exact: &[f64], terms: usize, rounded: bool) {
    assert_eq!(values.len(), exact.len());
    for (at, (value, exact)) in values.iter().zip(exact).enumerate() {
        let rounding = if rounded { exact.abs() / 256.0 } else { 0.0 };
        let bound = rounding + 1e-7 * (terms as f64).powf(0.75) + 1e-6;
        assert!((value - exact).abs() <= bound, "{name}[{at}] is {value}, not {exact}: {geometry:?}");
    }
}

fn passes_agree_with_products_of_f64<U: Unit>(unit: U) {
    // Images, channels, groups, input, kernel, stride, padding, dilation.
    let cases = [
        (2, [6, 5], 1, [9, 7], [3, 3], [1, 1], [1, 1], [1, 1]),
        (3, [3, 4], 1, [8, 8], [3, 3], [2, 2], [1, 1], [1, 1]),
        (1, [1, 1], 1, [5, 4], [1, 1], [1, 1], [0, 0], [1, 1]),
        (2, [5, 16], 1, [7, 9], [1, 1], [2, 2], [0, 0], [1, 1]),
        (2, [4, 6], 2, [6, 10], [3, 2], [1, 2], [2, 0], [2, 3]),
        (2, [9, 6], 3, [11, 5], [5, 5], [3, 2], [2, 4], [1, 1]),
        // A line, outputs that see padding only, and a kernel smaller than its stride.
        (2, [2, 3], 1, [1, 40], [1, 3], [1, 1], [0, 1], [1, 1]),
        (2, [2, 2], 1, [2, 2], [2, 2], [1, 1], [4, 3], [1, 1]),
        (2, [3, 3], 1, [10, 10], [2, 2], [5, 4], [0, 1], [1, 1]),
        // Several blocks of rows, columns and depth, and bands of images.
        (5, [64, 3], 1, [8, 8], [3, 3], [1, 1], [1, 1], [1, 1]),
        (3, [12, 30], 1, [12, 32], [3, 3], [1, 1], [1, 1], [1, 1]),
        // Bands of rows.
        (2, [2, 1], 1, [76, 72], [3, 3], [1, 1], [1, 1], [1, 1]),
        (2, [2, 1], 1, [78, 150], [3, 3], [2, 2], [1, 1], [2, 2]),
        // Lines of one image, and rows that are longer than a block is deep.
        (1, [3, 4], 1, [1, 130], [1, 3], [1, 1], [0, 1], [1, 1]),
        (1, [4, 4], 2, [1, 65], [1, 5], [1, 3], [0, 7], [1, 2]),
        (1, [2, 3], 1, [1, 3], [1, 2], [1, 1], [0, 2], [1, 1]),
        (3, [2, 3], 1, [3, 110], [3, 3], [1, 1], [1, 1], [1, 1]),
        (1, [2, 3], 1, [3, 70], [1, 3], [1, 1], [0, 1], [1, 1]),
    ];
    for (n, [ci, co], groups, input, kernel, stride, padding, dilation) in cases {
        let output = [0, 1]
            .map(|axis| positions(input[axis], kernel[axis], stride[axis], padding[axis], dilation[axis]).unwrap());
        let geometry = Geometry { n, ci, co, groups, input, output, kernel, stride, padding, dilation };
        let x = numbers(n * ci * geometry.input_pixels(), 1);
        let weight = numbers(co * geometry.taps(), 2);
        let dy = numbers(n * co * geometry.output_pixels(), 3);
        let bias: Vec<f32> = numbers(co.max(ci), 4).iter().map(|value| value.to_f32()).collect();
        let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        let (x64, weight64, dy64, bias64) = (exactly(&x), exactly(&weight), exactly(&dy), wide(&bias));

        let y = forward(unit, &geometry, &x, &weight, Some(&bias[..co])).unwrap();
        let exact = products::forward(&geometry, &x64, &weight64, Some(&bias64[..co])).unwrap();
        check("y", &geometry, &exactly(&y), &exact, geometry.taps(), true);

        let exact = products::backward_data(&geometry, &dy64, &weight64).unwrap();
        let terms = geometry.group_outputs() * kernel[0] * kernel[1];
        let dx = backward_data(unit, &geometry, &dy, &weight, None).unwrap();
        check("dx", &geometry, &exactly(&dx), &exact, terms, true);
        let dx = backward_data(unit, &geometry, &dy, &weight, Some(&bias[..ci])).unwrap();
        let pixels = geometry.input_pixels();
        let exact: Vec<f64> = exact.iter().enumerate().map(|(at, value)| value + bias64[at / pixels % ci]).collect();
        check("dx with bias", &geometry, &exactly(&dx), &exact, terms, true);

        let d_weight = backward_filter(unit, &geometry, &x, &dy).unwrap();
        let exact = products::backward_filter(&geometry, &x64, &dy64).unwrap();
        check("the weights' gradient", &geometry, &wide(&d_weight), &exact, n * geometry.output_pixels(), false);
    }
}

#[test]
fn packed_images_give_what_columns_give() {
    passes_agree_with_products_of_f64(Portable);
}

/// Skipped where the processor does not have the instructions.
#[test]
fn the_instructions_give_what_columns_give() {
    if let Some(unit) = Avx512::detect().unwrap() {
        passes_agree_with_products_of_f64(unit);
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn tiles_give_what_columns_give() {
    if let Some(unit) = crate::gemm::bf16::emulated_tiles::unit() {
        passes_agree_with_products_of_f64(unit);
    }
}
