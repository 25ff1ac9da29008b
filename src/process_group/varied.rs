//! Collectives of tensors whose shapes differ.
use super::{ProcessGroup, graph};
use crate::backend::{self, Access, CallSite, P2pOp, Purpose};
use crate::cbor;
use crate::error::describe;
use crate::{Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Shape, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

static ALL_GATHER_VARIED: Purpose = Purpose::of("all_gather_varied");
static ALL_TO_ALL_VARIED: Purpose = Purpose::of("all_to_all_varied");

/// The description of a rank's tensors for the others: the dtype, the shape, and the dimension that may differ.
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
        let own = self.facts("all_gather_varied", tensor, dim);
        let gather = || {
            let shapes = self.shapes(self.exchange_facts(own)?)?;
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
        CallSite::during(Location::caller(), || ALL_GATHER_VARIED.during(gather))
    }

    /// Sends the first `rows[0]` rows of `tensor` to rank 0, the next `rows[1]` to rank 1, and so on, and returns the rows from all
    /// ranks, joined in rank order, and how many came from each: PyTorch's `all_to_all_single` with split sizes, of which each rank
    /// only knows its own. The ranks' tensors differ in nothing but their number of rows; parts may be empty. To send results
    /// back, pass them with the numbers that came.
    ///
    /// The numbers are exchanged first; then each pair of ranks exchanges its parts.
    ///
    /// ```
    /// # use candle_core::{DType, Tensor};
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(2, |pg| {
    ///     // Both send one row to rank 0 and two to rank 1.
    ///     let tokens = Tensor::ones((3, 4), DType::F32, pg.device())?;
    ///     let (received, rows) = pg.all_to_all_varied(&tokens, &[1, 2])?;
    ///     assert_eq!((received.dims(), rows), (&[2 + 2 * pg.rank(), 4][..], vec![1 + pg.rank(); 2]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If a rank's `rows` do not have a number for each rank, or their sum is not the number of rows, that rank gets
    /// [`Error::InvalidArgument`], and the others get [`Error::RankFailed`]. Otherwise as [`all_gather_varied`](Self::all_gather_varied).
    #[track_caller]
    pub fn all_to_all_varied(&self, tensor: &Tensor, rows: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        let own = self.facts("all_to_all_varied", tensor, 0).and_then(|facts| {
            let (world, has) = (self.world_size(), tensor.dims()[0]);
            if rows.len() == world && rows.iter().try_fold(0usize, |sum, &rows| sum.checked_add(rows)) == Some(has) {
                return Ok((facts, rows.to_vec()));
            }
            let reason =
                format!("it must have a number for each of the {world} ranks, with the sum {has}, not {rows:?}");
            Err(Error::invalid("rows", reason))
        });
        let exchange = || {
            let reports = self.exchange_facts(own)?;
            let (facts, sent): (Vec<Facts>, Vec<Vec<usize>>) = reports.into_iter().unzip();
            self.shapes(facts)?;
            let from: Vec<usize> = sent.iter().map(|rows| rows.get(self.rank()).copied().unwrap_or_default()).collect();
            let mut dims = tensor.dims().to_vec();
            dims[0] = from.iter().sum();
            let received = Tensor::zeros(dims, tensor.dtype(), self.device())?;
            let tensor = tensor.detach().contiguous()?;
            let (mut batch, mut start_to, mut start_from) = (Vec::new(), 0, 0);
            for (peer, (&to, &from)) in rows.iter().zip(&from).enumerate() {
                let is_empty = |rows: usize| rows == 0 || tensor.dims()[1..].contains(&0);
                if !is_empty(to) && peer == self.rank() {
                    received.slice_set(&tensor.narrow(0, start_to, to)?, 0, start_from)?;
                } else {
                    if !is_empty(to) {
                        batch.push(P2pOp::Send { tensor: tensor.narrow(0, start_to, to)?, peer });
                    }
                    if !is_empty(from) {
                        batch.push(P2pOp::Recv { tensor: received.narrow(0, start_from, from)?, peer });
                    }
                }
                start_to += to;
                start_from += from;
            }
            self.batch_isend_irecv(&batch)?.wait()?;
            Ok((received, from))
        };
        CallSite::during(Location::caller(), || ALL_TO_ALL_VARIED.during(exchange))
    }

    /// Every rank's facts, in rank order.
    fn exchange_facts<T: Serialize + DeserializeOwned>(&self, own: Result<T>) -> Result<Vec<T>> {
        let bytes = own.and_then(|facts| {
            cbor::encode(&facts).map_err(|reason| Error::invalid("tensor", format!("its shape: {reason}")))
        });
        let reports = self.gather_byte_reports(bytes.as_deref());
        bytes?;
        let reports = reports?.map_err(|(rank, reason)| self.rank_failed(rank, reason))?;
        let decode =
            |(rank, bytes): (usize, &Vec<u8>)| cbor::decode(bytes).map_err(|reason| self.rank_failed(rank, reason));
        reports.iter().enumerate().map(decode).collect()
    }

    fn facts(&self, operation: &'static str, tensor: &Tensor, dim: impl Dim) -> Result<Facts> {
        graph::check_tensor(self.rank(), operation, "tensor", tensor, Access::Read)?;
        let dim = dim.to_index(tensor.shape(), operation)?;
        let refuse =
            |reason: String| Error::InvalidTensor { rank: self.rank(), operation: operation.to_string(), reason };
        if !backend::takes(tensor.dtype()) {
            return Err(refuse(format!("its dtype is {}, which cannot be sent: convert it", tensor.dtype().as_str())));
        }
        backend::on_device(tensor, self.device()).map_err(|reason| refuse(format!("it {reason}")))?;
        Ok((tensor.dtype().as_str().to_string(), tensor.dims().to_vec(), dim))
    }

    /// The shapes of all ranks' tensors, which must be the same but for one dimension.
    fn shapes(&self, all: Vec<Facts>) -> Result<Vec<Shape>> {
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
