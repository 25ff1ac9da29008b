//! Random numbers from seeds: a [`Generator`] whose state can be saved, reproducible initial values, and seeds that
//! differ from rank to rank.
mod init;
mod state;

#[doc(no_inline)]
pub use candle_ddp_tensor::seed::{Generator, default_generator};
pub use init::get;
pub use init::{init, var_builder};

use crate::{Result, panic};
use candle_core::Device;

/// Gives this rank its own seed, `base + rank`, so that dropout and augmentation differ from rank to rank as they
/// should, and returns the seed for other crates' generators. ([`Generator::for_rank`] takes `base` and the rank, and
/// a checkpoint keeps it for each rank.)
///
/// Call it once the model is built, in each process, with the same `base` everywhere and `pg.rank()` (the rank in the
/// job, not on the host). With the same `base` and the same number of ranks, runs are reproducible as far as the
/// generators allow:
///
/// - **The process's generator** ([`default_generator`]), from which `nn::Dropout::new` draws, becomes that of
///   [`Generator::for_rank`]. If it is saved in a checkpoint, it continues after a restart.
/// - **On a GPU** candle's generator is seeded. It would otherwise start with the same number on every rank, and all
///   ranks would drop the same units. Its state cannot be saved: with the same `base`, a resumed run draws the same
///   numbers as at its beginning, so let `base` depend on the step.
/// - **On the CPU** candle draws from a generator that the operating system seeds for each thread, and that a program
///   cannot seed. Ranks differ without further action, but candle's dropout masks and initial values are not
///   reproducible. `DdpOptions::init_seed` and [`var_builder`] give reproducible initial values, and a [`Generator`] gives
///   reproducible random numbers.
/// - **Not seeded** is the `DistributedSampler`: its seed must be the same on all ranks.
///
/// # Errors
/// Returns the device's errors.
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

    /// Once candle can seed its CPU generator, [`seed_everything`] has to do so.
    #[test]
    fn candle_cannot_seed_the_cpu() {
        assert!(Device::Cpu.set_seed(1).is_err());
    }
}
