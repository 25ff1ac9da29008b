//! Shards as a dataset.
use super::{Dataset, TarSample, TarShards};
use candle_ddp_state::Result;
use candle_ddp_state::seed::Generator;

impl Dataset for TarShards {
    type Sample = TarSample;

    fn len(&self) -> usize {
        self.num_samples()
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<TarSample> {
        Ok(self.sample(index)?)
    }
}
