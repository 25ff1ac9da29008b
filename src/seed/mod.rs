//! Random numbers from seeds: a [`Generator`] whose state can be saved, initial values that can be repeated, and seeds that
//! differ from rank to rank.
mod init;
mod state;

#[doc(inline)]
pub use candle_ddp_tensor::seed::{Draw, Generator, default_generator};
pub(crate) use init::get;
pub use init::{init, var_builder};

use crate::{Result, panic};
use candle_core::Device;

/// Gives this rank its own seed, `base + rank`, so that dropout and augmentation differ from rank to rank as they should;
/// returns it for generators of other crates. ([`Generator::for_rank`] takes `base` and the rank, and a checkpoint keeps it for
/// each rank.)
///
/// Call it once the model is built, in each process, with the same `base` everywhere and `pg.rank()` (the rank in the
/// job, not on the host). With the same `base` and the same number of ranks, runs can be repeated as far as the
/// generators allow:
///
/// - **The process's generator** ([`default_generator`]), from which [`nn::Dropout::new`](crate::nn::Dropout::new) draws, is that of
///   [`Generator::for_rank`]. As a part of a checkpoint, it continues after a restart.
/// - **On a GPU** candle's generator is seeded. It would otherwise start with the same number on every rank, and all
///   ranks would drop the same units. Its state cannot be saved: with the same `base`, a run that is resumed draws what it
///   drew at its beginning, so let `base` depend on the step.
/// - **On the CPU** candle draws from a generator that the operating system seeds, for each thread anew, and which a
///   program cannot seed. Ranks differ by themselves, but candle's dropout masks and initial values cannot be repeated.
///   [`DdpOptions::init_seed`](crate::DdpOptions::init_seed) and [`var_builder`] give initial values that can, and a
///   [`Generator`] the program's own random numbers.
/// - **Not seeded** is the [`DistributedSampler`](crate::DistributedSampler): its seed must be the same on all ranks.
///
/// # Errors
/// The device's.
pub fn seed_everything(device: &Device, base: u64, rank: usize) -> Result<u64> {
    let seed = base.wrapping_add(rank as u64);
    *panic::lock(&default_generator()) = Generator::for_rank(base, rank);
    if !device.is_cpu() {
        device.set_seed(seed)?;
    }
    Ok(seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_own_seed() {
        let seeds: Vec<u64> = (0..3).map(|rank| seed_everything(&Device::Cpu, u64::MAX, rank).unwrap()).collect();
        assert_eq!(seeds, [u64::MAX, 0, 1]);
    }

    /// When candle learns to seed its CPU generator, [`seed_everything`] has to use it.
    #[test]
    fn candle_cannot_seed_the_cpu() {
        assert!(Device::Cpu.set_seed(1).is_err());
    }
}
