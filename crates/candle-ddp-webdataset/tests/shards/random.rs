//! Random numbers that are the same in every run.
use candle_ddp_rendezvous::hash::content_64;

/// Hashes of the numbers after a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 += 1;
        content_64(&self.0.to_le_bytes()) % end
    }
}
