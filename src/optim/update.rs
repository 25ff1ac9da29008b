//! Turns the tensors of a parameter into the slices that an update rule works on.
use super::rule::{Moment, Slices, Sums, UpdateRule};
use crate::kernels::{self, Operands};
use crate::tensor::borrow::{slice, slice_mut, with_slices_mut};
use crate::tensor::{self, Element, dispatch};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor};
use std::cell::Cell;

/// One contiguous part of a parameter, with a contiguous gradient of the same dtype and state tensors that each have
/// their own storage. All have the same number of elements and are on the same device.
pub(super) struct Part<'a, R> {
    pub(super) rule: &'a R,
    pub(super) moment: Moment,
    pub(super) parameter: &'a Tensor,
    pub(super) gradient: Tensor,
    pub(super) states: &'a [Tensor],
}

/// Updates parameters that consist of one part each.
pub(super) fn update_whole<R: UpdateRule>(parts: &[Part<R>]) -> crate::Result<()> {
    let (on_cpu, on_gpu) = sort(parts);
    for part in on_cpu {
        let sums = if R::NEEDS_SUMS { part.prepare()? } else { Sums::default() };
        part.update(sums)?;
    }
    if !on_gpu.is_empty() {
        kernels::update_whole(R::RULE, &operands(&on_gpu))?;
    }
    Ok(())
}

/// Calls [`Kernel::prepare`](super::rule::Kernel::prepare) for each part.
pub(super) fn prepare<R: UpdateRule>(parts: &[Part<R>]) -> crate::Result<Vec<Sums>> {
    let (on_cpu, on_gpu) = sort(parts);
    let mut sums = on_cpu.into_iter().map(Part::prepare).collect::<Result<Vec<_>>>()?.into_iter();
    let mut sums_of_gpu = Vec::new().into_iter();
    if !on_gpu.is_empty() {
        sums_of_gpu = kernels::prepare(R::RULE, &operands(&on_gpu))?.into_iter();
    }
    let next = |part: &Part<R>| if part.is_on_cpu() { sums.next() } else { sums_of_gpu.next() };
    Ok(parts.iter().map(next).map(Option::unwrap_or_default).collect())
}

/// Calls [`Kernel::update`](super::rule::Kernel::update) for each part with its sums.
pub(super) fn update<R: UpdateRule>(parts: &[Part<R>], sums: &[Sums]) -> crate::Result<()> {
    for (part, sums) in parts.iter().zip(sums).filter(|(part, _)| part.is_on_cpu()) {
        part.update(*sums)?;
    }
    let (on_gpu, sums): (Vec<_>, Vec<_>) = parts.iter().zip(sums).filter(|(part, _)| !part.is_on_cpu()).unzip();
    if !on_gpu.is_empty() {
        kernels::update(R::RULE, &operands(&on_gpu), &sums)?;
    }
    Ok(())
}

/// Separates parts on the CPU, which are updated one by one, from parts on GPUs, which are updated together.
fn sort<'p, 'a, R: UpdateRule>(parts: &'p [Part<'a, R>]) -> (Vec<&'p Part<'a, R>>, Vec<&'p Part<'a, R>>) {
    parts.iter().partition(|part| part.is_on_cpu())
}

fn operands<'p, R: UpdateRule>(parts: &[&'p Part<R>]) -> Vec<Operands<'p>> {
    let operands = |Part { rule, moment, parameter, gradient, states }: &'p Part<R>| Operands {
        parameter,
        gradient,
        states,
        scalars: rule.scalars(*moment),
    };
    parts.iter().copied().map(operands).collect()
}

impl<R: UpdateRule> Part<'_, R> {
    fn is_on_cpu(&self) -> bool {
        self.parameter.device().is_cpu()
    }

    fn prepare(&self) -> Result<Sums> {
        let sums = Cell::new(Sums::default());
        self.run(Pass::Prepare(&sums))?;
        Ok(sums.get())
    }

    fn update(&self, sums: Sums) -> Result<()> {
        self.run(Pass::Update(sums))
    }

    fn run(&self, pass: Pass) -> Result<()> {
        let Self { rule, moment, states, .. } = *self;
        self.parameter.inplace_op2(&self.gradient, &Update { rule, moment, states, pass })
    }
}

#[derive(Clone, Copy)]
enum Pass<'a> {
    Prepare(&'a Cell<Sums>),
    Update(Sums),
}

struct Update<'a, R> {
    rule: &'a R,
    moment: Moment,
    states: &'a [Tensor],
    pass: Pass<'a>,
}

impl<R: UpdateRule> Update<'_, R> {
    fn run<E: Element>(&self, p: &mut CpuStorage, pl: &Layout, g: &CpuStorage, gl: &Layout) -> Result<()> {
        let parameter = slice_mut::<E>(p, pl)?;
        let gradient = slice::<E>(g, gl)?;
        with_slices_mut::<E::Real>(self.states, &mut |states| {
            let slices = Slices { parameter: &mut *parameter, gradient, states };
            tensor::vectorise!(|| match self.pass {
                Pass::Prepare(sums) => sums.set(self.rule.prepare(self.moment, slices)),
                Pass::Update(sums) => self.rule.update(self.moment, sums, slices),
            });
        })
    }
}

impl<R: UpdateRule> InplaceOp2 for Update<'_, R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn cpu_fwd(&self, p: &mut CpuStorage, pl: &Layout, g: &CpuStorage, gl: &Layout) -> Result<()> {
        dispatch!(p.dtype(), R::NAME, E => self.run::<E>(p, pl, g, gl))
    }
}
