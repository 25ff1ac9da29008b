//! Collectives through which gradients flow.
use super::ProcessGroup;
use crate::backend::{CallSite, Purpose};
use crate::goes_with::Feature;
use crate::{Error, ReduceOp, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Shape, Tensor, Var};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::function::{Function, apply, is_grad_enabled, is_tracked};
use std::panic::Location;

static WITH_GRAD: Purpose = Purpose::of("a collective with a gradient");
static WITH_GRAD_BACKWARD: Purpose = Purpose::of("the gradient of a collective");

/// The collectives of a group as differentiable functions: `torch.distributed.nn.functional`. [`ProcessGroup::with_grad`] makes it.
///
/// A function takes and returns tensors of the graph, of a floating-point dtype. Backward, each rank's argument gets the sum of
/// what the losses of *all* ranks contribute. With DistributedDataParallel, which averages the gradients of parameters over ranks,
/// that is right without a factor:
///
/// - If each rank's loss is the mean over its own samples, with samples of all ranks as negatives, for example, the parameters get the
///   gradient of the mean over all samples.
/// - If all ranks calculate the same loss of all samples, they get the gradient of that loss.
///
/// **All ranks call the same functions in the same order, and use each result in the loss that they pass to `backward`**, at best in
/// the same model: the backward pass makes one collective for each. A rank that leaves one out makes the others wait until their
/// time-out. Arguments that need no gradient take part. Under [`no_grad`](crate::nn::no_grad) there is no backward pass. In
/// [`nn::checkpoint`](crate::nn::checkpoint), the functions run a second time, on all ranks.
///
/// The collectives run on a second communicator, like those of [`sync_batch_norm`](crate::nn::sync_batch_norm), so their order does not
/// depend on when DistributedDataParallel's buckets are complete.
///
/// ```
/// # use candle_core::{DType, Var};
/// # fn main() -> candle_ddp::Result<()> {
/// candle_ddp::spawn(2, |pg| {
///     let x = Var::ones((1, 3), DType::F32, pg.device())?;
///     let all = pg.with_grad()?.all_gather(&x)?;
///     assert_eq!(all.dims(), [2, 3]);
///     // Both ranks use both rows.
///     let grads = all.sum_all()?.backward()?;
///     assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[2.0; 3]]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct WithGrad {
    group: ProcessGroup,
    /// In a world of one, the group itself.
    companion: ProcessGroup,
}

impl ProcessGroup {
    /// The collectives of this group as differentiable functions. All ranks must call this: the first call connects them, and waits
    /// for all.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] in a group with [virtual ranks](crate::InitOptions::virtual_ranks), whose micro-batches a rank
    /// calculates one after the other; and an error if ranks do not arrive within the time-out.
    #[track_caller]
    pub fn with_grad(&self) -> Result<WithGrad> {
        let companion = match self.world_size() {
            1 => self.clone(),
            _ => CallSite::during(Location::caller(), || self.companion())?,
        };
        let functions = WithGrad { group: self.clone(), companion };
        functions.check()?;
        Ok(functions)
    }
}

impl WithGrad {
    /// The sum of all ranks' tensors, or their mean. The gradient is the sum, or the mean, of all ranks' gradients.
    ///
    /// # Errors
    /// As all the functions: the errors of the collective, and [`Error::InvalidArgument`] with virtual ranks and within
    /// [`join`](crate::DistributedDataParallel::join). Here also for another `op` than [`ReduceOp::Sum`] and [`ReduceOp::Avg`].
    #[track_caller]
    pub fn all_reduce(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        check_op(op)?;
        let reduce = move |group: &ProcessGroup, x: &Tensor| {
            let y = x.copy()?;
            group.all_reduce(&y, op).map(|()| y)
        };
        self.exchange("all_reduce", x, |group, x| Ok((reduce(group, x)?, reduce)))
    }

    /// All ranks' tensors, of the same shape, joined in their first dimension in rank order. The gradient is the sum of all ranks'
    /// gradients of this rank's part.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange("all_gather", x, |group, x| {
            let shape = x.shape().clone();
            let rows = if x.rank() == 0 { x.unsqueeze(0)? } else { x.clone() };
            let y = Tensor::zeros(first(rows.dims(), rows.dims()[0] * group.world_size()), x.dtype(), x.device())?;
            group.all_gather(&y, &rows)?;
            Ok((y, move |group: &ProcessGroup, dy: &Tensor| reduce_scatter(group, dy, &shape, ReduceOp::Sum)))
        })
    }

    /// Like [`all_gather`](Self::all_gather), for tensors that may differ in the size of dimension `dim`, in which they are joined.
    /// Shapes are exchanged first, for which a GPU's host waits.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce) and [`ProcessGroup::all_gather_varied`].
    #[track_caller]
    pub fn all_gather_varied(&self, x: &Tensor, dim: impl Dim) -> Result<Tensor> {
        self.exchange("all_gather_varied", x, |group, x| {
            let (dim, shape) = (dim.to_index(x.shape(), "all_gather_varied")?, x.shape().clone());
            let all = group.all_gather_varied(x, dim)?;
            let sizes: Vec<usize> = all.iter().map(|part| part.dims()[dim]).collect();
            let longest = all.iter().map(Tensor::elem_count).max().unwrap_or_default();
            let backward = move |group: &ProcessGroup, dy: &Tensor| {
                // The parts, each as long as the longest.
                let parts = Tensor::zeros(longest * sizes.len(), dy.dtype(), dy.device())?;
                let mut start = 0;
                for (rank, &size) in sizes.iter().enumerate() {
                    let part = dy.narrow(dim, start, size)?.contiguous()?.flatten_all()?;
                    if part.elem_count() > 0 {
                        parts.slice_set(&part, 0, rank * longest)?;
                    }
                    start += size;
                }
                let dx = reduce_scatter(group, &parts, &Shape::from(longest), ReduceOp::Sum)?;
                Ok(dx.narrow(0, 0, shape.elem_count())?.reshape(&shape)?)
            };
            Ok((Tensor::cat(&all, dim)?, backward))
        })
    }

    /// This rank's part of the sum, or of the mean, of all ranks' tensors, which have equally many rows for each rank. The gradient
    /// is all ranks' gradients joined, and for the mean divided by their number.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce); also [`Error::InvalidArgument`] if the rows cannot be divided.
    #[track_caller]
    pub fn reduce_scatter(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        check_op(op)?;
        self.exchange("reduce_scatter", x, |group, x| {
            let (rows, world) = (x.dims().first().copied().unwrap_or(1), group.world_size());
            if x.rank() == 0 || rows % world > 0 {
                let reason = format!(
                    "its first dimension must be a multiple of the number of ranks, {world}, not {:?}",
                    x.dims()
                );
                return Err(Error::invalid("the tensor of reduce_scatter", reason));
            }
            let y = reduce_scatter(group, x, &first(x.dims(), rows / world), op)?;
            let shape = x.shape().clone();
            let backward = move |group: &ProcessGroup, dy: &Tensor| {
                let dx = Tensor::zeros(&shape, dy.dtype(), dy.device())?;
                group.all_gather(&dx, dy)?;
                Ok(if op == ReduceOp::Avg { (dx / world as f64)? } else { dx })
            };
            Ok((y, backward))
        })
    }

    /// Rank `root`'s tensor; the others' have its shape and dtype. The gradient of rank `root`'s is the sum of all ranks' gradients, and
    /// that of the others is zero.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        self.exchange("broadcast", x, |group, x| {
            let y = x.copy()?;
            group.broadcast(&y, root)?;
            let backward = move |group: &ProcessGroup, dy: &Tensor| {
                let sum = dy.copy()?;
                group.reduce(&sum, root, ReduceOp::Sum)?;
                if group.rank() == root { Ok(sum) } else { Ok(dy.zeros_like()?) }
            };
            Ok((y, backward))
        })
    }

    /// Sends part `p` of the first dimension to rank `p`, and returns the parts from all ranks, joined in rank order. All have equally
    /// many rows. The gradient goes the other way.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_to_all(&self, x: &Tensor) -> Result<Tensor> {
        let exchange = |group: &ProcessGroup, x: &Tensor| {
            let y = x.zeros_like()?;
            group.all_to_all(&y, x).map(|()| y)
        };
        self.exchange("all_to_all", x, |group, x| Ok((exchange(group, x)?, exchange)))
    }

    /// Like [`all_to_all`](Self::all_to_all), with `rows[p]` rows for rank `p`, which may be 0. Also returns how many rows came from
    /// each rank. See [`ProcessGroup::all_to_all_varied`].
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce) and [`ProcessGroup::all_to_all_varied`].
    #[track_caller]
    pub fn all_to_all_varied(&self, x: &Tensor, rows: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        let mut received = Vec::new();
        let y = self.exchange("all_to_all_varied", x, |group, x| {
            let (y, from) = group.all_to_all_varied(x, rows)?;
            received.clone_from(&from);
            Ok((y, move |group: &ProcessGroup, dy: &Tensor| Ok(group.all_to_all_varied(dy, &from)?.0)))
        })?;
        Ok((y, received))
    }

    /// Sends a tensor to rank `peer`, which calls [`recv`](Self::recv), and returns zero, of shape (). **Add it to the loss, or pass it as
    /// `after`** to a later message: only through it does the backward pass reach the tensor, and receive its gradient.
    ///
    /// Like [`ProcessGroup::send`], it may wait until `peer` receives: two ranks that exchange tensors do not both send first. A rank that
    /// sends and receives what does not depend on each other passes the result of its earlier message as `after` to
    /// the later one. Their gradients then travel in the opposite order, as on the other ranks. In any other order, ranks might wait
    /// for each other.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn send(&self, x: &Tensor, peer: usize, after: Option<&Tensor>) -> Result<Tensor> {
        self.exchange_after("send", x, after, |group, x| {
            group.send(x, peer)?;
            let shape = x.shape().clone();
            let backward = move |group: &ProcessGroup, zero: &Tensor| {
                let dx = Tensor::zeros(&shape, zero.dtype(), zero.device())?;
                group.recv(&dx, peer).map(|()| dx)
            };
            Ok((Tensor::zeros((), x.dtype(), x.device())?, backward))
        })
    }

    /// Receives a tensor of this shape and dtype from rank `peer`, which calls [`send`](Self::send). Backward, its gradient is sent to
    /// `peer`. `after` is that of `send`.
    ///
    /// # Errors
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn recv(&self, shape: impl Into<Shape>, dtype: DType, peer: usize, after: Option<&Tensor>) -> Result<Tensor> {
        let place = Tensor::zeros(shape, dtype, self.group.device())?;
        self.exchange_after("recv", &place, after, |group, place| {
            let y = place.copy()?;
            group.recv(&y, peer)?;
            let backward = move |group: &ProcessGroup, dy: &Tensor| group.send(dy, peer).map(|()| dy.clone());
            Ok((y, backward))
        })
    }

    #[track_caller]
    fn exchange<B: Backward>(
        &self,
        name: &'static str,
        x: &Tensor,
        forward: impl FnOnce(&ProcessGroup, &Tensor) -> Result<(Tensor, B)>,
    ) -> Result<Tensor> {
        self.exchange_after(name, x, None, forward)
    }

    /// Runs `forward` with the values of `x`, which returns the result and the backward pass. That one ends before the backward pass of
    /// `after` begins.
    #[track_caller]
    fn exchange_after<B: Backward>(
        &self,
        name: &'static str,
        x: &Tensor,
        after: Option<&Tensor>,
        forward: impl FnOnce(&ProcessGroup, &Tensor) -> Result<(Tensor, B)>,
    ) -> Result<Tensor> {
        self.check()?;
        let at = Location::caller();
        let forward = || WITH_GRAD.during(|| forward(&self.companion, &x.detach().contiguous()?));
        let (y, backward) = CallSite::during(at, forward)?;
        if !is_grad_enabled() || !y.dtype().is_float() {
            return Ok(y);
        }
        let after = match after {
            Some(after) => Some(after.clone()),
            None if is_tracked(x) => None,
            // The other ranks may need a gradient from this one, even if its tensor needs none.
            None => Some(Var::zeros(1, y.dtype(), y.device())?.into_inner()),
        };
        let arguments: Vec<&Tensor> = std::iter::once(x).chain(&after).collect();
        let result = snapshot_tensor(&y, y.dtype())?;
        let group = self.companion.clone();
        let function = Exchange { name, group, at, after: after.as_ref().map(Tensor::detach), backward };
        Ok(apply(&arguments, result, function)?)
    }

    fn check(&self) -> Result<()> {
        if self.group.virtual_ranks().is_some() {
            Feature::WithGrad.goes_with(Feature::VirtualRanks)?;
        }
        if self.group.current_join().is_some() {
            Feature::WithGrad.goes_with(Feature::Join)?;
        }
        Ok(())
    }
}

/// The shape of tensors with `rows` rows.
fn first(dims: &[usize], rows: usize) -> Shape {
    let mut dims = dims.to_vec();
    dims[0] = rows;
    Shape::from(dims)
}

/// This rank's part, of shape `shape`, of the reduction of all ranks' `x`.
fn reduce_scatter(group: &ProcessGroup, x: &Tensor, shape: &Shape, op: ReduceOp) -> Result<Tensor> {
    let part = Tensor::zeros(shape.elem_count(), x.dtype(), x.device())?;
    group.reduce_scatter(&part, &x.flatten_all()?, op)?;
    Ok(part.reshape(shape)?)
}

fn check_op(op: ReduceOp) -> Result<()> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => Ok(()),
        _ => Err(Error::invalid("op", format!("a collective with a gradient must use Sum or Avg, not {op:?}"))),
    }
}

/// A function from the result's gradient to the argument's.
trait Backward: Fn(&ProcessGroup, &Tensor) -> Result<Tensor> + Send + Sync + 'static {}

impl<B: Fn(&ProcessGroup, &Tensor) -> Result<Tensor> + Send + Sync + 'static> Backward for B {}

struct Exchange<B> {
    name: &'static str,
    group: ProcessGroup,
    at: &'static Location<'static>,
    /// The result of an earlier function, whose backward pass begins once it has a gradient.
    after: Option<Tensor>,
    backward: B,
}

impl<B: Backward> Function for Exchange<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> candle_core::Result<Vec<Option<Tensor>>> {
        let backward = || WITH_GRAD_BACKWARD.during(|| (self.backward)(&self.group, gradient));
        let gradient = CallSite::during(self.at, backward)?;
        let of_after = self.after.iter().map(Tensor::zeros_like);
        std::iter::once(Ok(gradient)).chain(of_after).map(|gradient| gradient.map(Some)).collect()
    }
}
