//! Batch normalisation of the local batch, or of the batches of all ranks together.
use super::channels::{self, After};
pub use super::normalise::BatchNormGroup;
use super::normalise::{Batch, Normalise, Statistics, combine};
use candle_core::{DType, ModuleT, Result, Tensor, Var};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
pub use candle_nn::BatchNormConfig;
use candle_nn::{Init, VarBuilder};
use std::sync::Arc;

/// Batch normalisation: `torch.nn.BatchNorm1d` to `3d`, and a drop-in for [`candle_nn::BatchNorm`] with the same names in the
/// `VarMap` (`weight`, `bias`, `running_mean`, `running_var`). Made by [`batch_norm`].
///
/// Takes tensors of two and more dimensions, the second of which are the channels: (N, C), (N, C, L), (N, C, H, W),
/// (N, C, D, H, W). Means and variances are calculated in f32 (in f64 for f64 inputs) also for f16 and bf16; parameters and
/// running statistics may be of another floating-point dtype than the input, as in mixed precision. The passes are fused
/// loops on the CPU and kernels on CUDA.
///
/// [`BatchNorm::forward_relu_t`] and [`BatchNorm::forward_add_relu_t`] do what usually follows in the same pass over memory.
///
/// As with candle's `BatchNorm`, PyTorch's `momentum=None` (a cumulative average) and `track_running_stats=False` are not
/// offered.
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

/// A [`BatchNorm`] for inputs with `num_features` channels. `config` is candle's, or only its `eps`.
///
/// # Errors
/// A config that [`candle_nn::BatchNorm`] refuses as well, and whatever `vb` refuses.
pub fn batch_norm<C: Into<BatchNormConfig>>(num_features: usize, config: C, vb: VarBuilder) -> Result<BatchNorm> {
    let config = config.into();
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    // In this order, which is candle's: under DDP it numbers the parameters.
    let statistics = [get("running_mean", 0.)?, get("running_var", 1.)?];
    let weight_and_bias = if config.affine { Some((get("weight", 1.)?, get("bias", 0.)?)) } else { None };
    BatchNorm::of(num_features, config, statistics, weight_and_bias)
}

impl BatchNorm {
    /// A layer of these parameters and running statistics, each of shape (`num_features`). Variables among the statistics are
    /// shared; other tensors are copied.
    ///
    /// # Errors
    /// A tensor of another shape, or a negative `eps`.
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

    /// A layer without parameters.
    ///
    /// # Errors
    /// As [`BatchNorm::new`].
    pub fn new_no_bias(num_features: usize, running_mean: Tensor, running_var: Tensor, eps: f64) -> Result<Self> {
        Self::new_no_bias_with_momentum(num_features, running_mean, running_var, eps, 0.1)
    }

    /// [`BatchNorm::new`] with a `momentum` from 0 to 1.
    ///
    /// # Errors
    /// As [`BatchNorm::new`], and a momentum outside of 0 to 1.
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

    /// [`BatchNorm::new_no_bias`] with a `momentum` from 0 to 1.
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
            return Err(Error::invalid("eps", format!("{} is negative", config.eps)).into());
        }
        if !(0. ..=1.).contains(&config.momentum) {
            return Err(Error::invalid("momentum", format!("{} is not between 0 and 1", config.momentum)).into());
        }
        let parameters = weight_and_bias.iter().flat_map(|(weight, bias)| [("weight", weight), ("bias", bias)]);
        let statistics = [("running_mean", &running_mean), ("running_var", &running_var)];
        for (name, tensor) in statistics.into_iter().chain(parameters) {
            if tensor.dims() != [num_features] {
                let is = describe(tensor.dtype(), tensor.shape());
                return Err(Error::invalid(name, format!("it is {is}, where ({num_features}) is expected")).into());
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
            let reason = format!("it is {is}, where (N, {features}) or (N, {features}, …) is expected");
            return Err(Error::invalid(self.input(), reason).into());
        }
        if let Fused::AddRelu(z) = fused
            && (z.shape() != x.shape() || z.dtype() != x.dtype() || !z.device().same_device(x.device()))
        {
            let describe = |t: &Tensor| describe(t.dtype(), t.shape());
            let reason =
                format!("it is {} on {:?}, where the input is {}", describe(z), z.device().location(), describe(x));
            return Err(Error::invalid("what is added to batch normalisation", reason).into());
        }
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
        let normalised = |after| Normalise {
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
            Fused::Nothing => normalised(After::Nothing).apply(&[x, &weight, &bias]),
            Fused::Relu => normalised(After::Relu).apply(&[x, &weight, &bias]),
            Fused::AddRelu(z) => {
                let z = z.contiguous()?;
                normalised(After::AddRelu(z.detach())).apply(&[x, &weight, &bias, &z])
            }
        }
    }

    /// Means and variances of the whole batch, and the changes of the running statistics.
    fn batch_statistics(&self, x: &Tensor) -> Result<Statistics> {
        let group = self.group.clone().filter(|group| group.world_size() > 1);
        if let Some(group) = &group {
            group.check(x)?;
        }
        let local = channels::moments(x, self.config.remove_mean)?;
        let here = x.elem_count().checked_div(x.dim(1)?).unwrap_or(0);
        let count = Tensor::new(&[here as f64], x.device())?.to_dtype(local.dtype())?;
        let (mean, variance, count) = match &group {
            None => (local.get(0)?, local.get(1)?, count),
            Some(group) => combine(group.as_ref(), &local, &count)?,
        };
        // Only where it is possible at all is it worth waiting for a GPU.
        if here < 2 && count.to_dtype(DType::F64)?.to_vec1::<f64>()?[0] < 2.0 {
            let reason =
                "in training mode, all ranks together have fewer than two values per channel, which have no variance";
            return Err(Error::invalid(self.input(), reason).into());
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

    /// relu(normalised x), in the same pass over memory.
    ///
    /// # Errors
    /// As `forward_t`.
    pub fn forward_relu_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.normalise(x, train, Fused::Relu)
    }

    /// relu(normalised x + z), in the same pass over memory: the end of a residual block. `z` is like `x`. (Apex's
    /// `BatchNorm2d_NHWC` with `fuse_relu`.)
    ///
    /// # Errors
    /// As `forward_t`; a `z` of another shape, dtype or device.
    pub fn forward_add_relu_t(&self, x: &Tensor, z: &Tensor, train: bool) -> Result<Tensor> {
        self.normalise(x, train, Fused::AddRelu(z))
    }
}

impl ModuleT for BatchNorm {
    /// # Errors
    /// An input without channels, or with another number of them; in training fewer than two values per channel, which have
    /// no variance.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.normalise(x, train, Fused::Nothing)
    }
}
