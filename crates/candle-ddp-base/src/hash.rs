//! Hashes that are the same in every process and every version, unlike the standard library's: FNV-1a, and one for much content.

/// The 32-bit hash.
pub const fn fnv1a_32(bytes: &[u8]) -> u32 {
    let (mut hash, mut index) = (0x811c_9dc5_u32, 0);
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u32).wrapping_mul(0x0100_0193);
        index += 1;
    }
    hash
}

/// The 64-bit hash.
pub const fn fnv1a_64(bytes: &[u8]) -> u64 {
    let (mut hash, mut index) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0100_0000_01b3);
        index += 1;
    }
    hash
}

/// The number of bytes of which [`content_64`] combines the [hashes](content_part).
pub const CONTENT_PART: usize = 1 << 20;

/// A 64-bit hash of many bytes, at about the speed of memory. It finds accidental differences; it does not protect
/// against someone who constructs two contents with the same hash.
pub fn content_64(bytes: &[u8]) -> u64 {
    // Content of no bytes has one part as well.
    let (first, rest) = bytes.split_at(bytes.len().min(CONTENT_PART));
    content_of_parts(bytes.len(), std::iter::once(first).chain(rest.chunks(CONTENT_PART)).map(content_part))
}

/// The [hash](content_64) of content of `length` bytes, by those of its parts.
pub fn content_of_parts(length: usize, parts: impl IntoIterator<Item = u64>) -> u64 {
    parts.into_iter().fold(mix(length as u64), |hash, part| mix(hash ^ part))
}

/// The hash of at most [`CONTENT_PART`] bytes. Every step is a bijection of the lane, so a change of one word always changes the result.
pub fn content_part(bytes: &[u8]) -> u64 {
    const LANES: usize = 4;
    let mut lanes = [1, 2, 3, 4].map(mix);
    let (blocks, rest) = bytes.as_chunks::<{ LANES * 8 }>();
    let mut last = [0; LANES * 8];
    last[..rest.len()].copy_from_slice(rest);
    for block in blocks.iter().chain([&last]) {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            let word = u64::from_le_bytes(*word);
            *lane = (*lane ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
    }
    lanes.into_iter().fold(mix(rest.len() as u64), |hash, lane| mix(hash ^ lane))
}

/// SplitMix64's finaliser.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' test suite.
    #[test]
    fn the_authors_known_answers() {
        assert_eq!([fnv1a_32(b""), fnv1a_32(b"a"), fnv1a_32(b"foobar")], [0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968]);
        let expected = [0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c, 0x8594_4171_f739_67e8];
        assert_eq!([fnv1a_64(b""), fnv1a_64(b"a"), fnv1a_64(b"foobar")], expected);
    }

    #[test]
    fn every_bit_and_every_length_counts() {
        let mut seen = std::collections::HashSet::new();
        for length in 0..100 {
            assert!(seen.insert(content_64(&vec![0; length])), "{length}");
        }
        // More than one part, the last of which is not a whole block.
        let mut bytes = vec![0; (2 << 20) + 13];
        for place in [0, 7, 31, 32, (1 << 20) - 1, 1 << 20, (2 << 20) + 3, (2 << 20) + 12] {
            for bit in 0..8 {
                bytes[place] = 1 << bit;
                assert!(seen.insert(content_64(&bytes)), "bit {bit} of byte {place}");
            }
            bytes[place] = 0;
        }
        // Parts that change places change the hash too.
        let halves = |a: u8, b: u8| [vec![a; 1 << 20], vec![b; 1 << 20]].concat();
        assert_ne!(content_64(&halves(1, 2)), content_64(&halves(2, 1)));
    }
}
