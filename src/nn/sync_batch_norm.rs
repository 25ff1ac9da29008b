//! Batch normalisation over the batches of all ranks.
use super::channels;
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::{Error, ReduceOp};
use candle_core::{CpuStorage, CudaStorage, CustomOp3, DType, Layout, ModuleT, Result, Shape, Storage, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, VarBuilder};

/// Batch normalisation whose means and variances are those of the batches of all ranks together: PyTorch's
/// `SyncBatchNorm`, and a drop-in for [`candle_nn::BatchNorm`], with the same names in the `VarMap` (`weight`, `bias`,
/// `running_mean`, `running_var`). Made by [`sync_batch_norm`].
///
/// Takes tensors of two and more dimensions, the second of which are the channels: (N, C), (N, C, L), (N, C, H, W),
/// (N, C, D, H, W). Ranks may have batches of different sizes, also empty ones. In training each forward pass makes
/// one collective (an all-gather of means, variances and counts) and each backward pass another (an all-reduce of two
/// sums per channel); the gradients of `weight` and `bias` are those of this rank's batch, for
/// DistributedDataParallel to average. In evaluation, and in a world of one, it does what batch normalisation does
/// anywhere, without collectives.
///
/// **All ranks of the group run the same forward and backward passes in training mode**, whatever the size of their
/// batches: a rank that leaves one out lets the others wait until their time-out. The collectives run on a
/// communicator of their own, which all such layers of the group share and which is connected in the first forward
/// pass in training mode: on that of the gradients' buckets, which become ready at moments that differ from rank to
/// rank, they would come in different orders on different ranks. (On GPUs, NCCL promises that two communicators do not
/// wait for each other only if all ranks start their calls on both in one order. Ranks that run the same layers do. Those
/// that use different parameters may not, and rely on both kinds of kernels finding room on a GPU at once: leave
/// `CUDA_DEVICE_MAX_CONNECTIONS` at its default, not 1.)
///
/// Means and variances are calculated in f32 (in f64 for f64 inputs) also for f16 and bf16; parameters and running
/// statistics may be of another floating-point dtype than the input, as in mixed precision. On the CPU the passes are
/// fused loops, on other devices they are made of candle's operations.
///
/// As with candle's `BatchNorm`, PyTorch's `momentum=None` (a cumulative average) and `track_running_stats=False` are not
/// offered.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    group: ProcessGroup,
    running_mean: Var,
    running_var: Var,
    weight_and_bias: Option<(Tensor, Tensor)>,
    config: BatchNormConfig,
}

/// A [`SyncBatchNorm`] over the ranks of `group` for inputs with `num_features` channels. `config` is candle's, or only
/// its `eps`.
///
/// # Errors
/// A config that [`candle_nn::BatchNorm`] refuses as well, and whatever `vb` refuses.
pub fn sync_batch_norm<C: Into<BatchNormConfig>>(
    group: &ProcessGroup,
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<SyncBatchNorm> {
    let config = config.into();
    if config.eps < 0. {
        return Err(Error::invalid("eps", format!("{} is negative", config.eps)).into());
    }
    if !(0. ..=1.).contains(&config.momentum) {
        return Err(Error::invalid("momentum", format!("{} is not between 0 and 1", config.momentum)).into());
    }
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    // In this order, which is candle's: under DDP it numbers the parameters. `from_tensor` shares a variable.
    let running_mean = Var::from_tensor(&get("running_mean", 0.)?)?;
    let running_var = Var::from_tensor(&get("running_var", 1.)?)?;
    let weight_and_bias = if config.affine { Some((get("weight", 1.)?, get("bias", 0.)?)) } else { None };
    Ok(SyncBatchNorm { group: group.clone(), running_mean, running_var, weight_and_bias, config })
}

impl SyncBatchNorm {
    /// The running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        self.running_mean.as_tensor()
    }

    /// The running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        self.running_var.as_tensor()
    }

    /// What is added to variances.
    pub fn eps(&self) -> f64 {
        self.config.eps
    }

    /// The weight of the newest batch in the running statistics.
    pub fn momentum(&self) -> f64 {
        self.config.momentum
    }

    /// The parameters, unless the layer was made without (`affine: false`).
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// The ranks whose batches are normalised together.
    pub fn process_group(&self) -> &ProcessGroup {
        &self.group
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        let (features, place) = (self.running_mean.dim(0)?, self.group.device());
        let is = crate::error::describe(x.dtype(), x.shape());
        if x.rank() < 2 || x.dim(1)? != features {
            let reason = format!("it is {is}, where (N, {features}) or (N, {features}, …) is expected");
            return Err(Error::invalid("the input of SyncBatchNorm", reason).into());
        }
        if self.group.world_size() > 1 && !x.device().same_device(place) {
            let reason = format!("it is on {:?}, its group's device is {:?}", x.device().location(), place.location());
            return Err(Error::invalid("the input of SyncBatchNorm", reason).into());
        }
        Ok(())
    }

    /// Means and variances of the whole batch, and the changes of the running statistics.
    fn batch_statistics(&self, x: &Tensor) -> Result<Statistics> {
        let group = if self.group.world_size() > 1 { Some(self.group.companion()?) } else { None };
        let local = channels::moments(x, self.config.remove_mean)?;
        let here = x.elem_count().checked_div(x.dim(1)?).unwrap_or(0);
        let count = Tensor::new(&[here as f64], x.device())?.to_dtype(local.dtype())?;
        let (mean, variance, count) = match &group {
            None => (local.get(0)?, local.get(1)?, count),
            Some(group) => combine(group, &local, &count)?,
        };
        // Only where it is possible at all is it worth waiting for a GPU.
        if here < 2 && count.to_dtype(DType::F64)?.to_vec1::<f64>()?[0] < 2.0 {
            let reason = "all ranks together have fewer than two values per channel, which have no variance";
            return Err(Error::invalid("the input of SyncBatchNorm in training mode", reason).into());
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

impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.check(x)?;
        let x = &x.contiguous()?;
        let acc = channels::accumulator(x.dtype());
        let Statistics { mean, variance, batch } = if train {
            self.batch_statistics(x)?
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
        let mean = mean.contiguous()?;
        x.apply_op3(&weight, &bias, Normalise { mean, inverse_deviation, scale, shift, batch })
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

/// (x − mean) × scale + shift. Its arguments are x, weight and bias, the latter two only for their gradients.
struct Normalise {
    mean: Tensor,
    inverse_deviation: Tensor,
    /// weight × inverse_deviation
    scale: Tensor,
    /// bias
    shift: Tensor,
    /// None in evaluation, where the statistics are constants.
    batch: Option<Batch>,
}

impl CustomOp3 for Normalise {
    fn name(&self) -> &'static str {
        "sync-batch-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        channels::normalise(x, layout, [&self.mean, &self.scale, &self.shift])
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let guards = [&self.mean, &self.scale, &self.shift].map(Tensor::storage_and_layout);
        let [Storage::Cuda(mean), Storage::Cuda(scale), Storage::Cuda(shift)] =
            [&*guards[0].0, &*guards[1].0, &*guards[2].0]
        else {
            candle_core::bail!("the parameters of SyncBatchNorm are not on the device of its input")
        };
        let others = [(mean, guards[0].1), (scale, guards[1].1), (shift, guards[2].1)];
        channels::normalise_composite(x, layout, others)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dy = dy.contiguous()?;
        let local = channels::gradient_sums(x, &dy, &self.mean)?;
        let d_bias = local.get(0)?;
        let d_weight = (local.get(1)? * &self.inverse_deviation)?;
        let zeros = self.mean.zeros_like()?;
        let (a, b) = match &self.batch {
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
                let b = (means.get(1)? * self.inverse_deviation.sqr()?)?;
                (if *centred { means.get(0)? } else { zeros }, b)
            }
        };
        let dx = channels::input_gradient(x, &dy, [&self.mean, &self.scale, &a, &b])?;
        Ok((Some(dx), Some(d_weight.to_dtype(weight.dtype())?), Some(d_bias.to_dtype(bias.dtype())?)))
    }
}
