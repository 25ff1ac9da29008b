//! States that are not the same on all ranks.
use super::state_dict::forward;
use super::{Dict, PutInPlace, Saved, Share, StateDict};
use crate::placement::Spread;
use crate::{Error, Result};

/// A state that differs between ranks: a `Checkpointer` saves every rank's own, and loads it on the same rank. Without this wrapper, a state that differs between ranks is an error
/// ([`Error::PartDiffers`](crate::Error::PartDiffers)).
///
/// A [`Generator`](crate::seed::Generator) of [`for_rank`](crate::seed::Generator::for_rank) does not need it.
///
/// ```
/// use candle_ddp::checkpoint::{Checkpointer, PerRank};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("per-rank-{}", std::process::id()));
/// candle_ddp::spawn(2, |pg| {
///     let mut seen = PerRank(10 * pg.rank() as u64); // samples that this rank has read
///     let mut checkpointer = Checkpointer::new(&pg, &folder, Default::default())?;
///     checkpointer.save(1, ("seen", &mut seen))?.wait()?;
///     seen.0 = 0;
///     checkpointer.load_latest(("seen", &mut seen))?;
///     assert_eq!(seen.0, 10 * pg.rank() as u64);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerRank<S>(pub S);

impl<S: StateDict> StateDict for PerRank<S> {
    forward!(self => self.0, self.0);

    fn share(&self) -> Result<Share> {
        Ok(self.0.share()?.or(Spread::Own))
    }

    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        let saved = match saved {
            Saved::Shards(mut shards) if !self.0.share()?.spread.is_per_rank() => {
                if shards.len() != world_size {
                    let reason = format!(
                        "each of {} ranks has saved its own state (PerRank), which {world_size} ranks cannot share out: resume \
                         with {} ranks, or do not load this part",
                        shards.len(),
                        shards.len()
                    );
                    return Err(Error::invalid("state", reason));
                }
                if rank >= world_size {
                    return Err(Error::RankOutOfRange { rank, world_size });
                }
                Saved::Whole(shards.swap_remove(rank))
            }
            saved => saved,
        };
        self.0.prepare(saved, rank, world_size)
    }
}

/// A state whose version on rank 0 is saved, and loaded on all ranks, even if it differs between ranks: the
/// variables of a model whose running statistics are not broadcast, for example. Nothing is compared.
///
/// [`PerRank`] keeps each rank's own state instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankZero<S>(pub S);

impl<S: StateDict> StateDict for RankZero<S> {
    forward!(self => self.0, self.0);

    /// A state that is spread over the ranks has no version of rank 0 alone.
    fn share(&self) -> Result<Share> {
        Ok(self.0.share()?.or(Spread::RankZero))
    }

    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        self.0.prepare(saved, rank, world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_gets_its_own_state_back_in_a_world_of_the_same_size() {
        let shards = || Saved::Shards((0..3).map(|rank| PerRank(rank as f64).share().unwrap().dict).collect());
        let mut value = PerRank(7.0);
        value.prepare(shards(), 2, 3).unwrap()().unwrap();
        assert_eq!(value.0, 2.0);
        let error = value.prepare(shards(), 0, 2).err().unwrap().to_string();
        assert!(error.contains("each of 3 ranks") && error.contains("2 ranks cannot share out"), "{error}");
        // Without the wrapper, the state has another kind.
        let error = 1.5f64.prepare(shards(), 0, 3).err().unwrap().to_string();
        assert!(error.contains("as 3 shards") && error.contains("PerRank"), "{error}");
        let spread = |state: &dyn StateDict| state.share().unwrap().spread;
        assert_eq!((spread(&RankZero(1.5)), spread(&PerRank(1.5))), (Spread::RankZero, Spread::Own));
        assert_eq!((spread(&RankZero(PerRank(1.5))), spread(&PerRank(RankZero(1.5)))), (Spread::Own, Spread::Own));
    }
}
