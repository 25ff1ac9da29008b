//! Hashes that are the same in every process and every version, unlike the standard library's: FNV-1a.

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
}
