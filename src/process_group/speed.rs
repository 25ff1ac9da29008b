//! How fast the ranks of a group are, for shares of a step's work.
use super::ProcessGroup;
use crate::backend::Purpose;
use crate::panic::lock;
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};
use candle_core::Tensor;

static SPEED: Purpose = Purpose::of("share_by_speed");

impl ProcessGroup {
    /// Divides the micro-batches of [virtual ranks](crate::InitOptions::virtual_ranks) by the ranks' speeds: a rank that is twice as
    /// fast gets twice as many, so that none waits for a slow one. Results do not change by a bit. It holds for models and
    /// loaders that are made in this group afterwards. Every rank must call it, with its own speed in any unit, such as the
    /// measured [`micro_batches_per_second`](crate::DistributedDataParallel::micro_batches_per_second).
    ///
    /// ```
    /// # use candle_ddp::{DistributedDataParallel, SpawnOptions};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// # let options = SpawnOptions { world_size: 2, virtual_ranks: Some(8), ..Default::default() };
    /// candle_ddp::spawn_with(options, |pg| {
    ///     // Rank 0 has a GPU of the last generation.
    ///     pg.share_by_speed(if pg.rank() == 0 { 3. } else { 1. })?;
    ///     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
    ///     assert_eq!(ddp.micro_batches(), Some(if pg.rank() == 0 { 0..6 } else { 6..8 }));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank if a speed is not a finite number above 0, or the group has no virtual ranks; errors
    /// of the group.
    pub fn share_by_speed(&self, speed: f64) -> Result<()> {
        if self.virtual_ranks().is_none() {
            return Err(Error::invalid(
                "speed",
                "the group has no virtual ranks to share: set InitOptions.virtual_ranks",
            ));
        }
        let own = Tensor::new(&[speed], self.device())?;
        let all = Tensor::zeros(self.world_size(), own.dtype(), self.device())?;
        SPEED.during(|| self.all_gather(&all, &own))?;
        let speeds = all.to_vec1::<f64>()?;
        if let Some(rank) = speeds.iter().position(|speed| !speed.is_finite() || *speed <= 0.) {
            let reason = format!("it must be a finite number above 0, but is {} on rank {rank}", speeds[rank]);
            return Err(Error::invalid("speed", reason));
        }
        *lock(&self.0.speeds) = Some(speeds.into());
        Ok(())
    }

    /// Which micro-batches each rank computes, if the group has virtual ranks.
    pub(crate) fn micro_batches(&self) -> Option<VirtualRanks> {
        let speeds = lock(&self.0.speeds).clone();
        let deal = |count| VirtualRanks::new(count, self.rank(), self.world_size(), speeds.as_deref());
        self.virtual_ranks().map(deal)
    }
}
