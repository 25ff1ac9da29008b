//! Mixed precision: calculating in f16 or bf16 with parameters that are kept in f32.
//!
//! [`MixedPrecision`], given in [`DdpOptions`](crate::DdpOptions), says in which dtype the model computes, in which one
//! gradients are averaged, and in which one buffers are kept. The variables in the `VarMap` have the dtype that is given
//! to [`DistributedDataParallel::new`](crate::DistributedDataParallel::new), usually f32: they are the masters that
//! optimizers change and that checkpoints hold. The model holds copies of them in `param_dtype`, brought up to date by
//! every forward pass, and gradients come out of `backward` in the masters' dtype.
//!
//! bf16 has the range of f32 and needs nothing else. f16 has not: small gradients vanish in it, and so the loss is
//! multiplied by a large number for the backward pass, which [`GradScaler`] chooses and divides out again.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, GradScaler, GradScalerOptions, MixedPrecision};
//! use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let mixed_precision = Some(MixedPrecision {
//!         param_dtype: Some(DType::F16),          // the model computes in f16
//!         reduce_dtype: Some(DType::F32),         // gradients are averaged in f32
//!         buffer_dtype: None,                     // running statistics stay in f32
//!     });
//!     let options = DdpOptions { mixed_precision, ..Default::default() };
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, |vb| linear(4, 1, vb), options)?;
//!     let mut optimizer = AdamW::new(ddp.parameters(), ParamsAdamW::default())?;
//!     let mut scaler = GradScaler::new(&pg, ddp.named_parameters(), GradScalerOptions::default())?;
//!
//!     let x = Tensor::ones((8, 4), DType::F32, pg.device())?;
//!     for _ in 0..3 {
//!         let loss = ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
//!         let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
//!         scaler.step(&mut optimizer, &mut grads)?;  // left out, on all ranks, where a gradient is infinite or NaN
//!         scaler.update()?;
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # From Apex
//! What the optimization levels of `apex.amp.initialize` are here. "`dtype`" is the argument of
//! [`DistributedDataParallel::new`](crate::DistributedDataParallel::new).
//!
//! | level | Apex | here |
//! |---|---|---|
//! | O0 | everything in f32 | `dtype` F32, no `mixed_precision` |
//! | O1 | f32 parameters; each function casts its inputs to the dtype on a list | no counterpart: candle has no automatic casts. The nearest is O2, with layers that need f32 asking for it (below) |
//! | O2 | f16 model, batch norms in f32, f32 masters, dynamic loss scale | `dtype` F32, `param_dtype` F16 (or BF16), `buffer_dtype` None, batch norms built for f32 (below); [`GradScaler`] (not for BF16) |
//! | O3 | everything in f16 | `dtype` F16, no `mixed_precision` |
//!
//! `keep_batchnorm_fp32`: [`SyncBatchNorm`](crate::nn::SyncBatchNorm) takes f16 and bf16 inputs with f32 statistics, and
//! calculates in f32; but its weight and bias are replicas in `param_dtype`, as all others, unless it is built with
//! `vb.to_dtype(DType::F32)`: they are then f32, whatever its inputs are. **candle's own `BatchNorm` needs its input,
//! parameters and buffers in one dtype in evaluation, and f32 buffers in training**, so that under mixed precision it has
//! to work in f32, or be replaced (also in a world of one). Another layer that should stay in f32 is built in the same way
//! (its variable is then its own master) and given f32 inputs. `loss_scale="dynamic"` is [`GradScaler`]; a constant one
//! has a `growth_factor` and a `backoff_factor` of 1, and still leaves out steps with an overflow, where Apex's does not.
use crate::element::{Element, dispatch, slice_mut};
use crate::kernels;
use crate::process_group::ProcessGroup;
use crate::{Error, ReduceOp, Result};
use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor, TensorId, Var, WithDType};
use candle_nn::Optimizer;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

/// Which dtypes DistributedDataParallel works with: PyTorch's `_MixedPrecision`. Every field's default is None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// In which the model computes: the `VarBuilder` that it is built with has this dtype, and `forward` and `forward_t`
    /// convert their input to it (`call` leaves that to its caller). Outputs stay as they are. None: the variables'.
    ///
    /// A layer that asks the `VarBuilder` for another dtype gets what it asks for. Ignored variables are not converted:
    /// they are made in the dtype that the model asks for.
    pub param_dtype: Option<DType>,
    /// In which gradients are summed up over the ranks, and added up under `no_sync`. None: that in which they come,
    /// `param_dtype`. Where it is not the variables' own, the averaged gradients are converted, one pass over them.
    pub reduce_dtype: Option<DType>,
    /// In which floating-point buffers, such as running means, are made. None: the variables', usually f32, since a
    /// running mean in f16 or bf16 stops following small changes.
    pub buffer_dtype: Option<DType>,
}

impl MixedPrecision {
    pub(crate) fn check(&self) -> Result<()> {
        let fields = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("buffer_dtype", self.buffer_dtype),
        ];
        for (field, dtype) in fields {
            if let Some(dtype) = dtype
                && !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
            {
                let reason = format!("{field} is {}, where f32, f64, f16 or bf16 is expected", dtype.as_str());
                return Err(Error::invalid("mixed_precision", reason));
            }
        }
        Ok(())
    }
}

impl fmt::Display for MixedPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |dtype: Option<DType>| dtype.map_or("none", |dtype| dtype.as_str());
        let (param, reduce, buffer) = (name(self.param_dtype), name(self.reduce_dtype), name(self.buffer_dtype));
        write!(f, "param_dtype {param}, reduce_dtype {reduce}, buffer_dtype {buffer}")
    }
}

/// How a [`GradScaler`] chooses the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerOptions {
    /// The first scale. Default: 65536.
    pub init_scale: f64,
    /// What the scale is multiplied by after `growth_interval` steps without overflow; 1 lets it never grow. Default: 2.
    pub growth_factor: f64,
    /// What the scale is multiplied by after an overflow; 1 lets it never shrink. Default: 0.5.
    pub backoff_factor: f64,
    /// How many steps without overflow it takes to try a larger scale. Default: 2000.
    pub growth_interval: usize,
    /// Whether it does anything at all: otherwise losses and gradients stay as they are and no step is left out.
    /// Default: true.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true }
    }
}

/// Multiplies losses by a scale, so that small gradients do not vanish in f16, divides the gradients by it again, and
/// leaves out steps whose gradients have overflowed, on all ranks: PyTorch's `GradScaler`.
///
/// A training step calls [`scale`](Self::scale); [`unscale`](Self::unscale), if it looks at the gradients or clips them;
/// [`step`](Self::step); and [`update`](Self::update); all ranks alike. An overflow on one rank counts for all.
///
/// Several optimizers share a scaler that was made for the parameters of all, and step together, in one
/// [`step_with`](Self::step_with): the gradients of all are divided at once, and a second `step` before `update`, as
/// PyTorch has it for each optimizer, is refused. An overflow leaves out the step of all, where PyTorch decides for each.
///
/// It is saved and loaded as optimizers are, by [`StateDict`](crate::optim::StateDict), or as text, by
/// [`state`](Self::state).
#[derive(Debug)]
pub struct GradScaler {
    group: ProcessGroup,
    parameters: Vec<(String, Var)>,
    options: GradScalerOptions,
    scale: f64,
    /// Steps without overflow since the scale has changed.
    clean_steps: usize,
    stage: Stage,
}

/// How far a training step has come; `overflow`: whether an infinity or NaN was found, on any rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Scaled,
    Unscaled { overflow: bool },
    Stepped { overflow: bool },
}

impl GradScaler {
    /// A scaler for the gradients of `parameters` (`ddp.named_parameters()`), which agrees over the ranks of `group`.
    ///
    /// # Errors
    /// Options that cannot work: a scale that is not positive and finite, a growth factor below 1 or not finite, a
    /// backoff factor that is not above 0 or is above 1, a growth interval of 0.
    pub fn new(group: &ProcessGroup, parameters: Vec<(String, Var)>, options: GradScalerOptions) -> Result<Self> {
        let mut seen: HashSet<TensorId> = HashSet::new();
        let parameters = parameters.into_iter().filter(|(_, var)| seen.insert(var.id())).collect();
        let state = GradScalerState {
            scale: options.init_scale,
            growth_factor: options.growth_factor,
            backoff_factor: options.backoff_factor,
            growth_interval: options.growth_interval,
            growth_tracker: 0,
        };
        state.check()?;
        let (scale, stage) = (options.init_scale, Stage::Scaled);
        Ok(Self { group: group.clone(), parameters, options, scale, clean_steps: 0, stage })
    }

    /// `loss` times the scale, in f32 at least: what `backward` is called with.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.options.enabled {
            return Ok(loss.clone());
        }
        let dtype = if loss.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        Ok((loss.to_dtype(dtype)? * self.scale)?)
    }

    /// Divides the parameters' gradients in `grads` by the scale, in place, and finds out whether any of them, on any
    /// rank, is infinite or NaN: PyTorch's `unscale_`. For a look at the gradients, or clipping, before
    /// [`step`](Self::step), which otherwise does it itself. Call it when all gradients have been accumulated.
    ///
    /// Returns whether all are finite.
    ///
    /// # Errors
    /// A second call in the same step ([`Error::GradScaler`]); gradients in f16, which cannot hold what they are divided
    /// to ([`Error::Parameter`]).
    pub fn unscale(&mut self, grads: &mut GradStore) -> Result<bool> {
        self.unscale_parameters(grads, |_, overflow| {
            overflow.ok_or_else(|| {
                let reason = "none of the parameters has a gradient in it: with a ZeroRedundancyOptimizer, call its \
                              `unscale` first";
                Error::invalid("grads", reason)
            })
        })
    }

    /// [`unscale`](Self::unscale) of gradients of which some are not in `grads`: `divide_others` as `divide` of
    /// [`unscale_with`](Self::unscale_with).
    pub(crate) fn unscale_sharded(
        &mut self,
        grads: &mut GradStore,
        divide_others: impl FnOnce(f64) -> Result<bool>,
    ) -> Result<bool> {
        self.unscale_parameters(grads, |factor, overflow| Ok(divide_others(factor)? || overflow == Some(true)))
    }

    /// `verdict` is given the factor, and whether `grads` has infinities or NaNs, and says whether there are any.
    fn unscale_parameters(
        &mut self,
        grads: &mut GradStore,
        verdict: impl FnOnce(f64, Option<bool>) -> Result<bool>,
    ) -> Result<bool> {
        let parameters = std::mem::take(&mut self.parameters);
        let result = self.unscale_with(|factor| verdict(factor, divide(&parameters, grads, factor)?));
        self.parameters = parameters;
        result
    }

    /// [`unscale`](Self::unscale) for gradients that are not in a `GradStore`: `divide` is given what they are to be
    /// multiplied by, and says whether this rank has infinities or NaNs among them.
    ///
    /// # Errors
    /// As with `unscale`, and those of `divide`.
    pub fn unscale_with(&mut self, divide: impl FnOnce(f64) -> Result<bool>) -> Result<bool> {
        if !self.options.enabled {
            return Ok(true);
        }
        match self.stage {
            Stage::Scaled => {}
            Stage::Unscaled { .. } => {
                return Err(misuse("unscale", "it was called in this step before, for all parameters"));
            }
            Stage::Stepped { .. } => return Err(misuse("unscale", STEPPED)),
        }
        // As PyTorch: the reciprocal in f64, rounded to f32.
        let here = divide(f64::from((1.0 / self.scale) as f32));
        // A rank that fails here takes part, so that the others do not wait for it.
        let flag = if matches!(here, Ok(false)) { 0f32 } else { 1.0 };
        let overflow = if self.group.world_size() > 1 {
            let overflow = Tensor::new(&[flag], self.group.device())?;
            self.group.all_reduce(&overflow, ReduceOp::Max)?;
            overflow.to_vec1::<f32>()?[0] > 0.0
        } else {
            flag > 0.0
        };
        here?;
        self.stage = Stage::Unscaled { overflow };
        Ok(!overflow)
    }

    /// Divides the gradients, unless [`unscale`](Self::unscale) has, and calls `optimizer.step` with them if all are
    /// finite on all ranks. Returns whether it did.
    ///
    /// # Errors
    /// A second call in the same step ([`Error::GradScaler`]), and those of `unscale`.
    pub fn step<O: Optimizer>(&mut self, optimizer: &mut O, grads: &mut GradStore) -> Result<bool> {
        self.step_with(grads, |grads| Ok(optimizer.step(grads)?))
    }

    /// [`step`](Self::step) for optimizers that are not candle's [`Optimizer`], and for several: `step` is called if all
    /// gradients are finite on all ranks.
    ///
    /// ```
    /// # use candle_core::backprop::GradStore;
    /// # use candle_ddp::{GradScaler, Result};
    /// # use candle_nn::Optimizer;
    /// # fn two(scaler: &mut GradScaler, encoder: &mut impl Optimizer, decoder: &mut impl Optimizer, grads: &mut GradStore) -> Result<()> {
    /// scaler.step_with(grads, |grads| {
    ///     encoder.step(grads)?;
    ///     Ok(decoder.step(grads)?)
    /// })?;
    /// scaler.update()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn step_with(&mut self, grads: &mut GradStore, step: impl FnOnce(&GradStore) -> Result<()>) -> Result<bool> {
        if !self.options.enabled {
            step(grads)?;
            return Ok(true);
        }
        if self.stage == Stage::Scaled {
            self.unscale(grads)?;
        }
        let Stage::Unscaled { overflow } = self.stage else {
            return Err(misuse("step", STEPPED));
        };
        if !overflow {
            step(grads)?;
        }
        self.stage = Stage::Stepped { overflow };
        Ok(!overflow)
    }

    /// Ends a training step: after an overflow the scale shrinks, after `growth_interval` steps without it grows.
    ///
    /// # Errors
    /// If neither `unscale` nor `step` was called in this step ([`Error::GradScaler`]).
    pub fn update(&mut self) -> Result<()> {
        if !self.options.enabled {
            return Ok(());
        }
        let (Stage::Unscaled { overflow } | Stage::Stepped { overflow }) = self.stage else {
            return Err(misuse("update", "neither `unscale` nor `step` was called in this step"));
        };
        self.stage = Stage::Scaled;
        if overflow {
            self.scale *= self.options.backoff_factor;
            self.clean_steps = 0;
            return Ok(());
        }
        self.clean_steps += 1;
        if self.clean_steps >= self.options.growth_interval {
            self.clean_steps = 0;
            // Beyond what f32 can hold it stays where it is.
            let larger = self.scale * self.options.growth_factor;
            if (larger as f32).is_finite() {
                self.scale = larger;
            }
        }
        Ok(())
    }

    /// What losses are multiplied by at present; 1 if the scaler is not enabled.
    pub fn current_scale(&self) -> f64 {
        if self.options.enabled { self.scale } else { 1.0 }
    }

    /// What a checkpoint has to hold; its `Display` is text that its `FromStr` reads.
    pub fn state(&self) -> GradScalerState {
        GradScalerState {
            scale: self.scale,
            growth_factor: self.options.growth_factor,
            backoff_factor: self.options.backoff_factor,
            growth_interval: self.options.growth_interval,
            growth_tracker: self.clean_steps,
        }
    }

    /// Goes on from where the scaler was whose `state` it is; call it between training steps.
    pub fn load_state(&mut self, state: GradScalerState) -> Result<()> {
        state.check()?;
        if self.stage != Stage::Scaled {
            return Err(misuse("load_state", "a training step is under way: call `update` first"));
        }
        let GradScalerState { scale, growth_factor, backoff_factor, growth_interval, growth_tracker } = state;
        self.options = GradScalerOptions { growth_factor, backoff_factor, growth_interval, ..self.options };
        (self.scale, self.clean_steps) = (scale, growth_tracker);
        Ok(())
    }
}

/// Not "call `update` first" alone: then a second optimizer would divide the same gradients once more.
const STEPPED: &str = "`step` was called in this step before: `update` has to come before the next backward pass, and \
                       several optimizers step together, in one `step_with`";

fn misuse(call: &'static str, reason: &str) -> Error {
    let reason = format!("{reason} (each training step: scale, unscale if needed, step, update)");
    Error::GradScaler { call, reason }
}

/// What is left of a [`GradScaler`] in a checkpoint: PyTorch's `state_dict`, with its names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerState {
    /// What losses are multiplied by.
    pub scale: f64,
    /// See [`GradScalerOptions`].
    pub growth_factor: f64,
    /// See [`GradScalerOptions`].
    pub backoff_factor: f64,
    /// See [`GradScalerOptions`].
    pub growth_interval: usize,
    /// Steps without overflow since the scale has changed.
    pub growth_tracker: usize,
}

impl GradScalerState {
    fn check(&self) -> Result<()> {
        let refuse = |argument, value: f64, rule| Err(Error::invalid(argument, format!("{value} is not {rule}")));
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return refuse("scale", self.scale, "positive and finite");
        }
        if !(self.growth_factor >= 1.0 && self.growth_factor.is_finite()) {
            return refuse("growth_factor", self.growth_factor, "at least 1 and finite");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor <= 1.0) {
            return refuse("backoff_factor", self.backoff_factor, "above 0 and at most 1");
        }
        if self.growth_interval == 0 {
            return Err(Error::invalid("growth_interval", "it must be at least 1"));
        }
        Ok(())
    }
}

/// A line `name value` for each field.
impl fmt::Display for GradScalerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scale {}", self.scale)?;
        writeln!(f, "growth_factor {}", self.growth_factor)?;
        writeln!(f, "backoff_factor {}", self.backoff_factor)?;
        writeln!(f, "growth_interval {}", self.growth_interval)?;
        writeln!(f, "growth_tracker {}", self.growth_tracker)
    }
}

impl FromStr for GradScalerState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        fn field<T: FromStr>(text: &str, name: &str) -> Result<T> {
            let mut lines = text.lines().filter_map(|line| line.trim().split_once(' '));
            let value = lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim());
            let refuse = |what: String| Error::invalid("the state of a GradScaler", what);
            let value = value.ok_or_else(|| refuse(format!("it has no line `{name} …`")))?;
            value.parse().map_err(|_| refuse(format!("{name} is {value:?}, which is not a number of its kind")))
        }
        let state = Self {
            scale: field(text, "scale")?,
            growth_factor: field(text, "growth_factor")?,
            backoff_factor: field(text, "backoff_factor")?,
            growth_interval: field(text, "growth_interval")?,
            growth_tracker: field(text, "growth_tracker")?,
        };
        state.check()?;
        Ok(state)
    }
}

/// Multiplies this rank's gradients, and says whether any is infinite or NaN; `None` if `grads` has none of them.
fn divide(parameters: &[(String, Var)], grads: &mut GradStore, factor: f64) -> Result<Option<bool>> {
    let present = |(_, var): &&(String, Var)| grads.get(var).is_some();
    let parameters: Vec<_> = parameters.iter().filter(present).collect();
    // Before any is changed.
    if let Some((name, _)) = parameters.iter().find(|(_, var)| grads.get(var).map(Tensor::dtype) == Some(DType::F16)) {
        let reason = "its gradient is in f16, which cannot hold what it is divided to: make the variable in f32, and let \
                      mixed_precision.param_dtype be F16";
        return Err(Error::parameter(name, reason));
    }
    let mut overflow = false;
    // On GPUs all are looked at together, with one wait for the result.
    let mut on_gpu = Vec::new();
    // Where there is no kernel, the sum over all gradients of zeros, or NaN.
    let mut zeros: Option<Tensor> = None;
    for (_, var) in &parameters {
        let Some(grad) = grads.get(var) else { continue };
        if grad.device().is_cpu() && grad.is_contiguous() && grad.elem_count() > 0 {
            let scaling = Unscale { factor, overflow: Cell::new(false) };
            grad.inplace_op1(&scaling)?;
            overflow |= scaling.overflow.get();
        } else if kernels::take(grad.device(), grad.dtype()) {
            let contiguous = grad.detach().contiguous()?;
            if !grad.is_contiguous() {
                grads.insert(var, contiguous.clone());
            }
            on_gpu.push(contiguous);
        } else {
            let grad = grad.detach().affine(factor, 0.0)?;
            let zero = grad.sub(&grad)?.sum_all()?.to_dtype(DType::F32)?;
            zeros = Some(match zeros {
                Some(zeros) => (&zeros + zero.to_device(zeros.device())?)?,
                None => zero,
            });
            grads.insert(var, grad);
        }
    }
    if !on_gpu.is_empty() {
        let extent = kernels::rescale_measured(&on_gpu.iter().collect::<Vec<_>>(), factor)?;
        overflow |= !extent.largest.is_finite();
    }
    if let Some(zeros) = zeros {
        overflow |= zeros.to_scalar::<f32>()? != 0.0;
    }
    Ok((!parameters.is_empty()).then_some(overflow))
}

/// Multiplies a tensor by a factor, and notes whether a number in it was infinite or NaN.
struct Unscale {
    factor: f64,
    overflow: Cell<bool>,
}

impl InplaceOp1 for Unscale {
    fn name(&self) -> &'static str {
        "unscale"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        dispatch!(storage.dtype(), self.name(), T => {
            type Acc = <T as Element>::Acc;
            let factor = Acc::from_f64(self.factor);
            let mut finite = true;
            for value in slice_mut::<T>(storage, layout)? {
                let wide = value.widen();
                finite &= wide.is_finite();
                *value = T::narrow(wide * factor);
            }
            self.overflow.set(!finite);
            Ok(())
        })
    }
}
