//! From tensors to the slices that kernels work on: candle lends the storage of one tensor mutably, by an in-place
//! operation, so for several such operations are nested.
use super::element::Element;
use super::rule::{Moment, Slices, Sums, UpdateRule};
use crate::kernels::{self, Operands};
use crate::simd;
use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Result, Storage, Tensor};
use half::{bf16, f16};
use std::cell::{Cell, RefCell};

/// An update of one part of a parameter, contiguous, with a contiguous gradient of the same dtype and its states, which
/// have storage of their own each. All have the same number of elements and are on the same device.
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

/// [`Kernel::prepare`](super::rule::Kernel::prepare) for each part.
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

/// [`Kernel::update`](super::rule::Kernel::update) for each part with its sums.
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

/// Those on the CPU, which are updated one by one, and those on GPUs, which are updated together.
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

/// Runs `f` on the elements of two contiguous tensors, of which it may change the first; they may differ in dtype.
pub(super) fn zip<D: Element, S: Element>(
    destination: &Tensor,
    source: &Tensor,
    f: impl Fn(&mut [D], &[S]),
) -> Result<()> {
    destination.inplace_op2(source, &Zip(f, std::marker::PhantomData))
}

/// Runs `f` on the elements of a contiguous tensor in main memory.
pub(super) fn read<E: Element, T>(tensor: &Tensor, f: impl FnOnce(&[E]) -> T) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(part(E::slice(storage), layout)?)),
        _ => candle_core::bail!("a tensor on {:?} was given to a kernel for the CPU", tensor.device().location()),
    }
}

/// Runs `f` on the elements of a contiguous tensor in main memory, which it may change.
pub(super) fn write<E: Element>(tensor: &Tensor, f: impl Fn(&mut [E])) -> Result<()> {
    with_slices::<E>(std::slice::from_ref(tensor), &mut |slices| {
        slices.iter_mut().for_each(|slice| f(slice));
    })
}

fn part<'a, E>(elements: Option<&'a [E]>, layout: &Layout) -> Result<&'a [E]> {
    match (elements, layout.contiguous_offsets()) {
        (Some(elements), Some((start, end))) if end <= elements.len() => Ok(&elements[start..end]),
        _ => candle_core::bail!("an optimizer's kernel was given a tensor of another dtype or layout: {layout:?}"),
    }
}

fn part_mut<'a, E>(elements: Option<&'a mut [E]>, layout: &Layout) -> Result<&'a mut [E]> {
    match (elements, layout.contiguous_offsets()) {
        (Some(elements), Some((start, end))) if end <= elements.len() => Ok(&mut elements[start..end]),
        _ => candle_core::bail!("an optimizer's kernel was given a tensor of another dtype or layout: {layout:?}"),
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
        let parameter = part_mut(E::slice_mut(p), pl)?;
        let gradient = part(E::slice(g), gl)?;
        with_slices::<E::Real>(self.states, &mut |states| {
            let slices = Slices { parameter: &mut *parameter, gradient, states };
            simd::vectorise(|| match self.pass {
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
        match p {
            CpuStorage::F32(_) => self.run::<f32>(p, pl, g, gl),
            CpuStorage::F64(_) => self.run::<f64>(p, pl, g, gl),
            CpuStorage::F16(_) => self.run::<f16>(p, pl, g, gl),
            CpuStorage::BF16(_) => self.run::<bf16>(p, pl, g, gl),
            _ => candle_core::bail!("{} has no kernel for this dtype", R::NAME),
        }
    }
}

struct Zip<D, S, F>(F, std::marker::PhantomData<(D, S)>);

impl<D: Element, S: Element, F: Fn(&mut [D], &[S])> InplaceOp2 for Zip<D, S, F> {
    fn name(&self) -> &'static str {
        "zip"
    }

    fn cpu_fwd(&self, dst: &mut CpuStorage, dst_l: &Layout, src: &CpuStorage, src_l: &Layout) -> Result<()> {
        (self.0)(part_mut(D::slice_mut(dst), dst_l)?, part(S::slice(src), src_l)?);
        Ok(())
    }
}

type Body<'f, E> = &'f mut dyn FnMut(&mut [&mut [E]]);
type Opened<'o, 'f, E> = (Vec<&'o mut [E]>, Body<'f, E>);

/// Runs `body` on the elements of all `tensors`, whose storages must differ.
fn with_slices<E: Element>(tensors: &[Tensor], body: Body<E>) -> Result<()> {
    open(tensors, Vec::with_capacity(tensors.len()), body)
}

fn open<E: Element>(tensors: &[Tensor], mut opened: Vec<&mut [E]>, body: Body<E>) -> Result<()> {
    match tensors.split_first() {
        None => {
            body(&mut opened);
            Ok(())
        }
        Some((first, rest)) => first.inplace_op1(&Open { rest, state: RefCell::new(Some((opened, body))) }),
    }
}

/// Adds the storage of one more tensor to those that are open.
struct Open<'a, 'o, 'f, E> {
    rest: &'a [Tensor],
    state: RefCell<Option<Opened<'o, 'f, E>>>,
}

impl<E: Element> InplaceOp1 for Open<'_, '_, '_, E> {
    fn name(&self) -> &'static str {
        "open"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        // candle calls this once; a second call would have nothing to do.
        let Some((mut opened, body)) = self.state.take() else { return Ok(()) };
        opened.push(part_mut(E::slice_mut(storage), layout)?);
        open(self.rest, opened, body)
    }
}

/// A tensor's dtype as a type: `dispatch!(dtype, E => expression with E, else => otherwise)`.
macro_rules! dispatch {
    ($dtype:expr, $E:ident => $body:expr, else => $otherwise:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $E = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $E = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $E = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            _ => $otherwise,
        }
    };
}
pub(super) use dispatch;
