use crate::Result;
use crate::data::{DistributedSampler, SamplerIter, SamplerOptions};
use crate::state::{self, Loader, StateDict};
use candle_core::Tensor;
use std::collections::HashMap;

/// How far the training has come, as a part of a [`State`](super::State).
///
/// The order of an epoch's samples does not depend on the number of ranks, which take turns in it. So what all of them
/// together have consumed is the beginning of that order, and any number of ranks can go on from there: every sample of the
/// epoch is seen, also when ranks are lost in the middle of it.
///
/// ```
/// use candle_ddp::elastic::Progress;
///
/// // Of 10 samples, two ranks have consumed 4; three go on.
/// let mut progress = Progress { epoch: 3, samples: 4 };
/// let mut seen = Vec::new();
/// for rank in 0..3 {
///     seen.extend(progress.indices(10, 42, rank, 3)?);
/// }
/// seen.extend(Progress { epoch: 3, samples: 0 }.indices(10, 42, 0, 1)?.take(4));
/// seen.sort();
/// assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
///
/// progress.advance(6, 10);
/// assert_eq!(progress, Progress { epoch: 4, samples: 0 });
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The epoch that is being trained, from 0.
    pub epoch: usize,
    /// How many of its samples all ranks together have consumed.
    pub samples: usize,
}

impl Progress {
    /// This rank's part of what is left of the epoch, of a dataset of `len` samples: the indices of a shuffling and padding
    /// [`DistributedSampler`] with this seed, [after](DistributedSampler::iter_after) what has been consumed. Where it cannot
    /// be split evenly, the head of the epoch is repeated.
    ///
    /// # Errors
    /// Those of [`DistributedSampler::new`].
    pub fn indices(&self, len: usize, seed: u64, rank: usize, world_size: usize) -> Result<SamplerIter> {
        let options = SamplerOptions { seed, ..Default::default() };
        let mut sampler = DistributedSampler::new(len, world_size, rank, options)?;
        sampler.set_epoch(self.epoch);
        Ok(sampler.iter_after(self.samples))
    }

    /// Counts samples that all ranks together have consumed, of a dataset of `len`; begins the next epoch after the last one.
    /// In a training loop: the batch's number of samples times the world size.
    pub fn advance(&mut self, samples: usize, len: usize) {
        self.samples += samples;
        if self.samples >= len {
            *self = Self { epoch: self.epoch + 1, samples: 0 };
        }
    }
}

impl StateDict for Progress {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let mut dict = state::begin("Progress")?;
        dict.insert("epoch".to_string(), state::count(self.epoch as u64)?);
        dict.insert("samples".to_string(), state::count(self.samples as u64)?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "Progress")?;
        let (epoch, samples) = (loader.count("epoch")?, loader.count("samples")?);
        loader.finish()?;
        (self.epoch, self.samples) = (epoch as usize, samples as usize);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_goes_on_where_it_was() {
        for (len, world_size) in [(10, 4), (7, 3), (2, 5), (12, 4)] {
            for rank in 0..world_size {
                let mut sampler =
                    DistributedSampler::new(len, world_size, rank, SamplerOptions { seed: 5, ..Default::default() })
                        .unwrap();
                sampler.set_epoch(2);
                let whole: Vec<usize> = sampler.iter().collect();
                for steps in 0..=whole.len() {
                    let progress = Progress { epoch: 2, samples: (steps * world_size).min(len) };
                    if steps * world_size > len {
                        continue;
                    }
                    let rest: Vec<usize> = progress.indices(len, 5, rank, world_size).unwrap().collect();
                    assert_eq!(rest, whole[steps..], "{len} samples, rank {rank} of {world_size}, after {steps}");
                }
            }
        }
    }

    #[test]
    fn progress_comes_back() {
        let mut progress = Progress { epoch: 3, samples: 8 };
        let dict = progress.state_dict().unwrap();
        progress.advance(1, 10);
        assert_eq!(progress, Progress { epoch: 3, samples: 9 });
        progress.advance(3, 10);
        assert_eq!(progress, Progress { epoch: 4, samples: 0 });
        progress.load_state_dict(&dict).unwrap();
        assert_eq!(progress, Progress { epoch: 3, samples: 8 });
    }
}
