//! Where a data loader is, for checkpoints.
use super::{DistributedSampler, SamplerOptions};
use candle_core::Tensor;
use candle_ddp_state::Result;
use candle_ddp_state::state::{self, Loader, StateDict};
use std::collections::HashMap;

/// How far a training run has come in its data: the state of a [`DataLoader`](super::DataLoader), or of a loop
/// that reads the samples of a [`DistributedSampler`] itself, with [`indices`](Self::indices) and [`advance`](Self::advance). It
/// does not depend on the number of ranks or the batch size, so both may change. The dataset's length, and an order's weights,
/// lengths and options, may change only between two epochs, because the order of the samples changes with them.
///
/// The order of an epoch's samples does not depend on the number of ranks, which take turns in it. So all ranks together have
/// consumed the beginning of that order, and any number of ranks can continue from there: every sample of the epoch is seen,
/// also when ranks are lost in the middle of it.
///
/// ```
/// use candle_ddp::data::LoaderState;
///
/// // Of 10 samples, two ranks have consumed 4; three continue.
/// let begin = LoaderState { seed: 42, epoch: 3, dataset_len: 10, ..Default::default() };
/// let mut state = LoaderState { consumed: 4, ..begin };
/// let mut seen = Vec::new();
/// for rank in 0..3 {
///     seen.extend(state.indices(rank, 3)?);
/// }
/// seen.extend(begin.indices(0, 1)?.take(4));
/// seen.sort();
/// assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
///
/// state.advance(6);
/// assert_eq!((state.epoch, state.consumed), (4, 0));
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoaderState {
    /// The seed of the permutations and of the augmentation.
    pub seed: u64,
    /// The epoch.
    pub epoch: u64,
    /// How many samples of this epoch's order all ranks have consumed together. Batches that the loader has delivered count;
    /// batches that it has only read ahead do not. Padding does not count, so this is at most the length of the dataset.
    ///
    /// Each rank computes it from the number of its own batches and assumes that the other ranks have consumed as many. So ask
    /// for the state when they have, such as between two training steps. It is then the same on all ranks.
    pub consumed: usize,
    /// The number of samples that the dataset has.
    pub dataset_len: usize,
    /// A hash of the epoch's order in its middle: a run that resumes must have the same one. 0 if it is not known, as in a state
    /// that the program makes itself; then nothing is compared.
    pub order: u64,
}

impl LoaderState {
    /// The remaining indices of the epoch for rank `rank` of `world_size`: those of a shuffling and padding
    /// [`DistributedSampler`], [after](DistributedSampler::iter_after) the samples that have been consumed. If they cannot be
    /// split evenly, the head of the epoch is repeated.
    ///
    /// # Errors
    /// The errors of [`DistributedSampler::new`].
    pub fn indices(
        &self,
        rank: usize,
        world_size: usize,
    ) -> Result<impl ExactSizeIterator<Item = usize> + Clone + use<>> {
        let options = SamplerOptions { seed: self.seed, ..Default::default() };
        let mut sampler = DistributedSampler::new(self.dataset_len, rank, world_size, options)?;
        sampler.set_epoch(self.epoch);
        Ok(sampler.iter_after(self.consumed))
    }

    /// Counts samples that all ranks together have consumed, and begins the next epoch after the last one. In a training loop:
    /// the batch's number of samples times the world size.
    pub fn advance(&mut self, samples: usize) {
        self.consumed += samples;
        if self.consumed >= self.dataset_len {
            (self.epoch, self.consumed) = (self.epoch + 1, 0);
        }
    }
}

/// `seed`, `epoch`, `consumed`, `dataset_len` and `order`.
impl StateDict for LoaderState {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin("LoaderState")?;
        // All 64 bits, as a number that may be negative.
        dict.insert("seed".to_string(), state::list(&[self.seed as i64])?);
        dict.insert("epoch".to_string(), state::count(self.epoch)?);
        dict.insert("consumed".to_string(), state::count(self.consumed as u64)?);
        dict.insert("dataset_len".to_string(), state::count(self.dataset_len as u64)?);
        dict.insert("order".to_string(), state::list(&[self.order as i64])?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "LoaderState")?;
        let seed = loader.list::<i64>("seed", 1)?[0] as u64;
        let (epoch, consumed) = (loader.count("epoch")?, loader.count("consumed")? as usize);
        let dataset_len = loader.count("dataset_len")? as usize;
        let order = loader.list::<i64>("order", 1)?[0] as u64;
        loader.finish()?;
        *self = Self { seed, epoch, consumed, dataset_len, order };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_continues_where_it_was() {
        for (dataset_len, world_size) in [(10, 4), (7, 3), (2, 5), (12, 4)] {
            for rank in 0..world_size {
                let begin = LoaderState { seed: 5, epoch: 2, dataset_len, ..Default::default() };
                let options = SamplerOptions { seed: 5, ..Default::default() };
                let mut sampler = DistributedSampler::new(dataset_len, rank, world_size, options).unwrap();
                sampler.set_epoch(2);
                let whole: Vec<usize> = sampler.iter().collect();
                for steps in (0..=whole.len()).filter(|steps| steps * world_size <= dataset_len) {
                    let state = LoaderState { consumed: steps * world_size, ..begin };
                    let rest: Vec<usize> = state.indices(rank, world_size).unwrap().collect();
                    assert_eq!(
                        rest,
                        whole[steps..],
                        "{dataset_len} samples, rank {rank} of {world_size}, after {steps}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_next_epoch_begins_after_the_last_sample() {
        let mut state = LoaderState { seed: 1, epoch: 3, consumed: 8, dataset_len: 10, order: 0 };
        state.advance(1);
        assert_eq!((state.epoch, state.consumed), (3, 9));
        state.advance(3);
        assert_eq!((state.epoch, state.consumed), (4, 0));
    }
}
