//! Shards as a dataset.
use super::{Dataset, TarSample, TarShards};
use crate::Result;
use crate::seed::Generator;
use candle_ddp_webdataset::Error;

impl Dataset for TarShards {
    type Sample = TarSample;

    fn len(&self) -> usize {
        self.num_samples()
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<TarSample> {
        Ok(self.sample(index)?)
    }
}

impl From<Error> for crate::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io { context, error } => Self::Io { context, error },
            Error::InvalidArgument { argument, reason } => Self::InvalidArgument { argument, reason },
            Error::DataFile { path, reason } => Self::DataFile { path, reason },
            error => candle_core::Error::Io(std::io::Error::other(error)).into(),
        }
    }
}
