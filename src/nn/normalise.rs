//! Batch normalisation of the local batch, or of the batches of all ranks together: what its layers share.
use super::channels::{self, After, Gate};
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::tensor::function::{Function, apply};
use crate::{Error, ReduceOp};
use candle_core::{DType, Result, Shape, Storage, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, VarBuilder};

/// What both kinds of batch normalisation have.
#[derive(Clone, Debug)]
pub(super) struct Core {
    pub(super) running_mean: Var,
    pub(super) running_var: Var,
    pub(super) weight_and_bias: Option<(Tensor, Tensor)>,
    pub(super) config: BatchNormConfig,
    /// What messages call the input.
    input: &'static str,
}

/// What the caller wants done in the same pass.
pub(super) enum Fused<'a> {
    Nothing,
    Relu,
    AddRelu(&'a Tensor),
}

impl Core {
    pub(super) fn new(
        input: &'static str,
        num_features: usize,
        config: BatchNormConfig,
        vb: &VarBuilder,
    ) -> Result<Self> {
        let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
        // In this order, which is candle's: under DDP it numbers the parameters.
        let statistics = [get("running_mean", 0.)?, get("running_var", 1.)?];
        let weight_and_bias = if config.affine { Some((get("weight", 1.)?, get("bias", 0.)?)) } else { None };
        Self::of(input, num_features, config, statistics, weight_and_bias)
    }

    pub(super) fn of(
        input: &'static str,
        num_features: usize,
        config: BatchNormConfig,
        [running_mean, running_var]: [Tensor; 2],
        weight_and_bias: Option<(Tensor, Tensor)>,
    ) -> Result<Self> {
        if config.eps < 0. {
            return Err(Error::invalid("eps", format!("{} is negative", config.eps)).into());
        }
        if !(0. ..=1.).contains(&config.momentum) {
            return Err(Error::invalid("momentum", format!("{} is not between 0 and 1", config.momentum)).into());
        }
        let parameters = weight_and_bias.iter().flat_map(|(weight, bias)| [("weight", weight), ("bias", bias)]);
        let statistics = [("running_mean", &running_mean), ("running_var", &running_var)];
        for (name, tensor) in statistics.into_iter().chain(parameters) {
            if tensor.dims() != [num_features] {
                let is = crate::error::describe(tensor.dtype(), tensor.shape());
                return Err(Error::invalid(name, format!("it is {is}, where ({num_features}) is expected")).into());
            }
        }
        // `from_tensor` shares a variable.
        let (running_mean, running_var) = (Var::from_tensor(&running_mean)?, Var::from_tensor(&running_var)?);
        Ok(Self { running_mean, running_var, weight_and_bias, config, input })
    }

    /// With a `group`, the statistics are those of all its ranks' batches.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        train: bool,
        group: Option<&ProcessGroup>,
        fused: Fused,
    ) -> Result<Tensor> {
        let features = self.running_mean.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != features {
            let is = crate::error::describe(x.dtype(), x.shape());
            let reason = format!("it is {is}, where (N, {features}) or (N, {features}, …) is expected");
            return Err(Error::invalid(self.input, reason).into());
        }
        if let Fused::AddRelu(z) = fused
            && (z.shape() != x.shape() || z.dtype() != x.dtype() || !z.device().same_device(x.device()))
        {
            let describe = |t: &Tensor| crate::error::describe(t.dtype(), t.shape());
            let reason =
                format!("it is {} on {:?}, where the input is {}", describe(z), z.device().location(), describe(x));
            return Err(Error::invalid("what is added to batch normalisation", reason).into());
        }
        let x = &x.contiguous()?;
        let acc = channels::accumulator(x.dtype());
        let Statistics { mean, variance, batch } = if train {
            self.batch_statistics(x, group)?
        } else {
            let running = |var: &Var| var.as_detached_tensor().to_dtype(acc);
            Statistics { mean: running(&self.running_mean)?, variance: running(&self.running_var)?, batch: None }
        };
        let inverse_deviation = (variance + self.config.eps)?.sqrt()?.recip()?;
        let (weight, bias) = match &self.weight_and_bias {
            Some((weight, bias)) => (weight.clone(), bias.clone()),
            None => (mean.ones_like()?, mean.zeros_like()?),
        };
        let scale = (weight.detach().to_dtype(acc)? * &inverse_deviation)?.contiguous()?;
        let shift = bias.detach().to_dtype(acc)?.contiguous()?;
        let normalise = |after| Normalise {
            x: x.detach(),
            mean,
            inverse_deviation,
            scale,
            shift,
            batch,
            after,
            parameters: [weight.dtype(), bias.dtype()],
        };
        match fused {
            Fused::Nothing => normalise(After::Nothing).apply(&[x, &weight, &bias]),
            Fused::Relu => normalise(After::Relu).apply(&[x, &weight, &bias]),
            Fused::AddRelu(z) => {
                let z = z.contiguous()?;
                normalise(After::AddRelu(z.detach())).apply(&[x, &weight, &bias, &z])
            }
        }
    }

    /// Means and variances of the whole batch, and the changes of the running statistics.
    fn batch_statistics(&self, x: &Tensor, group: Option<&ProcessGroup>) -> Result<Statistics> {
        let group = match group {
            Some(group) if group.world_size() > 1 && group.current_join().is_some() => {
                let reason = "it is in training mode inside of `join`, where ranks without inputs make no forward passes, and \
                              its statistics need all ranks: use `batch_norm`, or give all ranks as many batches";
                return Err(Error::invalid(self.input, reason).into());
            }
            Some(group) if group.world_size() > 1 => Some(group.companion()?),
            _ => None,
        };
        let local = channels::moments(x, self.config.remove_mean)?;
        let here = x.elem_count().checked_div(x.dim(1)?).unwrap_or(0);
        let count = Tensor::new(&[here as f64], x.device())?.to_dtype(local.dtype())?;
        let (mean, variance, count) = match &group {
            None => (local.get(0)?, local.get(1)?, count),
            Some(group) => combine(group, &local, &count)?,
        };
        // Only where it is possible at all is it worth waiting for a GPU.
        if here < 2 && count.to_dtype(DType::F64)?.to_vec1::<f64>()?[0] < 2.0 {
            let reason =
                "in training mode, all ranks together have fewer than two values per channel, which have no variance";
            return Err(Error::invalid(self.input, reason).into());
        }
        let unbiased = variance.broadcast_mul(&(&count / (&count - 1.0)?)?)?;
        if self.config.remove_mean {
            self.update(&self.running_mean, &mean)?;
        }
        self.update(&self.running_var, &unbiased)?;
        let batch = Some(Batch { count, group, centred: self.config.remove_mean });
        Ok(Statistics { mean, variance, batch })
    }

    fn update(&self, running: &Var, newest: &Tensor) -> Result<()> {
        let old = running.as_detached_tensor().to_dtype(newest.dtype())?;
        let mixed = ((old * (1.0 - self.config.momentum))? + (newest * self.config.momentum)?)?;
        running.set(&mixed.to_dtype(running.dtype())?)
    }
}

/// What a batch is normalised with.
struct Statistics {
    mean: Tensor,
    variance: Tensor,
    batch: Option<Batch>,
}

/// For statistics that are those of the batch itself, and through which its gradient flows.
struct Batch {
    /// How many values each channel has on all ranks.
    count: Tensor,
    group: Option<ProcessGroup>,
    centred: bool,
}

/// The statistics of all ranks' batches together: means, variances and count.
fn combine(group: &ProcessGroup, local: &Tensor, count: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let channels = local.dim(1)?;
    let mine = Tensor::cat(&[&local.flatten_all()?, count], 0)?;
    let all = Tensor::zeros((group.world_size(), 2 * channels + 1), mine.dtype(), mine.device())?;
    Label::BATCH_NORM.during(|| group.all_gather(&all, &mine))?;
    let (means, variances) = (all.narrow(1, 0, channels)?, all.narrow(1, channels, channels)?);
    let counts = all.narrow(1, 2 * channels, 1)?;
    let count = counts.sum(0)?;
    let mean = means.broadcast_mul(&counts)?.sum(0)?.broadcast_div(&count)?;
    let spread = (variances + means.broadcast_sub(&mean)?.sqr()?)?;
    let variance = spread.broadcast_mul(&counts)?.sum(0)?.broadcast_div(&count)?;
    Ok((mean, variance, count))
}

/// (x − mean) × scale + shift, and what comes after. The arguments are x, weight, bias and, if there is one, z.
struct Normalise {
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    /// weight × inverse_deviation
    scale: Tensor,
    /// bias
    shift: Tensor,
    /// None in evaluation, where the statistics are constants.
    batch: Option<Batch>,
    after: After,
    /// The dtypes of weight and bias.
    parameters: [DType; 2],
}

impl Normalise {
    fn apply(self, arguments: &[&Tensor]) -> Result<Tensor> {
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
                        Label::BATCH_NORM_BACKWARD.during(|| group.all_reduce(&all, ReduceOp::Sum))?;
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
