//! Batch normalisation of the local batch, or of the batches of all ranks together.
use super::autocast::widest;
use super::channels::cuda::{self, Parameters, Source};
use super::channels::{self, After, Passed};
pub use super::normalise::BatchNormGroup;
use super::normalise::{Batch, Normalise, Statistics, combine};
use candle_core::{DType, ModuleT, Result, Tensor, TensorId, Var};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::seed::is_replaying;
use candle_ddp_tensor::{Error, MemoryFormat};
pub use candle_nn::BatchNormConfig;
use candle_nn::{Init, VarBuilder};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Batch normalisation: `torch.nn.BatchNorm1d` to `3d`, and a drop-in for [`candle_nn::BatchNorm`] with the same names in the
/// `VarMap` (`weight`, `bias`, `running_mean`, `running_var`). Made by [`batch_norm`].
///
/// Takes tensors of two or more dimensions, the second of which is the channels: (N, C), (N, C, L), (N, C, H, W), (N,
/// C, D, H, W). Means and variances are calculated in f32 for f16 and bf16 too (in f64 for f64 inputs). Parameters
/// and running statistics may have another floating-point dtype than the input, as in mixed precision. The passes are
/// fused loops on the CPU and kernels on CUDA, where the result has the input's
/// [memory format](crate::MemoryFormat).
///
/// [`BatchNorm::forward_relu_t`] and [`BatchNorm::forward_add_relu_t`] also apply the usual next operation in the
/// same pass over memory.
///
/// Like candle's `BatchNorm`, it lacks PyTorch's `momentum=None` (a cumulative average, which candle-ddp's `update_bn` takes) and
/// `track_running_stats=False`.
///
/// ```
/// # use candle_core::{Device, ModuleT, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::BatchNorm;
/// let of = |value: f32| Tensor::new(&[value], &Device::Cpu);
/// // In evaluation: (x − mean 1) / √(variance 4) × weight 10 + bias 5.
/// let layer = BatchNorm::new(1, of(1.)?, of(4.)?, of(10.)?, of(5.)?, 0.0)?;
/// let y = layer.forward_t(&Tensor::new(&[[3f32], [-1.]], &Device::Cpu)?, false)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[15.], [-5.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BatchNorm {
    running_mean: Var,
    running_var: Var,
    weight_and_bias: Option<(Tensor, Tensor)>,
    config: BatchNormConfig,
    /// The ranks whose batches are normalised together; None normalises the local batch.
    group: Option<Arc<dyn BatchNormGroup>>,
}

/// The operation that follows in the same pass over memory.
enum Fused<'a> {
    Nothing,
    Relu,
    AddRelu(&'a Tensor),
}

/// The batches in each running statistic.
type Counts = HashMap<TensorId, u64>;

thread_local! {
    static CUMULATIVE: RefCell<Option<Counts>> = const { RefCell::new(None) };
}

/// Runs `f`, in which the running statistics of layers become those of all batches in `f`: PyTorch's `momentum=None`. Returns also the number
/// of batches in each.
#[doc(hidden)]
pub fn with_cumulative_statistics<T>(f: impl FnOnce() -> T) -> (T, HashMap<TensorId, u64>) {
    /// Restores the enclosing counts, even if `f` panics.
    struct Scope(Option<Counts>);
    impl Drop for Scope {
        fn drop(&mut self) {
            CUMULATIVE.set(self.0.take());
        }
    }
    let _scope = Scope(CUMULATIVE.replace(Some(Counts::new())));
    let result = f();
    (result, CUMULATIVE.take().unwrap_or_default())
}

/// A [`BatchNorm`] for inputs with `num_features` channels. `config` is candle's, or only its `eps`.
///
/// # Errors
/// Returns an error for a config that [`candle_nn::BatchNorm`] refuses too, and the errors of `vb`.
pub fn batch_norm<C: Into<BatchNormConfig>>(num_features: usize, config: C, vb: VarBuilder) -> Result<BatchNorm> {
    let config = config.into();
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    // The same order as candle's, since under DDP it numbers the parameters.
    let statistics = [get("running_mean", 0.)?, get("running_var", 1.)?];
    let weight_and_bias = if config.affine { Some((get("weight", 1.)?, get("bias", 0.)?)) } else { None };
    BatchNorm::of(num_features, config, statistics, weight_and_bias)
}

impl BatchNorm {
    /// A layer with these parameters and running statistics, each of shape (`num_features`). Statistics that are
    /// variables are shared; other tensors are copied. Gradients end here at the statistics, which a forward pass changes, but not
    /// at `weight` and `bias`.
    ///
    /// # Errors
    /// Returns an error for a tensor of another shape or a negative `eps`.
    pub fn new(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    ) -> Result<Self> {
        Self::new_with_momentum(num_features, running_mean, running_var, weight, bias, eps, 0.1)
    }

    /// A layer without parameters. Gradients end here, as in [`BatchNorm::new`].
    ///
    /// # Errors
    /// As [`BatchNorm::new`].
    pub fn new_no_bias(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64) -> Result<Self> {
        Self::new_no_bias_with_momentum(num_features, running_mean, running_var, eps, 0.1)
    }

    /// [`BatchNorm::new`] with a `momentum` from 0 to 1. Gradients end here at the statistics.
    ///
    /// # Errors
    /// As with [`BatchNorm::new`], and for a momentum outside 0 to 1.
    pub fn new_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, momentum, ..Default::default() };
        Self::of(num_features, config, [running_mean, running_var], Some((weight, bias)))
    }

    /// [`BatchNorm::new_no_bias`] with a `momentum` from 0 to 1. Gradients end here at the statistics.
    ///
    /// # Errors
    /// As [`BatchNorm::new_with_momentum`].
    pub fn new_no_bias_with_momentum(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
        momentum: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, momentum, affine: false, ..Default::default() };
        Self::of(num_features, config, [running_mean, running_var], None)
    }

    /// Makes the layer normalise the batches of all ranks of `group` together, in training: PyTorch's `SyncBatchNorm`.
    pub fn synchronised(self, group: Arc<dyn BatchNormGroup>) -> Self {
        Self { group: Some(group), ..self }
    }

    fn of(
        num_features: usize,
        config: BatchNormConfig,
        [running_mean, running_var]: [Tensor; 2],
        weight_and_bias: Option<(Tensor, Tensor)>,
    ) -> Result<Self> {
        if config.eps < 0. {
            return Err(Error::invalid("eps", format!("it must not be negative, but is {}", config.eps)).into());
        }
        if !(0. ..=1.).contains(&config.momentum) {
            return Err(
                Error::invalid("momentum", format!("it must be between 0 and 1, not {}", config.momentum)).into()
            );
        }
        let parameters = weight_and_bias.iter().flat_map(|(weight, bias)| [("weight", weight), ("bias", bias)]);
        let statistics = [("running_mean", &running_mean), ("running_var", &running_var)];
        for (name, tensor) in statistics.into_iter().chain(parameters) {
            if tensor.dims() != [num_features] {
                let is = describe(tensor.dtype(), tensor.shape());
                return Err(
                    Error::invalid(name, format!("it must have the shape ({num_features}), but is {is}")).into()
                );
            }
        }
        // `from_tensor` shares a variable.
        let (running_mean, running_var) = (Var::from_tensor(&running_mean)?, Var::from_tensor(&running_var)?);
        Ok(Self { running_mean, running_var, weight_and_bias, config, group: None })
    }

    /// The name of the input in messages.
    fn input(&self) -> &'static str {
        match self.group {
            None => "the input of BatchNorm",
            Some(_) => "the input of SyncBatchNorm",
        }
    }

    fn normalise(&self, x: &Tensor, train: bool, fused: Fused) -> Result<Tensor> {
        let features = self.running_mean.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != features {
            let is = describe(x.dtype(), x.shape());
            let reason = format!("it must be (N, {features}) or (N, {features}, …), not {is}");
            return Err(Error::invalid(self.input(), reason).into());
        }
        if let Fused::AddRelu(z) = fused
            && (z.shape() != x.shape() || z.dtype() != x.dtype() || !z.device().same_device(x.device()))
        {
            let describe = |t: &Tensor| describe(t.dtype(), t.shape());
            let reason = format!(
                "it must have the input's shape, dtype and device, but is {} on {:?}, and the input is {}",
                describe(z),
                z.device().location(),
                describe(x)
            );
            return Err(Error::invalid("the tensor added to batch normalisation's output", reason).into());
        }
        let is_cuda = x.device().is_cuda();
        let format = if is_cuda { MemoryFormat::of(x) } else { MemoryFormat::Contiguous };
        let images = channels::batch_of(format, x)?;
        let on = if is_cuda { Self::statistics_on_gpu } else { Self::statistics_by_candle };
        let Statistics { mean, inverse_deviation, scale, shift, batch } = on(self, &images, train)?;
        let parameters = self.weight_and_bias.as_ref();
        let normalised = Normalise {
            format,
            shape: x.shape().clone(),
            x: images,
            mean,
            inverse_deviation,
            scale,
            shift,
            batch,
            passed: Passed::Nothing,
            parameters: parameters.map(|(weight, bias)| [weight.dtype(), bias.dtype()]),
        };
        let mut arguments = vec![x];
        arguments.extend(parameters.into_iter().flat_map(|(weight, bias)| [weight, bias]));
        let after = match fused {
            Fused::Nothing => After::Nothing,
            Fused::Relu => After::Relu,
            Fused::AddRelu(z) => {
                arguments.push(z);
                After::AddRelu(channels::batch_of(format, z)?)
            }
        };
        normalised.apply(after, &arguments)
    }

    fn statistics_by_candle(&self, x: &Tensor, train: bool) -> Result<Statistics> {
        let acc = candle_ddp_tensor::accumulator(x.dtype());
        let (mean, variance, batch) = if train {
            self.batch_statistics(x)?
        } else {
            let running = |var: &Var| var.as_detached_tensor().to_dtype(acc);
            (running(&self.running_mean)?, running(&self.running_var)?, None)
        };
        let inverse_deviation = (variance + self.config.eps)?.sqrt()?.recip()?;
        let (scale, shift) = match &self.weight_and_bias {
            Some((weight, bias)) => {
                let scale = (weight.detach().to_dtype(acc)? * &inverse_deviation)?;
                (scale.contiguous()?, bias.detach().to_dtype(acc)?.contiguous()?)
            }
            None => (inverse_deviation.clone(), mean.zeros_like()?),
        };
        Ok(Statistics { mean, inverse_deviation, scale, shift, batch })
    }

    fn statistics_on_gpu(&self, x: &Tensor, train: bool) -> Result<Statistics> {
        let contiguous =
            |(weight, bias): &(Tensor, Tensor)| Ok::<_, candle_core::Error>([weight.contiguous()?, bias.contiguous()?]);
        let weight_and_bias = self.weight_and_bias.as_ref().map(contiguous).transpose()?;
        let parameters = Parameters {
            weight_and_bias: weight_and_bias.as_ref().map(|[weight, bias]| [weight, bias]),
            running: [&self.running_mean, &self.running_var],
            eps: self.config.eps,
            momentum: if train { self.momentum_now() } else { 0.0 },
        };
        let centred = self.config.remove_mean;
        let of = |source, parameters| cuda::statistics(x, source, centred, parameters);
        let (rows, batch) = if !train {
            (of(Source::Running, Some(&parameters))?, None)
        } else if let Some(group) = self.ranks() {
            group.check(x)?;
            let local = of(Source::Batch, None)?.narrow(0, 0, 2)?;
            let (mean, variance, count) = self.of_all_ranks(x, &local, Some(&group))?;
            let [mean, variance] = [mean.contiguous()?, variance.contiguous()?];
            let rows = of(Source::Given([&mean, &variance, &count]), Some(&parameters))?;
            (rows, Some(Batch { count: Some(count), group: Some(group), centred }))
        } else {
            if values(x)? < 2 {
                return Err(self.too_few());
            }
            (of(Source::Batch, Some(&parameters))?, Some(Batch { count: None, group: None, centred }))
        };
        let row = |index| rows.get(index);
        Ok(Statistics { mean: row(0)?, inverse_deviation: row(2)?, scale: row(3)?, shift: row(4)?, batch })
    }

    /// The ranks whose batches are normalised together, if there are several.
    fn ranks(&self) -> Option<Arc<dyn BatchNormGroup>> {
        self.group.clone().filter(|group| group.world_size() > 1)
    }

    /// Means and variances of the whole batch, and the changes of the running statistics.
    fn batch_statistics(&self, x: &Tensor) -> Result<(Tensor, Tensor, Option<Batch>)> {
        let group = self.ranks();
        if let Some(group) = &group {
            group.check(x)?;
        }
        let local = channels::moments(x, self.config.remove_mean)?;
        let (mean, variance, count) = self.of_all_ranks(x, &local, group.as_ref())?;
        let unbiased = variance.broadcast_mul(&(&count / (&count - 1.0)?)?)?;
        let momentum = self.momentum_now();
        if self.config.remove_mean {
            update(&self.running_mean, &mean, momentum)?;
        }
        update(&self.running_var, &unbiased, momentum)?;
        Ok((mean, variance, Some(Batch { count: Some(count), group, centred: self.config.remove_mean })))
    }

    /// Means, variances and the number of values of the whole batch, from the `local` ones of `x`. Too few values are an error.
    fn of_all_ranks(
        &self,
        x: &Tensor,
        local: &Tensor,
        group: Option<&Arc<dyn BatchNormGroup>>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let here = values(x)?;
        let count = Tensor::new(&[here as f64], x.device())?.to_dtype(local.dtype())?;
        let (mean, variance, count) = match group {
            None => (local.get(0)?, local.get(1)?, count),
            Some(group) => combine(group.as_ref(), local, &count)?,
        };
        // Waiting for a GPU is only necessary if too few values are possible at all.
        if here < 2 && count.to_dtype(DType::F64)?.to_vec1::<f64>()?[0] < 2.0 {
            return Err(self.too_few());
        }
        Ok((mean, variance, count))
    }

    /// The weight of this batch in the running statistics. An [`nn::checkpoint`](crate::checkpoint) computes the same batch twice.
    fn momentum_now(&self) -> f64 {
        if is_replaying() {
            return 0.0;
        }
        CUMULATIVE.with_borrow_mut(|counts| {
            let Some(counts) = counts else { return self.config.momentum };
            let count = counts.entry(self.running_var.id()).or_default();
            *count += 1;
            let count = *count;
            if self.config.remove_mean {
                counts.insert(self.running_mean.id(), count);
            }
            1.0 / count as f64
        })
    }

    fn too_few(&self) -> candle_core::Error {
        let reason = match self.ranks() {
            Some(_) => {
                "in training mode, all ranks together must have at least two values per channel: fewer have no variance"
            }
            None => "in training mode, it must have at least two values per channel: fewer have no variance",
        };
        Error::invalid(self.input(), reason).into()
    }

    /// `forward_t` in training mode.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_t(x, true)
    }

    /// The running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        self.running_mean.as_tensor()
    }

    /// The running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        self.running_var.as_tensor()
    }

    /// The constant that is added to variances.
    pub fn eps(&self) -> f64 {
        self.config.eps
    }

    /// The weight of the newest batch in the running statistics.
    pub fn momentum(&self) -> f64 {
        self.config.momentum
    }

    /// The parameters; None if the layer was made without them (`affine: false`).
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// relu(normalised x), in the same pass over memory.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.normalise(x, train, Fused::Relu)
    }

    /// relu(normalised x + z), in the same pass over memory: the end of a residual block. `z` has the shape, dtype
    /// and device of `x`. (Apex's `BatchNorm2d_NHWC` with `fuse_relu`.)
    ///
    /// # Errors
    /// As with `forward_t`, and for a `z` of another shape, dtype or device.
    pub fn forward_add_relu_t(&self, x: &Tensor, z: &Tensor, train: bool) -> Result<Tensor> {
        let [x, z] = &widest(x, z)?;
        self.normalise(x, train, Fused::AddRelu(z))
    }
}

impl ModuleT for BatchNorm {
    /// # Errors
    /// Returns an error for an input without channels or with another number of channels and, in training, for fewer
    /// than two values per channel, which have no variance.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.normalise(x, train, Fused::Nothing)
    }
}

fn update(running: &Var, newest: &Tensor, momentum: f64) -> Result<()> {
    if momentum == 0.0 {
        return Ok(());
    }
    let old = running.as_detached_tensor().to_dtype(newest.dtype())?;
    let mixed = ((old * (1.0 - momentum))? + (newest * momentum)?)?;
    running.set(&mixed.to_dtype(running.dtype())?)
}

/// The number of values of each channel.
fn values(x: &Tensor) -> Result<usize> {
    Ok(x.elem_count().checked_div(x.dim(1)?).unwrap_or(0))
}
