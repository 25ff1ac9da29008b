//! Averages of weights over the steps.
use super::rule::state_dtype;
use crate::placement::Placement;
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use crate::tensor::borrow::zip;
use crate::tensor::{DTYPES, Element, dispatch};
use crate::variables::{Parameters, check_named};
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var, WithDType};
use candle_ddp_base::debug_fields;

/// A moving average of a model's weights: PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`. Without a decay, all weights count
/// equally, as in stochastic weight averaging (SWA): `AveragedModel` as it is.
///
/// By default, the first [`update`](Self::update) copies the weights, as in PyTorch; each further one moves the average by
/// `1 - decay` of the distance towards them. [`starting_from_construction`](Self::starting_from_construction) begins with the weights from the construction instead.
/// Averages of 16-bit weights are kept in f32, since their own dtype would round such small changes away (PyTorch keeps that
/// dtype). Variables of integer type are left alone. Buffers are averaged if they are given.
///
/// Under DDP all ranks have the same weights and so the same average, without communication. Of a sharded model, each rank averages its
/// pieces: [`apply`](Self::apply) evaluates the averaged model, and [saves](crate::checkpoint) it as any other. A
/// [`Checkpointer`](crate::checkpoint::Checkpointer) saves the `Ema` itself, and loads it on any number of ranks, with or without sharding.
pub struct Ema {
    decay: Option<f64>,
    from_construction: bool,
    updates: u64,
    slots: Vec<Slot>,
    /// Whether the names of the parameters are the caller's.
    named: bool,
    /// The weights that [`apply`](Self::apply) replaced.
    replaced: Option<Vec<Tensor>>,
}

/// The kind of its state.
const KIND: &str = "Ema";
/// For which parameters need names.
const SAVED: &str = "an average to be saved or loaded";

struct Slot {
    name: String,
    var: Var,
    placement: Placement,
    /// The variable's storage in one dimension.
    flat: Tensor,
    average: Tensor,
}

debug_fields!(Ema: |this| decay = this.decay, from_construction = this.from_construction, updates = this.updates,
    parameters = this.slots.len(), is_applied = this.replaced.is_some());

impl Ema {
    /// Averages `parameters`, such as a `&DistributedDataParallel` or a `&VarMap`. An average of a `Vec<Var>` cannot be saved. `decay`
    /// is the share of the average that stays in each update, from 0 to 1, such as 0.999. With None, averages are equal, by a share of
    /// `n / (n + 1)` after `n` updates.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] unless `0 <= decay <= 1`; [`Error::Parameter`] for a parameter whose name is
    /// given twice, whose dtype has no kernel, or that is not contiguous.
    pub fn new(parameters: impl Into<Parameters>, decay: impl Into<Option<f64>>) -> Result<Self> {
        let (Parameters { variables, named }, decay) = (parameters.into(), decay.into());
        check_decay(decay)?;
        let mut names = std::collections::HashSet::new();
        let mut slots = Vec::with_capacity(variables.len());
        for (name, var) in variables {
            if !names.insert(name.clone()) {
                let reason = "two parameters have this name: build each model under a prefix, such as vb.pp(\"encoder\"), \
                              or make an Ema for each";
                return Err(Error::parameter(name, reason));
            }
            if !var.dtype().is_float() {
                continue;
            }
            let Some(dtype) = state_dtype(var.dtype()) else {
                let (dtype, supported) = (var.dtype(), DTYPES.map(|dtype| dtype.as_str()).join(", "));
                return Err(Error::parameter(
                    name,
                    format!("Ema has no kernel for {dtype:?} (supported: {supported})"),
                ));
            };
            if !var.is_contiguous() {
                let reason = "its variable is not contiguous: make it from a contiguous tensor";
                return Err(Error::parameter(name, reason));
            }
            let flat = var.as_detached_tensor().flatten_all()?;
            let average = widen(&flat, dtype)?;
            slots.push(Slot { name, placement: Placement::of(&var), var, flat, average });
        }
        Ok(Self { decay, from_construction: false, updates: 0, slots, named, replaced: None })
    }

    /// Begins with the weights from the construction, as in most diffusion programs. Otherwise the first update copies the weights, as in
    /// PyTorch.
    pub fn starting_from_construction(self) -> Self {
        Self { from_construction: true, ..self }
    }

    /// Sets the decay of the further updates, or None.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] unless `0 <= decay <= 1`.
    pub fn set_decay(&mut self, decay: impl Into<Option<f64>>) -> Result<()> {
        let decay = decay.into();
        check_decay(decay)?;
        self.decay = decay;
        Ok(())
    }

    /// Moves the average towards the current weights. Call it after the optimizer's step.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] while the averages are applied.
    pub fn update(&mut self) -> Result<()> {
        self.refuse_if_applied("update")?;
        // How many weights the average is of.
        let count = self.updates + u64::from(self.from_construction);
        let equal = count as f64 / (count + 1) as f64;
        let decay = self.decay.filter(|_| count > 0).unwrap_or(equal);
        for slot in &self.slots {
            let dtype = slot.average.dtype();
            if slot.flat.device().is_cpu() {
                dispatch!(slot.flat.dtype(), E => lerp::<E>(&slot.average, &slot.flat, 1. - decay)?, else => ());
            } else {
                let weights = slot.flat.to_dtype(dtype)?;
                // Avoids zero times infinity, which is NaN.
                let moved = if decay == 0. { weights } else { ((&slot.average * decay)? + (weights * (1. - decay))?)? };
                // In place, as on the CPU: the program may hold tensors that `averages` returned.
                slot.average.slice_set(&moved, 0, 0)?;
            }
        }
        self.updates += 1;
        Ok(())
    }

    /// Puts the averages into the variables, to evaluate or save the averaged model, and keeps the replaced weights for
    /// [`restore`](Self::restore). Do not evaluate with applied averages between a forward pass and its backward pass,
    /// which would then use the averages.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the averages are already applied.
    pub fn apply(&mut self) -> Result<()> {
        self.refuse_if_applied("apply")?;
        let replaced = self.slots.iter().map(|slot| slot.var.as_detached_tensor().copy());
        let replaced = replaced.collect::<candle_core::Result<Vec<_>>>()?;
        self.copy_to_parameters()?;
        self.replaced = Some(replaced);
        Ok(())
    }

    /// Puts back the weights that [`apply`](Self::apply) replaced.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the averages are not applied.
    pub fn restore(&mut self) -> Result<()> {
        let Some(replaced) = self.replaced.take() else {
            return Err(Error::invalid("restore", "the averages are not applied, so there is nothing to restore"));
        };
        for (slot, weights) in self.slots.iter().zip(&replaced) {
            slot.var.set(weights)?;
        }
        Ok(())
    }

    /// Puts the averages into the variables permanently.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] while the averages are applied.
    pub fn copy_to_parameters(&self) -> Result<()> {
        self.refuse_if_applied("copy_to_parameters")?;
        for slot in &self.slots {
            slot.var.set(&slot.average.to_dtype(slot.var.dtype())?.reshape(slot.var.shape())?)?;
        }
        Ok(())
    }

    /// The averages under the parameters' names, in the dtype in which they are kept: a model's state dict. The tensors
    /// change with each [`update`](Self::update).
    ///
    /// # Errors
    /// Returns [`Error::Parameter`] for a sharded model, of whose averages each rank has pieces, and an error of candle.
    pub fn averages(&self) -> Result<Vec<(String, Tensor)>> {
        if let Some(slot) = self.slots.iter().find(|slot| slot.placement.is_sharded()) {
            let reason = "its average is this rank's piece, since its model is sharded: save the Ema with a Checkpointer, or call `apply`, save the \
                          model, and call `restore`";
            return Err(Error::parameter(&slot.name, reason));
        }
        let averages = self.slots.iter().map(|slot| Ok((slot.name.clone(), slot.average.reshape(slot.var.shape())?)));
        averages.collect()
    }

    /// The number of calls of [`update`](Self::update): PyTorch's `n_averaged`.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    fn refuse_if_applied(&self, call: &'static str) -> Result<()> {
        if self.replaced.is_some() {
            return Err(Error::invalid(call, "the variables hold the averages: call restore first"));
        }
        Ok(())
    }
}

fn check_decay(decay: Option<f64>) -> Result<()> {
    match decay.filter(|decay| !(0. ..=1.).contains(decay)) {
        Some(decay) => Err(Error::invalid("decay", format!("it must be from 0 to 1, but is {decay}"))),
        None => Ok(()),
    }
}

/// Returns `tensor` in `dtype`, with its own storage.
fn widen(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    Ok(if tensor.dtype() == dtype { tensor.copy()? } else { tensor.to_dtype(dtype)? }.detach())
}

/// Computes `average += (weights - average) × weight` like PyTorch's lerp: with weight 1, the weights themselves.
fn lerp<E: Element>(average: &Tensor, weights: &Tensor, weight: f64) -> Result<()> {
    let weight = E::Real::from_f64(weight);
    let whole = E::Real::from_f64(1.);
    Ok(zip::<E::Real, E>(average, weights, |averages, weights| {
        for (average, value) in averages.iter_mut().zip(weights) {
            let value = value.widen();
            *average = if weight == whole { value } else { *average + (value - *average) * weight };
        }
    })?)
}

/// Contains `updates`, and `average.{name}` for each parameter. For a sharded model it is saved in parts, one from each rank. Both kinds
/// load into both kinds of models, with any number of ranks.
impl StateDict for Ema {
    /// # Errors
    /// [`Error::InvalidArgument`] while the averages are applied: the weights would not be in a checkpoint, but the averages
    /// twice. [`Error::Parameter`] for a sharded model.
    fn state_dict(&self) -> Result<Dict> {
        self.refuse_if_applied("state_dict")?;
        check_named(self.named, SAVED)?;
        self.averages()?;
        Ok(self.share()?.dict)
    }

    fn load_state_dict(&mut self, dict: &Dict) -> Result<()> {
        self.prepare(Saved::Whole(dict.clone()), 0, 1)?()
    }

    fn share(&self) -> Result<Share> {
        self.refuse_if_applied("state_dict")?;
        check_named(self.named, SAVED)?;
        let mut share = Share::begin(KIND, self.slots.iter().any(|slot| slot.placement.is_sharded()))?;
        share.dict.insert("updates".to_string(), state::count(self.updates)?);
        for Slot { name, var, placement, average, .. } in &self.slots {
            share.insert(&format!("average.{name}"), placement, average.reshape(var.shape())?)?;
        }
        Ok(share)
    }

    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        self.refuse_if_applied("load_state_dict")?;
        check_named(self.named, SAVED)?;
        let mut loader = Loader::of(&saved, KIND, rank)?;
        let updates = loader.count("updates")?;
        let mut averages = Vec::new();
        for Slot { name, placement, average, .. } in &self.slots {
            let loaded = loader.part(&format!("average.{name}"), placement, average.dtype())?;
            averages.push(loaded.to_device(average.device())?.detach());
        }
        loader.finish()?;
        Ok(Box::new(move || {
            // In place: the program may hold tensors that `averages` returned.
            for (slot, average) in self.slots.iter().zip(&averages).filter(|(_, average)| average.elem_count() > 0) {
                slot.average.slice_set(average, 0, 0)?;
            }
            self.updates = updates;
            Ok(())
        }))
    }
}
