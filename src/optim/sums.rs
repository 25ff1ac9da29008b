//! Sums over the elements of gradients and parameters.
use crate::tensor::{Element, Real};
use candle_core::WithDType;

/// Sums of this many terms use the elements' own arithmetic and are added up in f64.
const BLOCK: usize = 2048;
/// The number of sums computed side by side, so that the compiler can use vector instructions.
const LANES: usize = 16;

/// The sum of the squares.
#[inline(always)]
pub(super) fn sum_of_squares<E: Element>(values: &[E]) -> f64 {
    let mut total = 0f64;
    for block in values.chunks(BLOCK) {
        let mut lanes = [E::Real::default(); LANES];
        let mut vectors = block.chunks_exact(LANES);
        for vector in vectors.by_ref() {
            for (lane, value) in lanes.iter_mut().zip(vector) {
                let value = value.widen();
                *lane += value * value;
            }
        }
        let rest = vectors.remainder().iter().map(|value| (value.widen() * value.widen()).to_f64());
        total += lanes.into_iter().map(WithDType::to_f64).sum::<f64>() + rest.sum::<f64>();
    }
    total
}

/// The largest absolute value; NaN if any value is NaN, as in PyTorch.
pub(super) fn largest<E: Element>(values: &[E]) -> f64 {
    let mut largest = 0f64;
    for value in values {
        let value = value.widen().abs().to_f64();
        if value > largest || value.is_nan() {
            largest = value;
            if value.is_nan() {
                break;
            }
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn sums_are_exact_for_small_integers_of_any_number() {
        for count in [0, 1, 15, 16, 17, 2047, 2048, 2049, 10_000] {
            let values: Vec<f32> = (0..count).map(|index| (index % 3) as f32).collect();
            let expected: f64 = values.iter().map(|value| f64::from(value * value)).sum();
            assert_eq!(sum_of_squares(&values), expected, "{count}");
            let halves: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            assert_eq!(sum_of_squares(&halves), expected, "{count}");
        }
    }
}
