//! Gathers tensors whose shapes differ.
use super::{ProcessGroup, graph};
use crate::backend::{self, Access, CallSite, label};
use crate::cbor;
use crate::error::describe;
use crate::{Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Shape, Tensor};
use std::panic::Location;

/// What ranks must know of each other's tensors: the dtype, the shape, and the dimension that may differ.
type Facts = (String, Vec<usize>, usize);

impl ProcessGroup {
    /// Returns every rank's `tensor` in rank order on every rank. Their sizes may differ in dimension `dim`, and be 0
    /// there; `Tensor::cat(&all, dim)` joins them. (PyTorch's `all_gather` with a list of tensors of unequal shapes.)
    /// As in every collective, a tensor through which gradients flow is refused: pass `tensor.detach()`.
    ///
    /// Shapes are exchanged first; then all ranks send as many elements as the largest tensor has. The results share
    /// memory for `world_size` tensors of that size.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     let boxes = Tensor::ones((3 + pg.rank(), 4), DType::F32, pg.device())?;
    ///     let all = pg.all_gather_varied(&boxes, 0)?;
    ///     assert_eq!(Tensor::cat(&all, 0)?.dims(), [7, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank's tensor cannot be sent or has no dimension `dim`, that rank gets [`Error::InvalidTensor`] or candle's
    /// error, and the others get [`Error::RankFailed`]. If ranks differ in dtype, in another dimension or in `dim`, every
    /// rank gets [`Error::InvalidArgument`]. Also returns errors of the group.
    #[track_caller]
    pub fn all_gather_varied(&self, tensor: &Tensor, dim: impl Dim) -> Result<Vec<Tensor>> {
        let own = self.facts(tensor, dim);
        let gather = || {
            let bytes = own.and_then(|facts| {
                cbor::encode(&facts).map_err(|reason| Error::invalid("tensor", format!("its shape: {reason}")))
            });
            let reports = self.gather_byte_reports(bytes.as_deref());
            bytes?;
            let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
            let shapes = self.shapes(&reports)?;
            let longest = shapes.iter().map(Shape::elem_count).max().unwrap_or(0);
            let own = Tensor::zeros(longest, tensor.dtype(), self.device())?;
            if tensor.elem_count() > 0 {
                own.slice_set(&tensor.detach().contiguous()?.flatten_all()?, 0, 0)?;
            }
            let all = Tensor::zeros(longest * self.world_size(), tensor.dtype(), self.device())?;
            if longest > 0 {
                self.all_gather(&all, &own)?;
            }
            let part = |(rank, shape): (usize, &Shape)| {
                Ok(all.narrow(0, rank * longest, shape.elem_count())?.reshape(shape)?)
            };
            shapes.iter().enumerate().map(part).collect()
        };
        CallSite::during(Location::caller(), || label::ALL_GATHER_VARIED.during(gather))
    }

    fn facts(&self, tensor: &Tensor, dim: impl Dim) -> Result<Facts> {
        graph::check_tensor(self.rank(), "all_gather_varied", "tensor", tensor, Access::Read)?;
        let dim = dim.to_index(tensor.shape(), "all_gather_varied")?;
        let refuse = |reason: String| Error::InvalidTensor {
            rank: self.rank(),
            operation: "all_gather_varied".to_string(),
            reason,
        };
        if !backend::takes(tensor.dtype()) {
            return Err(refuse(format!("its dtype is {}, which cannot be sent: convert it", tensor.dtype().as_str())));
        }
        backend::on_device(tensor, self.device()).map_err(|reason| refuse(format!("it {reason}")))?;
        Ok((tensor.dtype().as_str().to_string(), tensor.dims().to_vec(), dim))
    }

    /// The shapes of all ranks' tensors, which must be the same but for one dimension.
    fn shapes(&self, reports: &[Vec<u8>]) -> Result<Vec<Shape>> {
        let decode = |(rank, bytes): (usize, &Vec<u8>)| {
            cbor::decode::<Facts>(bytes).map_err(|reason| self.rank_failed(rank, reason))
        };
        let all = reports.iter().enumerate().map(decode).collect::<Result<Vec<Facts>>>()?;
        let common = |(dtype, dims, dim): &Facts| {
            let mut dims = dims.clone();
            if let Some(size) = dims.get_mut(*dim) {
                *size = 0;
            }
            (dtype.clone(), dims, *dim)
        };
        if let Some(rank) = all.iter().position(|facts| common(facts) != common(&all[0])) {
            let text = |(dtype, dims, dim): &Facts| match dtype.parse::<DType>() {
                Ok(dtype) => format!("{} along dimension {dim}", describe(dtype, &Shape::from(dims.clone()))),
                Err(_) => format!("{dtype}{dims:?} along dimension {dim}"),
            };
            let reason = format!(
                "the ranks' tensors may differ only in the size of one dimension, the same on all ranks, but rank 0 has \
                 {}, and rank {rank} has {}",
                text(&all[0]),
                text(&all[rank])
            );
            return Err(Error::invalid("tensor", reason));
        }
        Ok(all.into_iter().map(|(_, dims, _)| Shape::from(dims)).collect())
    }
}
