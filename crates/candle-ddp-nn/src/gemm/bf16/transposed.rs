//! Blocks of 16 × 16 numbers in registers.
use super::LANES;
use std::arch::x86_64::*;

/// The columns of a block of 16 × 16.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transposed(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let (mut twos, mut fours, mut result) = (rows, rows, rows);
    for at in (0..LANES).step_by(2) {
        twos[at] = _mm512_unpacklo_epi32(rows[at], rows[at + 1]);
        twos[at + 1] = _mm512_unpackhi_epi32(rows[at], rows[at + 1]);
    }
    // Afterwards, part l (of 128 bits) of fours[4 g + j] has the elements of rows 4 g … 4 g + 3 in column 4 l + j.
    for at in (0..LANES).step_by(4) {
        for half in 0..2 {
            fours[at + 2 * half] = _mm512_unpacklo_epi64(twos[at + half], twos[at + 2 + half]);
            fours[at + 2 * half + 1] = _mm512_unpackhi_epi64(twos[at + half], twos[at + 2 + half]);
        }
    }
    // Transposes the parts.
    for at in 0..4 {
        let [a, b, c, d] = [0, 4, 8, 12].map(|group| fours[group + at]);
        let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (even2, odd2) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        result[at] = _mm512_shuffle_i32x4::<0x88>(even, even2);
        result[at + 4] = _mm512_shuffle_i32x4::<0x88>(odd, odd2);
        result[at + 8] = _mm512_shuffle_i32x4::<0xdd>(even, even2);
        result[at + 12] = _mm512_shuffle_i32x4::<0xdd>(odd, odd2);
    }
    result
}
