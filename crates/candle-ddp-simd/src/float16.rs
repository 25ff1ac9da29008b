//! Conversions of f16 and bf16 that give bit-identical results to the crate `half`, without branches and calls, so that
//! loops over them can be vectorised.
use half::{bf16, f16};

/// The same value.
#[inline(always)]
pub fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to the nearest bf16.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    // Rounds to nearest, ties to even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // Rounding must not turn a NaN into an infinity.
    let result = if value.is_nan() { bits | 0x40_0000 } else { rounded };
    bf16::from_bits((result >> 16) as u16)
}

/// The same value.
#[inline(always)]
pub fn f16_to_f32(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    // The exponent is 112 too small; the multiplication corrects it, for subnormal numbers too.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let result = if magnitude >= 0x7c00 << 13 { magnitude | 0xff << 23 } else { finite };
    f32::from_bits(result | sign)
}

/// Rounds to the nearest f16.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Rounds to nearest, ties to even; values that are too large become infinite.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 aligns the last bit of a subnormal f16 with the last bit of the f32, which rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let large = if magnitude > 0xff << 23 { 0x7e00 | ((magnitude >> 13) & 0x3ff) } else { 0x7c00 };
    let result = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    let result = if magnitude >= (127 + 16) << 23 { large } else { result };
    f16::from_bits((result | ((bits >> 16) & 0x8000)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_those_of_half() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            if !half.is_nan() && !brain.is_nan() {
                assert_eq!(f16_to_f32(half).to_bits(), half.to_f32().to_bits(), "f16 {bits:#x}");
                assert_eq!(bf16_to_f32(brain).to_bits(), brain.to_f32().to_bits(), "bf16 {bits:#x}");
            }
            assert_eq!((f16_to_f32(half).is_nan(), bf16_to_f32(brain).is_nan()), (half.is_nan(), brain.is_nan()));
            // Values at each number, next to it, and halfway to the next.
            for wide in [half.to_f32(), brain.to_f32()] {
                for more in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                    let bits = wide.to_bits().wrapping_add(more);
                    let wide = f32::from_bits(bits);
                    assert_eq!(f32_to_f16(wide).to_bits(), f16::from_f32(wide).to_bits(), "{bits:#x} to f16");
                    assert_eq!(f32_to_bf16(wide).to_bits(), bf16::from_f32(wide).to_bits(), "{bits:#x} to bf16");
                }
            }
        }
    }
}
