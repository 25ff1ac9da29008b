//! Each rank's part of a dataset, in batches: [`DataLoader`]. The order is the [`DistributedSampler`]'s, or another
//! [`Order`], such as [`WeightedSampler`] and [`LengthBatches`]. [`TensorDataset`] has its samples in memory, [`TarShards`] in tar
//! files, and [`randperm`] is PyTorch's permutation. `docs/data.md` shows how they are used.
use crate::backend::Purpose;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::Device;
#[doc(no_inline)]
pub use candle_ddp_data::*;
use std::ops::Range;
use std::time::Duration;

static LOADER_NEW: Purpose = Purpose::of("DataLoader::new");

impl candle_ddp_data::LoaderGroup for ProcessGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn device(&self) -> &Device {
        self.device()
    }

    fn virtual_ranks(&self) -> Option<usize> {
        self.virtual_ranks()
    }

    fn micro_batches(&self) -> Option<Range<usize>> {
        self.micro_batches().map(|ranks| ranks.own())
    }

    fn timeout(&self) -> Duration {
        self.timeout()
    }

    fn compare_loaders(&self, description: std::result::Result<String, &Error>) -> Result<Option<(usize, String)>> {
        LOADER_NEW.during(|| self.compare(description, "it could not make its DataLoader"))
    }
}
