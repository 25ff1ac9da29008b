//! The transformations of Winograd's algorithm for one kind of tile, on [`LANES`] tiles at a time.
use candle_ddp_tensor::Real;

/// The number of tiles that are transformed at a time.
pub(super) const LANES: usize = 16;

/// The same element of [`LANES`] tiles.
pub(super) type Lanes<R> = [R; LANES];

/// Tiles of `OUTPUTS`² outputs, which depend on (`OUTPUTS` + 2)² inputs, and have as many points.
///
/// In slices of elements or points, values at the same place in their tiles lie side by side, and places are a given
/// distance apart.
pub(super) trait Tile {
    const OUTPUTS: usize;
    const POINTS: usize = (Self::OUTPUTS + 2) * (Self::OUTPUTS + 2);

    /// Bᵀ x B of the tiles from `lane` on.
    fn inputs<R: Real>(elements: &[R], distance: usize, lane: usize, points: &mut [R], points_distance: usize);

    /// Aᵀ m A of the tiles from `lane` on.
    fn outputs<R: Real>(points: &[R], points_distance: usize, lane: usize, elements: &mut [R], distance: usize);

    /// A y Aᵀ of the tiles from `lane` on.
    fn gradients<R: Real>(elements: &[R], distance: usize, lane: usize, points: &mut [R], points_distance: usize);

    /// G w Gᵀ.
    fn weights<R: Real>(taps: &[Lanes<R>; 9], points: &mut [R]);

    /// Gᵀ w G.
    fn weight_gradients<R: Real>(points: &[R]) -> [Lanes<R>; 9];
}

pub(super) struct Two;
pub(super) struct Four;

#[inline(always)]
fn load<R: Real>(from: &[R], at: usize) -> Lanes<R> {
    let mut lanes = [R::default(); LANES];
    lanes.copy_from_slice(&from[at..at + LANES]);
    lanes
}

#[inline(always)]
fn each<R: Real, const I: usize, const O: usize>(
    values: [Lanes<R>; I],
    of: impl Fn([R; I]) -> [R; O],
) -> [Lanes<R>; O] {
    let mut results = [[R::default(); LANES]; O];
    for lane in 0..LANES {
        let mut inputs = [R::default(); I];
        for (input, value) in inputs.iter_mut().zip(&values) {
            *input = value[lane];
        }
        for (result, output) in results.iter_mut().zip(of(inputs)) {
            result[lane] = output;
        }
    }
    results
}

/// Applies `of` to the columns and then to the rows of I × I places, which results in O × O places.
#[inline(always)]
fn both_ways<R: Real, const I: usize, const O: usize>(
    (from, from_distance, from_lane): (&[R], usize, usize),
    (to, to_distance, to_lane): (&mut [R], usize, usize),
    of: impl Fn([R; I]) -> [R; O] + Copy,
) {
    let mut half = [[[R::default(); LANES]; I]; O];
    for column in 0..I {
        let mut values = [[R::default(); LANES]; I];
        for (row, value) in values.iter_mut().enumerate() {
            *value = load(from, (row * I + column) * from_distance + from_lane);
        }
        for (half, value) in half.iter_mut().zip(each(values, of)) {
            half[column] = value;
        }
    }
    for (row, half) in half.into_iter().enumerate() {
        for (column, value) in each(half, of).iter().enumerate() {
            to[(row * O + column) * to_distance + to_lane..][..LANES].copy_from_slice(value);
        }
    }
}

/// A `Tile` by its matrices, as functions of vectors.
macro_rules! tile {
    ($Tile:ident, $outputs:literal, $input:ident, $output:ident, $gradient:ident, $weight:ident, $weight_gradient:ident) => {
        impl Tile for $Tile {
            const OUTPUTS: usize = $outputs;

            #[inline(always)]
            fn inputs<R: Real>(elements: &[R], distance: usize, lane: usize, points: &mut [R], points_distance: usize) {
                both_ways((elements, distance, lane), (points, points_distance, lane), $input);
            }

            #[inline(always)]
            fn outputs<R: Real>(
                points: &[R],
                points_distance: usize,
                lane: usize,
                elements: &mut [R],
                distance: usize,
            ) {
                both_ways((points, points_distance, lane), (elements, distance, lane), $output);
            }

            #[inline(always)]
            fn gradients<R: Real>(
                elements: &[R],
                distance: usize,
                lane: usize,
                points: &mut [R],
                points_distance: usize,
            ) {
                both_ways((elements, distance, lane), (points, points_distance, lane), $gradient);
            }

            #[inline(always)]
            fn weights<R: Real>(taps: &[Lanes<R>; 9], points: &mut [R]) {
                both_ways((taps.as_flattened(), LANES, 0), (points, LANES, 0), $weight);
            }

            #[inline(always)]
            fn weight_gradients<R: Real>(points: &[R]) -> [Lanes<R>; 9] {
                let mut taps = [[R::default(); LANES]; 9];
                both_ways((points, LANES, 0), (taps.as_flattened_mut(), LANES, 0), $weight_gradient);
                taps
            }
        }
    };
}

tile!(Two, 2, input_of_two, output_of_two, gradient_of_two, weight_of_two, weight_gradient_of_two);
tile!(Four, 4, input_of_four, output_of_four, gradient_of_four, weight_of_four, weight_gradient_of_four);

#[inline(always)]
fn number<R: Real>(value: f64) -> R {
    R::from_f64(value)
}

#[inline(always)]
fn input_of_two<R: Real>([a, b, c, d]: [R; 4]) -> [R; 4] {
    [a - c, b + c, c - b, b - d]
}

#[inline(always)]
fn output_of_two<R: Real>([a, b, c, d]: [R; 4]) -> [R; 2] {
    [a + b + c, b - c - d]
}

#[inline(always)]
fn gradient_of_two<R: Real>([a, b]: [R; 2]) -> [R; 4] {
    [a, a + b, a - b, -b]
}

#[inline(always)]
fn weight_of_two<R: Real>([a, b, c]: [R; 3]) -> [R; 4] {
    let half = number::<R>(0.5);
    let (even, odd) = ((a + c) * half, b * half);
    [a, even + odd, even - odd, c]
}

#[inline(always)]
fn weight_gradient_of_two<R: Real>([a, b, c, d]: [R; 4]) -> [R; 3] {
    let half = number::<R>(0.5);
    let (even, odd) = ((b + c) * half, (b - c) * half);
    [a + even, odd, even + d]
}

/// The points of [`Four`] other than 0 and infinity are ±A and ±B. The usual ±1 and ±2 have rounding errors three to
/// four times as large. These values, which oneDNN uses too, are exact in every dtype.
const A: f64 = 0.625;
const B: f64 = 1.5;
const A2: f64 = A * A;
const B2: f64 = B * B;
/// The divisors of the weights at 0, ±A and ±B: the products of the differences from the other points.
const AT_ZERO: f64 = A2 * B2;
const AT_A: f64 = 2.0 * A2 * (A2 - B2);
const AT_B: f64 = 2.0 * B2 * (B2 - A2);

#[inline(always)]
fn input_of_four<R: Real>([a, b, c, d, e, f]: [R; 6]) -> [R; 6] {
    let (zero, sum) = (number::<R>(AT_ZERO), number::<R>(A2 + B2));
    let (even, odd) = (e - c * number(B2), d * number(A) - b * number(A * B2));
    let (even2, odd2) = (e - c * number(A2), d * number(B) - b * number(B * A2));
    [a * zero - c * sum + e, even + odd, even - odd, even2 + odd2, even2 - odd2, b * zero - d * sum + f]
}

#[inline(always)]
fn output_of_four<R: Real>([a, b, c, d, e, f]: [R; 6]) -> [R; 4] {
    let (even, odd, even2, odd2) = (b + c, b - c, d + e, d - e);
    [
        a + even + even2,
        odd * number(A) + odd2 * number(B),
        even * number(A2) + even2 * number(B2),
        odd * number(A * A2) + odd2 * number(B * B2) + f,
    ]
}

#[inline(always)]
fn gradient_of_four<R: Real>([a, b, c, d]: [R; 4]) -> [R; 6] {
    let (even, odd) = (a + c * number(A2), b * number(A) + d * number(A * A2));
    let (even2, odd2) = (a + c * number(B2), b * number(B) + d * number(B * B2));
    [a, even + odd, even - odd, even2 + odd2, even2 - odd2, d]
}

#[inline(always)]
fn weight_of_four<R: Real>([a, b, c]: [R; 3]) -> [R; 6] {
    let (even, odd) = (a * number(1.0 / AT_A) + c * number(A2 / AT_A), b * number(A / AT_A));
    let (even2, odd2) = (a * number(1.0 / AT_B) + c * number(B2 / AT_B), b * number(B / AT_B));
    [a * number(1.0 / AT_ZERO), even + odd, even - odd, even2 + odd2, even2 - odd2, c]
}

#[inline(always)]
fn weight_gradient_of_four<R: Real>([a, b, c, d, e, f]: [R; 6]) -> [R; 3] {
    let (even, odd, even2, odd2) = (b + c, b - c, d + e, d - e);
    [
        a * number(1.0 / AT_ZERO) + even * number(1.0 / AT_A) + even2 * number(1.0 / AT_B),
        odd * number(A / AT_A) + odd2 * number(B / AT_B),
        even * number(A2 / AT_A) + even2 * number(B2 / AT_B) + f,
    ]
}
