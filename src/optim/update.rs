//! Updates parameters by the kernels of their rule, or by its operations.
use super::kernel::{self, Fused, Moment, Sums};
use super::rule::{UpdateRule, state_dtype};
use crate::error::describe;
use crate::kernels;
use crate::tensor::copy::copy;
use crate::tensor::hold::shares;
use crate::{Error, Result};
use candle_core::{Shape, Tensor};

/// One contiguous part of a parameter, with a contiguous gradient of a dtype that the rule takes and state tensors that each have
/// their own storage. All are one-dimensional, of the same length and on the same device.
pub(super) struct Part<'a, R> {
    pub(super) rule: &'a R,
    /// The parameter's name.
    pub(super) name: &'a str,
    pub(super) moment: Moment,
    pub(super) parameter: &'a Tensor,
    /// The shape in which a rule without kernels gets all tensors.
    pub(super) shape: &'a Shape,
    pub(super) gradient: Tensor,
    pub(super) states: &'a [Tensor],
}

/// Updates parameters that consist of one part each. After a bad `verdict`, those that a GPU updates together do not change.
pub(super) fn update_whole<R: UpdateRule>(parts: &[Part<R>], verdict: Option<&Tensor>) -> Result<()> {
    let (alone, together) = sort(parts);
    for part in alone {
        let sums = if part.needs_sums() { part.prepare()? } else { Sums::default() };
        part.update(sums)?;
    }
    if let Some(rule) = rule_of(&together) {
        kernels::update_whole(rule, &operands(&together), verdict)?;
    }
    Ok(())
}

/// Calls [`Kernel::prepare`](kernel::Kernel::prepare) for each part.
pub(super) fn prepare<R: UpdateRule>(parts: &[Part<R>]) -> Result<Vec<Sums>> {
    let (alone, together) = sort(parts);
    let mut sums = alone.into_iter().map(Part::prepare).collect::<Result<Vec<_>>>()?.into_iter();
    let mut sums_of_gpu = Vec::new().into_iter();
    if let Some(rule) = rule_of(&together) {
        sums_of_gpu = kernels::prepare(rule, &operands(&together))?.into_iter();
    }
    let next = |part: &Part<R>| if part.is_updated_alone() { sums.next() } else { sums_of_gpu.next() };
    Ok(parts.iter().map(next).map(Option::unwrap_or_default).collect())
}

/// Updates each part with its sums.
pub(super) fn update<R: UpdateRule>(parts: &[Part<R>], sums: &[Sums]) -> Result<()> {
    for (part, sums) in parts.iter().zip(sums).filter(|(part, _)| part.is_updated_alone()) {
        part.update(*sums)?;
    }
    let (together, sums): (Vec<_>, Vec<_>) =
        parts.iter().zip(sums).filter(|(part, _)| !part.is_updated_alone()).unzip();
    if let Some(rule) = rule_of(&together) {
        kernels::update(rule, &operands(&together), &sums)?;
    }
    Ok(())
}

/// Separates parts that are updated one by one from those that a GPU updates together.
fn sort<'p, 'a, R: UpdateRule>(parts: &'p [Part<'a, R>]) -> (Vec<&'p Part<'a, R>>, Vec<&'p Part<'a, R>>) {
    parts.iter().partition(|part| part.is_updated_alone())
}

/// The kernels that update `parts` together; `None` without parts.
fn rule_of<R: UpdateRule>(parts: &[&Part<R>]) -> Option<kernels::Rule> {
    parts.first().and_then(|part| part.rule.fused()).map(Fused::rule)
}

fn operands<'p, R: UpdateRule>(parts: &[&'p Part<R>]) -> Vec<kernels::Operands<'p>> {
    let operands = |part: &'p Part<R>| {
        let scalars = part.rule.fused()?.scalars(part.moment);
        let Part { parameter, gradient, states, .. } = part;
        Some(kernels::Operands { parameter, gradient, states, scalars })
    };
    parts.iter().copied().filter_map(operands).collect()
}

impl<R: UpdateRule> Part<'_, R> {
    fn is_updated_alone(&self) -> bool {
        self.parameter.device().is_cpu() || self.rule.fused().is_none()
    }

    fn needs_sums(&self) -> bool {
        self.rule.fused().is_some_and(Fused::needs_sums)
    }

    fn prepare(&self) -> Result<Sums> {
        match self.rule.fused() {
            Some(fused) => Ok(fused.prepare(self.operands())?),
            None => Ok(Sums::default()),
        }
    }

    fn update(&self, sums: Sums) -> Result<()> {
        match self.rule.fused() {
            Some(fused) => Ok(fused.apply(self.operands(), sums)?),
            None => self.update_by_operations(),
        }
    }

    fn operands(&self) -> kernel::Operands<'_> {
        let Self { moment, parameter, ref gradient, states, .. } = *self;
        kernel::Operands { moment, parameter, gradient, states }
    }

    fn update_by_operations(&self) -> Result<()> {
        let dtype = state_dtype(self.parameter.dtype()).unwrap_or(self.parameter.dtype());
        let value = self.parameter.reshape(self.shape)?.to_dtype(dtype)?;
        let mut gradient = self.gradient.reshape(self.shape)?.to_dtype(dtype)?;
        if self.moment.gradient_scale != 1. {
            gradient = (gradient * self.moment.gradient_scale)?;
        }
        let mut states = self.states.iter().map(|state| state.reshape(self.shape)).collect::<Result<Vec<_>, _>>()?;
        let result = self.rule.update(&value, &gradient, &mut states, self.moment.step)?;
        // Everything is there and fits before anything is changed.
        let result = self.take(&result, "the new value", &value)?;
        let names = self.rule.states().iter().zip(&states);
        let states = names.map(|(name, state)| self.take(state, name, &value)).collect::<Result<Vec<_>>>()?;
        for (place, state) in self.states.iter().zip(&states) {
            copy(place, state)?;
        }
        Ok(copy(self.parameter, &result)?)
    }

    /// The flat elements of what the rule returned, in none of the storages that change.
    fn take(&self, tensor: &Tensor, what: &str, like: &Tensor) -> Result<Tensor> {
        if let Err(reason) = fits(tensor, like) {
            return Err(Error::parameter(self.name, format!("{}: {what} {reason}", R::NAME)));
        }
        let mut places = self.states.iter().chain([self.parameter]);
        let tensor =
            if places.any(|place| shares(tensor, place)) { tensor.force_contiguous()? } else { tensor.clone() };
        Ok(tensor.detach().flatten_all()?)
    }
}

/// Refuses a tensor with another shape, dtype or device than `like`.
fn fits(tensor: &Tensor, like: &Tensor) -> Result<(), String> {
    let same_kind = tensor.shape() == like.shape() && tensor.dtype() == like.dtype();
    if same_kind && tensor.device().same_device(like.device()) {
        return Ok(());
    }
    Err(misfit(tensor, like))
}

/// Says how a tensor differs from `like`, whose shape, dtype and device it must have.
pub(super) fn misfit(tensor: &Tensor, like: &Tensor) -> String {
    let of = |tensor: &Tensor| (describe(tensor.dtype(), tensor.shape()), tensor.device().location());
    let ((is, at), (needed, belongs)) = (of(tensor), of(like));
    format!("is {is} on {at:?}, but must be {needed} on {belongs:?}")
}

/// The methods of [`UpdateRule`] for options with a [`Kernel`](super::kernel::Kernel), whose learning rate is their field `lr`.
macro_rules! by_kernel {
    () => {
        fn learning_rate(&self) -> f64 {
            self.lr
        }

        fn set_learning_rate(&mut self, learning_rate: f64) {
            self.lr = learning_rate;
        }

        fn update(
            &self,
            parameter: &candle_core::Tensor,
            gradient: &candle_core::Tensor,
            states: &mut [candle_core::Tensor],
            step: u64,
        ) -> crate::Result<candle_core::Tensor> {
            super::update::update_copies(self, parameter, gradient, states, step)
        }

        fn fused(&self) -> Option<super::kernel::Fused<'_>> {
            Some(super::kernel::Fused::new(self))
        }
    };
}
pub(super) use by_kernel;

/// [`UpdateRule::update`] of a rule with kernels, which run on copies.
pub(super) fn update_copies<R: UpdateRule>(
    rule: &R,
    parameter: &Tensor,
    gradient: &Tensor,
    states: &mut [Tensor],
    step: u64,
) -> Result<Tensor> {
    let invalid = |argument| move |reason: String| Error::invalid(argument, format!("it {reason}"));
    fits(gradient, parameter).map_err(invalid("gradient"))?;
    let Some(dtype) = state_dtype(parameter.dtype()) else {
        return Err(Error::invalid("parameter", format!("its dtype must be a float, but is {:?}", parameter.dtype())));
    };
    if states.len() != rule.states().len() {
        let reason =
            format!("there must be one tensor for each of {:?}, but there are {}", rule.states(), states.len());
        return Err(Error::invalid("states", reason));
    }
    let like = parameter.to_dtype(dtype)?;
    for (name, state) in rule.states().iter().zip(states.iter()) {
        fits(state, &like).map_err(|reason| Error::invalid("states", format!("{name} {reason}")))?;
    }
    let flat = |tensor: &Tensor| tensor.detach().force_contiguous()?.flatten_all();
    let value = flat(parameter)?;
    let new = states.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
    let moment = Moment { step, gradient_scale: 1. };
    let (name, shape, gradient) = ("parameter", parameter.shape(), flat(gradient)?);
    update_whole(&[Part { rule, name, moment, parameter: &value, shape, gradient, states: &new }], None)?;
    for (state, new) in states.iter_mut().zip(new) {
        *state = new.reshape(shape)?;
    }
    Ok(value.reshape(shape)?)
}
