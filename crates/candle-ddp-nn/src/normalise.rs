//! Normalising each channel with given statistics, of one batch or of the batches of all ranks.
use super::channels::{self, After, Gate};
use candle_core::{DType, Result, Shape, Storage, Tensor};
use candle_ddp_tensor::function::{Function, apply};
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks whose batches a [`BatchNorm`](crate::BatchNorm) normalises together in training. candle-ddp implements it for its process groups:
/// see `candle_ddp::nn::sync_batch_norm`.
pub trait BatchNormGroup: Debug + Send + Sync {
    /// The number of ranks. One rank needs none of the other methods.
    fn world_size(&self) -> usize;

    /// Called before anything is sent, with the input of the forward pass.
    ///
    /// # Errors
    /// The reason why the ranks cannot normalise this input together, such as its device.
    fn check(&self, x: &Tensor) -> Result<()>;

    /// Gathers `mine`, of shape (n), from all ranks into a tensor of shape (world size, n), in the order of the ranks.
    ///
    /// # Errors
    /// Those of the collective.
    fn all_gather(&self, mine: &Tensor) -> Result<Tensor>;

    /// Replaces `sums` by its sum over all ranks.
    ///
    /// # Errors
    /// Those of the collective.
    fn all_reduce(&self, sums: &Tensor) -> Result<()>;
}

/// What a batch is normalised with.
pub(super) struct Statistics {
    pub(super) mean: Tensor,
    pub(super) variance: Tensor,
    pub(super) batch: Option<Batch>,
}

/// For statistics that are those of the batch itself, and through which its gradient flows.
pub(super) struct Batch {
    /// How many values each channel has on all ranks.
    pub(super) count: Tensor,
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

/// (x − mean) × scale + shift, and the operation that follows. The arguments are x, weight, bias and, if there is one, z.
pub(super) struct Normalise {
    pub(super) x: Tensor,
    pub(super) mean: Tensor,
    pub(super) inverse_deviation: Tensor,
    /// weight × inverse_deviation
    pub(super) scale: Tensor,
    /// bias
    pub(super) shift: Tensor,
    /// None in evaluation, where the statistics are constants.
    pub(super) batch: Option<Batch>,
    pub(super) after: After,
    /// The dtypes of weight and bias.
    pub(super) parameters: [DType; 2],
}

impl Normalise {
    pub(super) fn apply(self, arguments: &[&Tensor]) -> Result<Tensor> {
        let result = self.forward()?;
        apply(arguments, result, self)
    }

    fn forward(&self) -> Result<(Storage, Shape)> {
        channels::normalise(&self.x, [&self.mean, &self.scale, &self.shift], &self.after)
    }
}

impl Function for Normalise {
    fn name(&self) -> &'static str {
        "batch-norm"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { x, mean, inverse_deviation, scale, shift, batch, after, parameters } = self;
        let (dy, gate) = match after {
            After::Nothing => (dy.clone(), None),
            After::Relu => (dy.clone(), Some(Gate { scale, shift })),
            After::AddRelu(z) => (channels::add_relu_gradient(x, z, dy, [mean, scale, shift])?, None),
        };
        let local = channels::gradient_sums(x, &dy, mean, gate)?;
        let d_bias = local.get(0)?;
        let d_weight = (local.get(1)? * inverse_deviation)?;
        let zeros = mean.zeros_like()?;
        let (a, b) = match batch {
            None => (zeros.clone(), zeros),
            Some(Batch { count, group, centred }) => {
                let all = match group {
                    None => local,
                    Some(group) => {
                        let all = local.copy()?.detach();
                        group.all_reduce(&all)?;
                        all
                    }
                };
                let means = all.broadcast_div(count)?;
                let b = (means.get(1)? * inverse_deviation.sqr()?)?;
                (if *centred { means.get(0)? } else { zeros }, b)
            }
        };
        let dx = channels::input_gradient(x, &dy, [mean, scale, &a, &b], gate)?;
        let [weight_dtype, bias_dtype] = *parameters;
        let mut gradients = vec![Some(dx), Some(d_weight.to_dtype(weight_dtype)?), Some(d_bias.to_dtype(bias_dtype)?)];
        if let After::AddRelu(_) = after {
            gradients.push(Some(dy));
        }
        Ok(gradients)
    }
}
