//! Batches on their way to a GPU.
use super::Batch;
use super::workers::Workers;
use candle_core::{DType, Device, Tensor};
use candle_ddp_state::Result;
use candle_ddp_tensor::kernels::{Pinned, Upload, Uploader};
use std::sync::Arc;

/// A batch whose tensors are elsewhere, in the order in which the batch has them. Those for which there is `None` are in it.
struct Without<T, P> {
    batch: T,
    tensors: Vec<Option<P>>,
}

/// A batch in pinned memory.
pub(super) struct Staged<T>(Without<T, Pinned>);

/// A batch that is being copied.
struct Uploading<T>(Without<T, Upload>);

impl<T: Batch> Staged<T> {
    pub(super) fn new(batch: T, uploader: &Uploader) -> Result<Self> {
        let (mut tensors, placeholder) = (Vec::new(), Tensor::zeros(0, DType::U8, &Device::Cpu)?);
        let batch = batch.map_tensors(&mut |tensor| {
            let staged = uploader.stage(&tensor)?;
            let left = if staged.is_some() { placeholder.clone() } else { tensor };
            tensors.push(staged);
            Ok(left)
        })?;
        Ok(Self(Without { batch, tensors }))
    }

    fn begin(self, uploader: &Uploader) -> Result<Uploading<T>> {
        let Without { batch, tensors } = self.0;
        let begin = |tensor: Option<Pinned>| tensor.map(|tensor| uploader.begin(tensor)).transpose();
        Ok(Uploading(Without { batch, tensors: tensors.into_iter().map(begin).collect::<Result<_, _>>()? }))
    }
}

impl<T: Batch> Uploading<T> {
    fn finish(self, device: &Device) -> Result<T> {
        let Without { batch, tensors } = self.0;
        let mut tensors = tensors.into_iter();
        batch.map_tensors(&mut |tensor| match tensors.next() {
            Some(Some(upload)) => Ok(upload.finish()?),
            _ => Ok(tensor.to_device(device)?),
        })
    }
}

/// The batches of workers, copied to the GPU one batch ahead.
pub(super) struct Uploads<S, T> {
    workers: Workers<S, Staged<T>>,
    uploader: Arc<Uploader>,
    device: Device,
    ahead: Option<Result<Uploading<T>>>,
}

impl<S: Send + 'static, T: Batch + Send + 'static> Uploads<S, T> {
    pub(super) fn new(workers: Workers<S, Staged<T>>, uploader: Arc<Uploader>) -> Self {
        let device = Device::Cuda(uploader.device().clone());
        Self { workers, uploader, device, ahead: None }
    }

    /// Begins to copy the next batch, when there is one.
    fn begin(&mut self) -> Option<Result<Uploading<T>>> {
        let batch = self.workers.next()?;
        Some(batch.and_then(|batch| batch.begin(&self.uploader)))
    }
}

impl<S: Send + 'static, T: Batch + Send + 'static> Iterator for Uploads<S, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        let batch = match self.ahead.take() {
            Some(ahead) => ahead,
            None => self.begin()?,
        };
        // The GPU copies it while it computes on the one that is returned now. If it is not ready, nobody waits for it.
        if self.workers.is_ready() {
            self.ahead = self.begin();
        }
        Some(batch.and_then(|batch| batch.finish(&self.device)))
    }
}
