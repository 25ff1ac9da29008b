//! Philox 4x32-10: random numbers as a function of a key and a counter.
//!
//! J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. PyTorch and cuRAND use it on GPUs. Each number
//! follows from its place alone, so that threads, and a backward pass, can compute any part of a sequence.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The four numbers of a counter.
#[inline]
pub(super) fn block(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    let product = |index: usize, factor: u32| u64::from(MULTIPLIERS[index]) * u64::from(factor);
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        }
        let [a, b] = [product(0, counter[0]), product(1, counter[2])];
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library, Random123.
    #[test]
    fn the_authors_known_answers() {
        assert_eq!(block([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(block([!0; 2], [!0; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        // Digits of pi.
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(block([0xa409_3822, 0x299f_31d0], counter), expected);
    }
}
