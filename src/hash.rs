//! Hashes by which ranks compare values and files.
use candle_ddp_rendezvous::hash::{self, CONTENT_PART, content_of_parts, content_part};
use rayon::prelude::*;

/// The hash [`content_64`](hash::content_64), by rayon's threads.
pub(crate) fn content_64(bytes: &[u8]) -> u64 {
    if bytes.len() <= CONTENT_PART {
        return hash::content_64(bytes);
    }
    let parts: Vec<u64> = bytes.par_chunks(CONTENT_PART).map(content_part).collect();
    content_of_parts(bytes.len(), parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_compute_the_same_hash() {
        let bytes: Vec<u8> = (0..3 * CONTENT_PART + 13).map(|at| (at % 251) as u8).collect();
        for length in [0, 1, CONTENT_PART, CONTENT_PART + 1, bytes.len()] {
            assert_eq!(content_64(&bytes[..length]), hash::content_64(&bytes[..length]), "{length}");
        }
    }
}
