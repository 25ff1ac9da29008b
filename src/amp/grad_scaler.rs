//! Scales losses, and skips steps that overflow.
mod options;
mod state;
mod unscaling;

pub use options::GradScalerOptions;

use crate::ddp::gradients::scaled;
use crate::ddp::gradients::verdict::Verdict;
use crate::process_group::ProcessGroup;
use crate::variables::Parameters;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use candle_ddp_base::debug_fields;
use options::MIN_SCALE;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Multiplies losses by a scale, so that small gradients do not vanish in f16, and divides the gradients by it again.
/// If gradients overflow, all ranks skip the step. PyTorch's `GradScaler`.
///
/// ```
/// use candle_ddp::amp::{Autocast, GradScaler, GradScalerOptions};
/// use candle_ddp::nn::linear;
/// use candle_ddp::{DdpOptions, Precision, prelude::*};
///
/// fn main() -> Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         let precision = Precision::Autocast(Autocast::Lists(DType::F16));
///         let options = DdpOptions { precision, ..Default::default() };
///         let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
///         let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
///         let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
///         for step in 0..8 {
///             let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?;
///             let loss = (ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()? / 4.)?; // a step of 4 batches
///             let is_last = step % 4 == 3;
///             let _unsynchronised = ddp.sync_if(is_last); // nothing is sent before the last batch
///             let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
///             if is_last {
///                 optimizer.unscale(&mut scaler, &mut grads)?; // so that clipping sees the gradients themselves
///                 optimizer.clip_grad_norm(&mut grads, 1.)?;
///                 scaler.step(&mut optimizer, &mut grads)?; // skipped on all ranks if a gradient is not finite
///                 scaler.update()?;
///             }
///         }
///         Ok(())
///     })?;
///     Ok(())
/// }
/// ```
/// In each training step, call [`scale`](Self::scale), then [`unscale`](Self::unscale) if the program inspects or clips
/// the gradients, then [`step`](Self::step) and [`update`](Self::update), the same on all ranks. An overflow on one
/// rank counts for all.
///
/// Several optimizers may share a scaler. They step together, in one
/// [`step_if_finite`](Self::step_if_finite), which divides all gradients at once; a second `step` before `update` (PyTorch's
/// way, one per optimizer) is refused. An overflow skips the step of all optimizers, where PyTorch decides for each.
///
/// Save and load it like an optimizer, through [`StateDict`](crate::checkpoint::StateDict).
pub struct GradScaler {
    group: ProcessGroup,
    parameters: Vec<(String, Var)>,
    options: GradScalerOptions,
    scale: f64,
    /// Steps without overflow since the scale last changed.
    clean_steps: usize,
    /// The verdict on the last step, if the scale and the steps do not take it into account yet.
    late: Option<Arc<Verdict>>,
    stage: Stage,
    /// Whether a loss was scaled in this step.
    has_scaled: AtomicBool,
    /// The first parameter whose gradient overflowed, if it is known: it is looked for only when the scale is about to sink below 1.
    overflowed: Option<String>,
}

/// The progress of a training step. The verdict is bad if any rank found an infinity or NaN.
#[derive(Clone, Debug)]
enum Stage {
    Scaled,
    Unscaled(Arc<Verdict>),
    Stepped(Arc<Verdict>),
}

debug_fields!(GradScaler: |this| parameters = this.parameters.len(), options = this.options, scale = this.scale,
    clean_steps = this.clean_steps, stage = this.stage);

impl GradScaler {
    /// A scaler for the gradients of `parameters`, such as a `&DistributedDataParallel`, which the ranks of `group` use
    /// together. It also knows the parameters of an optimizer that it steps, and of every DDP model whose gradients are in the
    /// store, such as one that was made anew with thawed parameters. A program that steps yet other variables, in
    /// [`step_if_finite`](Self::step_if_finite), must give them here: their gradients are divided, but an overflow in them skips no step.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a scale that f32 cannot carry, a growth factor that is below 1
    /// or not finite, a backoff factor that is not above 0 or is above 1, or a growth interval of 0.
    pub fn new(group: &ProcessGroup, parameters: impl Into<Parameters>, options: GradScalerOptions) -> Result<Self> {
        let mut seen: HashSet<TensorId> = HashSet::new();
        let parameters = parameters.into().into_iter().filter(|(_, var)| seen.insert(var.id())).collect();
        options.check("init_scale")?;
        let (scale, stage) = (options.init_scale, Stage::Scaled);
        let has_scaled = AtomicBool::new(false);
        Ok(Self {
            group: group.clone(),
            parameters,
            options,
            scale,
            clean_steps: 0,
            late: None,
            stage,
            has_scaled,
            overflowed: None,
        })
    }

    /// Returns `loss` times the scale, at least in f32; pass it to `backward`.
    ///
    /// The gradients are known to be scaled: until [`unscale`](Self::unscale) has divided them, clipping and the optimizers of
    /// [`optim`](crate::optim) refuse them.
    ///
    /// # Errors
    /// candle's error if the loss cannot be converted to f32.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if !self.options.enabled {
            return Ok(loss.clone());
        }
        let dtype = crate::tensor::accumulator(loss.dtype());
        self.has_scaled.store(true, Ordering::Relaxed);
        Ok(scaled::mark(&(loss.to_dtype(dtype)? * self.settled()?.0)?)?)
    }

    /// Like [`step`](Self::step), for several optimizers, and for those that do not implement
    /// [`Optimizer`](crate::optim::Optimizer), such as candle's own: calls `step` if all gradients are finite on all
    /// ranks.
    ///
    /// ```
    /// # use candle_core::backprop::GradStore;
    /// # use candle_ddp::{Result, amp::GradScaler, optim::Optimizer};
    /// # fn two(scaler: &mut GradScaler, encoder: &mut impl Optimizer, decoder: &mut impl Optimizer, grads: &mut GradStore) -> Result<()> {
    /// scaler.step_if_finite(grads, |grads| {
    ///     encoder.step(grads)?;
    ///     decoder.step(grads)
    /// })?;
    /// scaler.update()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`unscale`](Self::unscale), if it was not called before, and of `step`; [`Error::GradScaler`] for a second call before
    /// [`update`](Self::update).
    pub fn step_if_finite(
        &mut self,
        grads: &mut GradStore,
        step: impl FnOnce(&GradStore) -> Result<()>,
    ) -> Result<bool> {
        if !self.options.enabled {
            step(grads)?;
            return Ok(true);
        }
        if self.is_scaled() {
            self.unscale(grads)?;
        }
        let Stage::Unscaled(verdict) = &self.stage else {
            return Err(misuse("step", STEPPED));
        };
        let (verdict, overflow) = (Arc::clone(verdict), verdict.is_bad()?);
        if !overflow {
            step(grads)?;
        }
        self.stage = Stage::Stepped(verdict);
        Ok(!overflow)
    }

    /// Ends a training step: the scale shrinks after an overflow, and grows after `growth_interval` steps without
    /// one. If it falls below 1, training has stalled, and rank 0 warns, again when it reaches the smallest scale that
    /// f32 can carry.
    ///
    /// # Errors
    /// Returns [`Error::GradScaler`] if neither `unscale` nor `step` was called in this step.
    pub fn update(&mut self) -> Result<()> {
        if !self.options.enabled {
            return Ok(());
        }
        let (Stage::Unscaled(verdict) | Stage::Stepped(verdict)) = self.stage.clone() else {
            return Err(misuse("update", "neither `unscale` nor `step` was called in this step"));
        };
        self.stage = Stage::Scaled;
        self.has_scaled = AtomicBool::new(false);
        let is_late = verdict.numbers().is_some();
        self.late = Some(verdict);
        if is_late { Ok(()) } else { self.settle() }
    }

    /// The scale and the number of steps without overflow after the last step.
    fn settled(&self) -> Result<(f64, usize)> {
        let Self { scale, clean_steps, options, .. } = self;
        let Some(verdict) = &self.late else { return Ok((*scale, *clean_steps)) };
        if verdict.is_bad()? {
            return Ok(((scale * options.backoff_factor).max(MIN_SCALE), 0));
        }
        if clean_steps + 1 < options.growth_interval {
            return Ok((*scale, clean_steps + 1));
        }
        // The scale does not grow beyond the range of f32.
        let larger = scale * options.growth_factor;
        Ok((if (larger as f32).is_finite() { larger } else { *scale }, 0))
    }

    /// Takes the last step into account.
    fn settle(&mut self) -> Result<()> {
        if self.late.is_none() {
            return Ok(());
        }
        let (before, settled) = (self.scale, self.settled()?);
        (self.scale, self.clean_steps) = settled;
        self.late = None;
        let overflowed =
            self.overflowed.take().map_or(String::new(), |name| format!(" (first the gradient of {name})"));
        if self.group.rank() == 0 && has_sunk(before, self.scale) {
            warn_aloud(format_args!(
                "GradScaler: the scale fell to {:e}, since gradients overflow even without scaling{overflowed}, and every \
                 such step was skipped: the training has diverged, or its inputs contain infinities or NaNs. Lower the \
                 learning rate, or check the inputs; in a run without the scaler, OnNonFinite::Stop names the rank too",
                self.scale
            ));
        }
        Ok(())
    }

    /// The factor for losses in this step; 1 if the scaler is not enabled. On a GPU, this waits for the verdict on the last step.
    pub fn current_scale(&self) -> f64 {
        // If the GPU has failed, the next call is an error.
        if self.options.enabled { self.settled().map_or(self.scale, |(scale, _)| scale) } else { 1.0 }
    }
}

/// Whether a scale has fallen so low that the training has stalled.
fn has_sunk(before: f64, after: f64) -> bool {
    [1., 2. * MIN_SCALE].iter().any(|limit| before >= *limit && after < *limit)
}

/// The text mentions `step_if_finite` too: with `update` alone, a second optimizer would divide the same gradients again.
const STEPPED: &str = "`step` was already called in this step: call `update` before the next backward pass, and step \
                       several optimizers together, in one `step_if_finite`";

fn misuse(call: &'static str, reason: &str) -> Error {
    let reason = format!("{reason} (each training step: scale, unscale if needed, step, update)");
    Error::GradScaler { call, reason }
}
