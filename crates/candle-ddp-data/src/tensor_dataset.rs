//! Datasets that are tensors in memory.
use super::batch::Batch;
use super::{Collate, Dataset};
use candle_core::{Device, Tensor};
use candle_ddp_state::seed::Generator;
use candle_ddp_state::{Error, Result};
use std::sync::Arc;

/// Samples that are the rows of tensors in memory, such as images and their labels: PyTorch's `TensorDataset`. `B` is a tensor
/// or a tuple, a list or a struct of tensors (see [`Batch`]), and so is a batch. The rows of a batch are taken together, by one
/// operation for each tensor.
///
/// The tensors may be on the device that trains, so that no batch has to be copied there.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ddp::data::{DataLoader, LoaderOptions, TensorDataset};
///
/// # candle_ddp::spawn(2, |pg| {
/// let images = Tensor::randn(0f32, 1., (100, 3, 8, 8), pg.device())?;
/// let labels = Tensor::zeros(100, candle_core::DType::U32, pg.device())?;
/// let data = TensorDataset::new((images, labels))?;
/// let loader = DataLoader::new(data, &pg, LoaderOptions { batch_size: 25, ..Default::default() })?;
/// for batch in &loader {
///     let (images, labels) = batch?;
///     assert_eq!((images.dims(), labels.dims()), (&[25, 3, 8, 8][..], &[25][..]));
/// }
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TensorDataset<B> {
    tensors: Arc<B>,
    len: usize,
    /// Some tensor is on a GPU.
    on_gpu: bool,
}

impl<B: Batch + Clone> TensorDataset<B> {
    /// A dataset of the rows of `tensors`, which must have the same first dimension.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they have not, if a tensor is a scalar, or if there is no tensor.
    pub fn new(tensors: B) -> Result<Self> {
        let mut lens = Vec::new();
        let mut on_gpu = false;
        tensors.clone().map_tensors(&mut |tensor| {
            let len = tensor.dims().first().copied();
            lens.push(len.ok_or_else(|| {
                Error::invalid("tensors", "each must have a first dimension, the samples; one is a scalar")
            })?);
            on_gpu |= !matches!(tensor.device(), Device::Cpu);
            Ok(tensor)
        })?;
        let Some(&len) = lens.first() else {
            return Err(Error::invalid("tensors", "there must be at least one tensor"));
        };
        if lens.iter().any(|other| *other != len) {
            let reason = format!("their first dimensions must be equal, the number of samples, but are {lens:?}");
            return Err(Error::invalid("tensors", reason));
        }
        Ok(Self { tensors: Arc::new(tensors), len, on_gpu })
    }
}

impl<B: Batch + Clone + Send + Sync> Dataset for TensorDataset<B> {
    type Sample = Row<B>;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<Row<B>> {
        if self.on_gpu && super::workers::is_worker() {
            let reason =
                "a worker thread must not compute on a GPU: for tensors that are on one, num_workers must be 0";
            return Err(Error::invalid("num_workers", reason));
        }
        Ok(Row { tensors: Arc::clone(&self.tensors), index })
    }
}

/// A sample of a [`TensorDataset`]: one row of each tensor.
#[derive(Debug, Clone)]
pub struct Row<B> {
    tensors: Arc<B>,
    index: usize,
}

impl<B: Batch + Clone> Row<B> {
    /// The row of each tensor, without its first dimension.
    ///
    /// # Errors
    /// candle's.
    pub fn tensors(&self) -> Result<B> {
        self.tensors.as_ref().clone().map_tensors(&mut |tensor| Ok(tensor.get(self.index)?))
    }
}

impl<B: Batch + Clone> Collate for Row<B> {
    type Batch = B;

    fn collate(rows: Vec<Self>) -> candle_core::Result<B> {
        let Some(first) = rows.first() else { candle_core::bail!("a batch needs at least one row") };
        if rows.iter().any(|row| !Arc::ptr_eq(&row.tensors, &first.tensors)) {
            candle_core::bail!("the rows of a batch must be of one TensorDataset")
        }
        let indices: Vec<i64> = rows.iter().map(|row| row.index as i64).collect();
        let indices = Tensor::new(indices, &Device::Cpu)?;
        let batch = first.tensors.as_ref().clone();
        Ok(batch.map_tensors(&mut |tensor| Ok(tensor.index_select(&indices.to_device(tensor.device())?, 0)?))?)
    }
}
