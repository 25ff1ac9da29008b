//! Hashes by which ranks compare values and files.
use candle_ddp_base::hash::{CONTENT_PART, content_of_parts, content_part};
use rayon::prelude::*;

/// The hash [`content_64`](candle_ddp_base::hash::content_64), by rayon's threads.
pub fn content_64(bytes: &[u8]) -> u64 {
    let mut hash = ContentHash::default();
    hash.add(bytes);
    hash.finish()
}

/// The hash [`content_64`](candle_ddp_base::hash::content_64) of content that comes in parts. All but the last have a multiple of [`CONTENT_PART`] bytes.
#[derive(Debug, Default)]
pub(crate) struct ContentHash {
    length: usize,
    parts: Vec<u64>,
}

impl ContentHash {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        match bytes.len() {
            0 => {}
            1..=CONTENT_PART => self.parts.push(content_part(bytes)),
            _ => self.parts.par_extend(bytes.par_chunks(CONTENT_PART).map(content_part)),
        }
    }

    pub(crate) fn finish(self) -> u64 {
        // Content of no bytes has one part as well.
        let none = self.parts.is_empty().then(|| content_part(&[]));
        content_of_parts(self.length, self.parts.into_iter().chain(none))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_compute_the_same_hash() {
        let bytes: Vec<u8> = (0..3 * CONTENT_PART + 13).map(|at| (at % 251) as u8).collect();
        for length in [0, 1, CONTENT_PART, CONTENT_PART + 1, bytes.len()] {
            assert_eq!(content_64(&bytes[..length]), candle_ddp_base::hash::content_64(&bytes[..length]), "{length}");
            let mut parts = ContentHash::default();
            bytes[..length].chunks(2 * CONTENT_PART).for_each(|part| parts.add(part));
            assert_eq!(parts.finish(), candle_ddp_base::hash::content_64(&bytes[..length]), "{length}");
        }
    }
}
