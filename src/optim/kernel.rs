//! The fused kernels of this crate's own rules.
use crate::kernels::{Rule, Scalars};
use crate::tensor::borrow::{slice, slice_mut, with_slices_mut};
use crate::tensor::{self, Element, Real, dispatch};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor};
use std::cell::Cell;
use std::fmt::Debug;

/// The step of a parameter and the scale of its gradient.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// The number of updates of this parameter, including this one.
    pub(crate) step: u64,
    /// The factor for gradients.
    pub(crate) gradient_scale: f64,
}

/// Parts of equal length of a parameter, its gradient and its state.
pub(super) struct Slices<'a, 'b, E: Element> {
    /// Changed in place.
    pub(super) parameter: &'a mut [E],
    /// Read only.
    pub(super) gradient: &'a [E],
    /// Changed in place; one for each of the rule's states.
    pub(super) states: &'a mut [&'b mut [E::Real]],
}

/// Two sums over a parameter.
pub(super) type Sums = [f64; 2];

/// A rule in one pass over parameter, gradient and state, on slices of the CPU and as kernels of a GPU.
pub(super) trait Kernel: Debug {
    /// The norm of all gradients of the optimizer above which they are scaled down.
    fn max_grad_norm(&self) -> Option<f64> {
        None
    }

    /// Whether an update depends on sums over the whole parameter, which [`prepare`](Self::prepare) computes.
    const NEEDS_SUMS: bool = false;

    /// Runs before [`apply`](Self::apply) if that needs sums; returns the sums over this part of the parameter.
    fn prepare<E: Element>(&self, _: Moment, _: Slices<'_, '_, E>) -> Sums {
        Sums::default()
    }

    /// Updates parameter and state. `sums` are over all parts of the parameter.
    fn apply<E: Element>(&self, moment: Moment, sums: Sums, slices: Slices<'_, '_, E>);

    /// The CUDA kernels of this rule.
    const RULE: Rule;

    /// The arguments of the CUDA kernels.
    fn scalars(&self, moment: Moment) -> Scalars;
}

/// The kernels of a rule. Only this crate can make one, so only its rules have any.
#[derive(Clone, Copy, Debug)]
pub struct Fused<'a>(&'a dyn AnyKernel);

impl<'a> Fused<'a> {
    pub(super) fn new(kernel: &'a impl Kernel) -> Self {
        Self(kernel)
    }

    pub(crate) fn rule(self) -> Rule {
        self.0.rule()
    }

    pub(super) fn needs_sums(self) -> bool {
        self.0.needs_sums()
    }

    pub(crate) fn max_grad_norm(self) -> Option<f64> {
        self.0.norm_limit()
    }

    pub(crate) fn scalars(self, moment: Moment) -> Scalars {
        self.0.arguments(moment)
    }

    /// Calls [`Kernel::prepare`] for tensors on the CPU.
    pub(super) fn prepare(self, operands: Operands) -> Result<Sums> {
        let sums = Cell::new(Sums::default());
        self.0.run(operands, Pass::Prepare(&sums))?;
        Ok(sums.get())
    }

    /// Calls [`Kernel::apply`] for tensors on the CPU.
    pub(super) fn apply(self, operands: Operands, sums: Sums) -> Result<()> {
        self.0.run(operands, Pass::Apply(sums))
    }
}

/// The flat tensors of an update.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub(super) moment: Moment,
    pub(super) parameter: &'a Tensor,
    pub(super) gradient: &'a Tensor,
    pub(super) states: &'a [Tensor],
}

/// [`Kernel`] without its types.
trait AnyKernel: Debug {
    fn rule(&self) -> Rule;
    fn needs_sums(&self) -> bool;
    fn norm_limit(&self) -> Option<f64>;
    fn arguments(&self, moment: Moment) -> Scalars;
    fn run(&self, operands: Operands, pass: Pass) -> Result<()>;
}

impl<K: Kernel> AnyKernel for K {
    fn rule(&self) -> Rule {
        K::RULE
    }

    fn needs_sums(&self) -> bool {
        K::NEEDS_SUMS
    }

    fn norm_limit(&self) -> Option<f64> {
        self.max_grad_norm()
    }

    fn arguments(&self, moment: Moment) -> Scalars {
        self.scalars(moment)
    }

    fn run(&self, Operands { moment, parameter, gradient, states }: Operands, pass: Pass) -> Result<()> {
        parameter.inplace_op2(gradient, &Update { kernel: self, moment, states, pass })
    }
}

#[derive(Clone, Copy)]
enum Pass<'a> {
    Prepare(&'a Cell<Sums>),
    Apply(Sums),
}

struct Update<'a, K> {
    kernel: &'a K,
    moment: Moment,
    states: &'a [Tensor],
    pass: Pass<'a>,
}

impl<K: Kernel> Update<'_, K> {
    fn run<E: Element>(&self, p: &mut CpuStorage, pl: &Layout, g: &CpuStorage, gl: &Layout) -> Result<()> {
        let parameter = slice_mut::<E>(p, pl)?;
        let gradient = slice::<E>(g, gl)?;
        with_slices_mut::<E::Real>(self.states, &mut |states| {
            let slices = Slices { parameter: &mut *parameter, gradient, states };
            tensor::vectorise!(|| match self.pass {
                Pass::Prepare(sums) => sums.set(self.kernel.prepare(self.moment, slices)),
                Pass::Apply(sums) => self.kernel.apply(self.moment, sums, slices),
            });
        })
    }
}

impl<K: Kernel> InplaceOp2 for Update<'_, K> {
    fn name(&self) -> &'static str {
        "optimizer step"
    }

    fn cpu_fwd(&self, p: &mut CpuStorage, pl: &Layout, g: &CpuStorage, gl: &Layout) -> Result<()> {
        dispatch!(p.dtype(), self.name(), E => self.run::<E>(p, pl, g, gl))
    }
}

/// `1 - beta^step`.
pub(super) fn bias_correction(beta: f64, step: u64) -> f64 {
    1. - beta.powf(step as f64)
}

/// Updates the first and second moment with a gradient, and returns them.
#[inline(always)]
pub(super) fn moments<R: Real>(m: &mut R, v: &mut R, gradient: R, rates: &MomentRates<R>) -> (R, R) {
    *m = *m * rates.beta1 + gradient * rates.rate1;
    *v = *v * rates.beta2 + gradient * gradient * rates.rate2;
    (*m, *v)
}

/// How fast moments follow gradients.
pub(super) struct MomentRates<R> {
    beta1: R,
    rate1: R,
    beta2: R,
    rate2: R,
}

impl<R: Real> MomentRates<R> {
    pub(super) fn new(beta1: f64, beta2: f64) -> Self {
        Self::with_rate1(beta1, beta2, 1. - beta1)
    }

    pub(super) fn with_rate1(beta1: f64, beta2: f64, rate1: f64) -> Self {
        let real = R::from_f64;
        Self { beta1: real(beta1), rate1: real(rate1), beta2: real(beta2), rate2: real(1. - beta2) }
    }
}
