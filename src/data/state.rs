//! Where a data loader is, for checkpoints.
use crate::Result;
use crate::state::{self, Loader, StateDict};
use candle_core::Tensor;
use std::collections::HashMap;

/// How far a training run has come in its data. It says nothing of ranks and batches, so that it fits any number and any
/// size of them. It fits a dataset of another length between two epochs only, since the order of the samples is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoaderState {
    /// The seed of the permutations and of the augmentation.
    pub seed: u64,
    /// The epoch.
    pub epoch: usize,
    /// How many samples of this epoch's order all ranks have consumed together: those of the batches that the loader has
    /// delivered, not of those that it has read ahead. Padding does not count, so that this is at most the length of
    /// the dataset.
    ///
    /// Each rank computes it from the number of its batches, in the belief that the other ranks have consumed as many: ask for
    /// the state when all of them have, such as between two training steps. It is then the same on all ranks.
    pub consumed: usize,
    /// How many samples the dataset has.
    pub dataset_len: usize,
}

/// `seed`, `epoch`, `consumed` and `dataset_len`.
impl StateDict for LoaderState {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin("LoaderState")?;
        // All 64 bits, as a number that may be negative.
        dict.insert("seed".to_string(), state::list(&[self.seed as i64])?);
        dict.insert("epoch".to_string(), state::count(self.epoch as u64)?);
        dict.insert("consumed".to_string(), state::count(self.consumed as u64)?);
        dict.insert("dataset_len".to_string(), state::count(self.dataset_len as u64)?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "LoaderState")?;
        let seed = loader.list::<i64>("seed", 1)?[0] as u64;
        let (epoch, consumed) = (loader.count("epoch")? as usize, loader.count("consumed")? as usize);
        let dataset_len = loader.count("dataset_len")? as usize;
        loader.finish()?;
        *self = Self { seed, epoch, consumed, dataset_len };
        Ok(())
    }
}
