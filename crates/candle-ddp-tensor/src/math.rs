//! Functions of f32 without branches and calls, so that loops over them can be vectorised.

/// e^x, accurate to two units in the last place, including subnormal results.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding this rounds to an integer, which then is in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has few bits, so its products with integers are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Beyond these bounds the results are infinite or zero. NaN stays.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    // The coefficients of Cephes' expf.
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_66;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // Multiplies by 2^n in two steps, since 2^n itself may not be a normal number.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    y * power(n >> 1) * power(n.wrapping_sub(n >> 1))
}

/// The standard normal distribution function, (1 + erf(x / √2)) / 2, accurate to 3e-7, relative to the result even if
/// that is small.
#[inline(always)]
pub(super) fn normal_cdf(x: f32) -> f32 {
    // erfc by the Chebyshev fit of Numerical Recipes, section 6.2.
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let p = 0.170_872_77;
    let p = p * t - 0.822_152_23;
    let p = p * t + 1.488_515_9;
    let p = p * t - 1.135_204;
    let p = p * t + 0.278_868_07;
    let p = p * t - 0.186_288_06;
    let p = p * t + 0.096_784_18;
    let p = p * t + 0.374_091_96;
    let p = p * t + 1.000_023_7;
    let p = p * t - 1.265_512_2;
    let tail = 0.5 * t * exp(p - z * z);
    if x > 0.0 { 1.0 - tail } else { tail }
}

/// The hyperbolic tangent, accurate to two units in the last place.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    // The coefficients of Cephes' tanhf. For small x, the other formula would cancel.
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 0.133_314_42;
    let p = p * z - 0.333_332_84;
    let small = p * z * x + x;
    let large = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { small } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_accurate() {
        for i in -120_000..=120_000 {
            let x = i as f32 / 1000.0;
            let (actual, expected) = (exp(x), f64::from(x).exp());
            if expected < f64::from(f32::MAX) {
                let error = (f64::from(actual) - expected).abs();
                assert!(error <= 2.5e-7 * expected + 1.5e-45, "exp({x}) = {actual}, not {expected}");
            } else {
                assert_eq!(actual, f32::INFINITY, "exp({x})");
            }
            let (actual, expected) = (tanh(x / 8.0), f64::from(x / 8.0).tanh());
            let error = (f64::from(actual) - expected).abs();
            assert!(error <= 2.5e-7 * expected.abs(), "tanh({x} / 8) = {actual}, not {expected}");
            if x.abs() < 12.0 {
                let (actual, expected) =
                    (normal_cdf(x), 0.5 * candle_core::cpu::erf::erfc_f64(-f64::from(x) / 2f64.sqrt()));
                // The rounding error of z² appears in the tail.
                let tolerance = 5e-7 * (1.0 + 0.5 * f64::from(x * x).min(150.0) * f64::from(u8::from(x < 0.0)));
                let error = (f64::from(actual) - expected).abs();
                assert!(error <= tolerance * expected + 1.5e-45, "Φ({x}) = {actual}, not {expected}");
            }
        }
    }

    #[test]
    fn infinities_and_nan() {
        assert_eq!([exp(f32::INFINITY), exp(f32::NEG_INFINITY)], [f32::INFINITY, 0.0]);
        assert_eq!([normal_cdf(f32::INFINITY), normal_cdf(f32::NEG_INFINITY)], [1.0, 0.0]);
        assert_eq!([tanh(f32::INFINITY), tanh(f32::NEG_INFINITY), tanh(1e-40)], [1.0, -1.0, 1e-40]);
        assert!(exp(f32::NAN).is_nan() && normal_cdf(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert_eq!([exp(0.0), normal_cdf(0.0)], [1.0, 0.5].map(|x: f32| if x == 0.5 { normal_cdf(-0.0) } else { x }));
    }
}
