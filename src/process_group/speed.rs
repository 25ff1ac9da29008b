//! How fast the ranks of a group are, for shares of a step's work.
use super::ProcessGroup;
use crate::backend::label;
use crate::panic::lock;
use crate::{Error, Result};
use candle_core::Tensor;
use std::sync::Arc;

impl ProcessGroup {
    /// Divides the micro-batches of [virtual ranks](crate::DdpOptions::virtual_ranks) by the ranks' speeds: a rank that is twice as
    /// fast gets twice as many, so that none waits for a slow one. Results do not change by a bit. It holds for models and
    /// loaders that are made in this group afterwards. Every rank must call it, with its own speed in any unit, such as the
    /// measured [`micro_batches_per_second`](crate::DistributedDataParallel::micro_batches_per_second).
    ///
    /// ```
    /// # use candle_ddp::{DdpOptions, DistributedDataParallel};
    /// # use candle_nn::{VarMap, linear};
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     // Rank 0 has a GPU of the last generation.
    ///     pg.share_by_speed(if pg.rank() == 0 { 3. } else { 1. })?;
    ///     let options = DdpOptions { virtual_ranks: Some(8), ..Default::default() };
    ///     let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
    ///     assert_eq!(ddp.micro_batches(), Some(if pg.rank() == 0 { 0..6 } else { 6..8 }));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank if a speed is not a finite number above 0; errors of the group.
    pub fn share_by_speed(&self, speed: f64) -> Result<()> {
        let own = Tensor::new(&[speed], self.device())?;
        let all = Tensor::zeros(self.world_size(), own.dtype(), self.device())?;
        label::SPEED.during(|| self.all_gather(&all, &own))?;
        let speeds = all.to_vec1::<f64>()?;
        if let Some(rank) = speeds.iter().position(|speed| !speed.is_finite() || *speed <= 0.) {
            let reason = format!("it must be a finite number above 0, but is {} on rank {rank}", speeds[rank]);
            return Err(Error::invalid("speed", reason));
        }
        *lock(&self.0.speeds) = Some(speeds.into());
        Ok(())
    }

    /// The ranks' speeds, if they are known.
    pub(crate) fn speeds(&self) -> Option<Arc<[f64]>> {
        lock(&self.0.speeds).clone()
    }
}
