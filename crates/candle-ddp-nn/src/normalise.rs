//! Normalising each channel with given statistics, of one batch or of the batches of all ranks.
use super::channels::cuda::{self, Gated, Through};
use super::channels::{self, After, Gate, Passed};
use candle_core::{DType, Result, Shape, Tensor};
use candle_ddp_tensor::MemoryFormat;
use candle_ddp_tensor::function::{Function, apply_in, is_tracked};
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks whose batches a [`BatchNorm`](crate::BatchNorm) normalises together in training. candle-ddp implements it for its process groups:
/// see `candle_ddp::nn::sync_batch_norm`.
pub trait BatchNormGroup: Debug + Send + Sync {
    /// The number of ranks. One rank needs none of the other methods.
    fn world_size(&self) -> usize;

    /// Checks the input of the forward pass before anything is sent. Gradients end here: nothing is computed from `x`.
    ///
    /// # Errors
    /// Returns the reason why the ranks cannot normalise this input together, such as its device.
    fn check(&self, x: &Tensor) -> Result<()>;

    /// Gathers `mine`, of shape (n), from all ranks into a tensor of shape (world size, n), in the order of the ranks. Gradients
    /// end here: `mine` has no graph, and the layer computes the gradient of its input itself.
    ///
    /// # Errors
    /// The errors of the collective.
    fn all_gather(&self, mine: &Tensor) -> Result<Tensor>;

    /// Replaces `sums` by its sum over all ranks. Gradients end here, as in [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    /// The errors of the collective.
    fn all_reduce(&self, sums: &Tensor) -> Result<()>;
}

/// The statistics by which a batch is normalised.
pub(super) struct Statistics {
    pub(super) mean: Tensor,
    pub(super) inverse_deviation: Tensor,
    /// weight × inverse_deviation
    pub(super) scale: Tensor,
    /// bias
    pub(super) shift: Tensor,
    pub(super) batch: Option<Batch>,
}

/// Set if the statistics are the batch's own, so that gradients flow through them.
pub(super) struct Batch {
    /// The number of values of each channel on all ranks. None on a GPU if this is the only rank.
    pub(super) count: Option<Tensor>,
    pub(super) group: Option<Arc<dyn BatchNormGroup>>,
    pub(super) centred: bool,
}

/// The statistics of all ranks' batches together: means, variances and count.
pub(super) fn combine(group: &dyn BatchNormGroup, local: &Tensor, count: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let channels = local.dim(1)?;
    let mine = Tensor::cat(&[&local.flatten_all()?, count], 0)?;
    let all = group.all_gather(&mine)?;
    let (means, variances) = (all.narrow(1, 0, channels)?, all.narrow(1, channels, channels)?);
    let counts = all.narrow(1, 2 * channels, 1)?;
    let count = counts.sum(0)?;
    let mean = means.broadcast_mul(&counts)?.sum(0)?.broadcast_div(&count)?;
    let spread = (variances + means.broadcast_sub(&mean)?.sqr()?)?;
    let variance = spread.broadcast_mul(&counts)?.sum(0)?.broadcast_div(&count)?;
    Ok((mean, variance, count))
}

/// (x − mean) × scale + shift, and the operation that follows. The arguments are x, weight and bias, if there are any, and z, if
/// there is one.
pub(super) struct Normalise {
    /// The memory format of x and of the result.
    pub(super) format: MemoryFormat,
    pub(super) shape: Shape,
    /// [`channels::batch_of`] it.
    pub(super) x: Tensor,
    pub(super) mean: Tensor,
    pub(super) inverse_deviation: Tensor,
    /// weight × inverse_deviation
    pub(super) scale: Tensor,
    /// bias
    pub(super) shift: Tensor,
    /// None in evaluation, where the statistics are constants.
    pub(super) batch: Option<Batch>,
    pub(super) passed: Passed,
    /// The dtypes of weight and bias.
    pub(super) parameters: Option<[DType; 2]>,
}

impl Normalise {
    pub(super) fn apply(self, after: After, arguments: &[&Tensor]) -> Result<Tensor> {
        let may_be = arguments.iter().any(|argument| is_tracked(argument));
        let numbers = [&self.mean, &self.scale, &self.shift];
        let ((storage, _), passed) = channels::normalise(&self.x, numbers, after, may_be)?;
        apply_in(self.format, arguments, (storage, self.format.stored_shape(&self.shape)), Self { passed, ..self })
    }
}

impl Function for Normalise {
    fn name(&self) -> &'static str {
        "batch-norm"
    }

    fn owns(&self, argument: usize) -> bool {
        let added = if self.parameters.is_some() { 3 } else { 1 };
        self.x.device().is_cuda() && (argument == 0 || argument == added)
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { format, shape, x, mean, scale, shift, passed, .. } = self;
        let dy = &channels::batch_of(*format, dy)?;
        let gate = matches!(passed, Passed::Relu).then_some(Gate { scale, shift });
        let on = if x.device().is_cuda() { Self::slopes_on_gpu } else { Self::slopes_by_candle };
        let (dy, [a, b], of_parameters) = on(self, dy, gate)?;
        let dx = channels::input_gradient(x, &dy, [mean, scale, &a, &b], gate)?;
        let mut gradients = vec![Some(channels::tensor_of(*format, &dx, shape)?)];
        gradients.extend(of_parameters.into_iter().map(Some));
        if let Passed::AddRelu(_) | Passed::Mask(_) = passed {
            gradients.push(Some(channels::tensor_of(*format, &dy, shape)?));
        }
        Ok(gradients)
    }
}

impl Normalise {
    /// The gradient of the normalisation and what is added to it, except for the `gate`; the numbers a and b of
    /// [`channels::input_gradient`], and the gradients of weight and bias, if there are any.
    fn slopes_by_candle(&self, dy: &Tensor, gate: Option<Gate>) -> Result<(Tensor, [Tensor; 2], Vec<Tensor>)> {
        let Self { x, mean, inverse_deviation, scale, shift, batch, passed, parameters, .. } = self;
        let dy = match passed {
            Passed::AddRelu(z) => channels::add_relu_gradient(x, z, dy, [mean, scale, shift])?,
            _ => dy.clone(),
        };
        let local = channels::gradient_sums(x, &dy, mean, gate)?;
        let mut gradients = Vec::new();
        if let Some([weight, bias]) = *parameters {
            let (d_bias, d_weight) = (local.get(0)?, (local.get(1)? * inverse_deviation)?);
            gradients = vec![d_weight.to_dtype(weight)?, d_bias.to_dtype(bias)?];
        }
        let zeros = mean.zeros_like()?;
        let Some(Batch { count: Some(count), group, centred }) = batch else {
            return Ok((dy, [zeros.clone(), zeros], gradients));
        };
        let all = match group {
            None => local,
            Some(group) => {
                let all = local.copy()?.detach();
                group.all_reduce(&all)?;
                all
            }
        };
        let means = all.broadcast_div(count)?.broadcast_mul(scale)?;
        let b = (means.get(1)? * inverse_deviation.sqr()?)?;
        Ok((dy, [if *centred { means.get(0)? } else { zeros }, b], gradients))
    }

    fn slopes_on_gpu(&self, dy: &Tensor, gate: Option<Gate>) -> Result<(Tensor, [Tensor; 2], Vec<Tensor>)> {
        let Self { x, mean, inverse_deviation, scale, batch, passed, parameters, .. } = self;
        let through = batch.as_ref().map_or(Through::Constants, |batch| Through::Batch { centred: batch.centred });
        let channels = [mean, inverse_deviation, scale];
        let of = |gated| cuda::gradient_totals(x, dy, channels, gated, *parameters, through);
        let (dy, (rows, gradients)) = match passed {
            Passed::Mask(mask) => {
                let dz = cuda::unfilled_like(x)?;
                let totals = of(Gated::Mask(mask, &dz))?;
                (dz, totals)
            }
            _ => (dy.clone(), of(Gated::By(gate))?),
        };
        if let Some(Batch { count: Some(count), group: Some(group), .. }) = batch {
            group.all_reduce(&rows.narrow(0, 0, 2)?)?;
            cuda::replace_slopes(x, &rows, [inverse_deviation, scale], count, through)?;
        }
        Ok((dy, [rows.get(2)?, rows.get(3)?], gradients))
    }
}
