//! The layer on CUDA: products by cuBLAS, and one kernel for the rest of each step.
use super::cell::Cell;
use super::plan::Plan;
use crate::linear::cuda::gradients as linear_gradients;
use crate::linear::product::{factor, product, target};
use crate::view::cat;
use candle_core::{CudaDevice, DType, Result, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::function::{Function, apply, is_tracked};
use candle_ddp_tensor::kernels::{
    Address, Grid, Kernel, Launch, Output, Target, address, address_or_none, launch, supported,
};

/// A pass over the steps.
struct Pass<'a, C> {
    plan: &'a Plan<C>,
    device: &'a CudaDevice,
    dtype: DType,
    /// The dtype of sums.
    wide: DType,
    kernel: Kernel,
}

impl<'a, C: Cell> Pass<'a, C> {
    fn new(plan: &'a Plan<C>, x: &'a Tensor, kernel: Kernel) -> Result<Self> {
        supported(x.dtype(), C::NAME)?;
        Ok(Self { plan, device: x.device().as_cuda_device()?, dtype: x.dtype(), wide: accumulator(x.dtype()), kernel })
    }

    /// Launches the kernel for `count` rows from `start` on, of sequences of which `begun` had a step before in this pass.
    fn step(&self, (start, count, begun): (usize, usize, usize), tensors: &[Address]) -> Result<()> {
        let Plan { steps, hidden, cells, .. } = self.plan;
        let numbers = &[start, count, begun, steps.rows(), steps.batch(), *hidden, usize::from(*cells)];
        let grid = Grid::Threads(count * hidden);
        Ok(launch(self.device, Launch { kernel: self.kernel, dtype: self.dtype, grid, tensors, numbers, reals: &[] })?)
    }
}

/// [`Layer::run`](super::layer::Layer::run), of which these are the arguments of the plan. All tensors are contiguous.
pub(super) fn run<C: Cell>(plan: Plan<C>, arguments: &[&Tensor]) -> Result<Tensor> {
    let Plan { steps, inputs, hidden, has_bias, cells, .. } = &plan;
    let (rows, batch, hidden, width) = (steps.rows(), steps.batch(), *hidden, C::GATES * *hidden);
    let [x, w_ih, w_hh, rest @ ..] = arguments else { candle_core::bail!("{}: arguments are missing", C::NAME) };
    let (states, biases) = rest.split_at(C::STATES);
    if rows == 0 {
        return cat(states, 0); // what the states were before no step
    }
    let pass = Pass::new(&plan, x, C::KERNELS[0])?;
    let Pass { device, dtype, wide, .. } = pass;
    let new = if *inputs == 0 { Output::zeros } else { Output::new };
    let gates = new(device, wide, (rows, width))?;
    // The products of a step, and the last c without rounding.
    let recurrent = Output::new(device, wide, batch * (width + hidden))?;
    let results = Output::new(device, dtype, (rows * (1 + usize::from(*cells)) + C::STATES * batch, hidden))?;
    let keeps = arguments.iter().any(|argument| is_tracked(argument));
    let kept = keeps.then(|| Output::new(device, dtype, rows * (width + 2 * hidden))).transpose()?;
    let mut biases = biases.iter();
    let mut bias = |is_there: &bool| address_or_none(is_there.then(|| biases.next().copied()).flatten());
    let [b_ih, b_hh] = [bias(&has_bias[0])?, bias(&has_bias[1])?];
    let first_h = address(states[0])?;
    let h = results.address()?.skip(rows * hidden, dtype);
    let tensors = [
        gates.address()?,
        recurrent.address()?,
        b_ih,
        b_hh,
        first_h,
        address_or_none(states.get(1).copied())?,
        results.address()?,
        kept.as_ref().map_or(Ok(Address::NONE), Output::address)?,
    ];
    let factors = [factor(address(x)?, false), factor(address(w_ih)?, true)];
    product(device, [rows, width, *inputs], dtype, factors, target(gates.address()?, wide))?;
    let mut begun = 0;
    for (start, count) in steps.order() {
        // The h of those that had a step before, and of the others.
        let before = begun.min(count);
        for (from, first, count) in [(h, 0, before), (first_h, before, count - before)] {
            let factors = [factor(from.skip(first * hidden, dtype), false), factor(address(w_hh)?, true)];
            let c = target(recurrent.address()?.skip(first * width, wide), wide);
            product(device, [count, width, hidden], dtype, factors, c)?;
        }
        pass.step((start, count, begun), &tensors)?;
        begun = begun.max(count);
    }
    let kept = kept.map(Output::into_tensor);
    let [x, w_ih, w_hh] = [x, w_ih, w_hh].map(|tensor| tensor.detach());
    match kept {
        Some(kept) => apply(arguments, results.into_result(), Backward { plan, x, w_ih, w_hh, kept }),
        None => Ok(results.into_tensor()),
    }
}

struct Backward<C> {
    plan: Plan<C>,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    /// The gates, what the cell keeps, and h before each step.
    kept: Tensor,
}

impl<C: Cell> Function for Backward<C> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Plan { steps, inputs, hidden, has_bias, .. } = &self.plan;
        let (rows, batch, hidden, width) = (steps.rows(), steps.batch(), *hidden, C::GATES * *hidden);
        let pass = Pass::new(&self.plan, gradient, C::KERNELS[1])?;
        let Pass { device, dtype, wide, .. } = pass;
        let d_states = Output::new(device, wide, (C::STATES, batch, hidden))?;
        let d_gates = Output::new(device, dtype, (rows, width))?;
        let d_recurrent = C::DIFFERS.then(|| Output::new(device, dtype, (rows, width))).transpose()?;
        let of_products = d_recurrent.as_ref().unwrap_or(&d_gates).address()?;
        let tensors = [address(&self.kept)?, d_states.address()?, address(gradient)?, d_gates.address()?, of_products];
        let mut begun = 0;
        for (index, (start, count)) in steps.order().into_iter().enumerate().rev() {
            pass.step((start, count, begun), &tensors)?;
            begun = begun.max(count);
            // Nothing is before the first step but h.
            if index > 0 || needed[3] {
                let factors =
                    [factor(of_products.skip(start * width, dtype), false), factor(address(&self.w_hh)?, false)];
                // The kernel has written a part of the sum if the products differ.
                let c = Target { accumulate: C::DIFFERS, ..target(d_states.address()?, wide) };
                product(device, [count, hidden, width], dtype, factors, c)?;
            }
        }
        let d_gates = d_gates.into_tensor();
        let d_recurrent = d_recurrent.map_or_else(|| d_gates.clone(), Output::into_tensor);
        let d_states = d_states.into_tensor();
        let earlier = self.kept.narrow(0, rows * (width + hidden), rows * hidden)?.reshape((rows, hidden))?;
        let mut needed_biases = needed[3 + C::STATES..].iter();
        let [of_b_ih, of_b_hh] =
            has_bias.map(|is_there| is_there.then(|| needed_biases.next().copied()).flatten().unwrap_or(false));
        let of_input = [&self.x, &self.w_ih, &d_gates];
        let [dx, d_w_ih, d_b_ih] = linear_gradients((rows, *inputs, width), of_input, [needed[0], needed[1], of_b_ih])?;
        let of_state = [&earlier, &self.w_hh, &d_recurrent];
        let [_, d_w_hh, d_b_hh] = linear_gradients((rows, hidden, width), of_state, [false, needed[2], of_b_hh])?;
        let mut gradients = vec![dx, d_w_ih, d_w_hh];
        for state in 0..C::STATES {
            gradients.push(needed[3 + state].then(|| d_states.get(state)?.to_dtype(dtype)).transpose()?);
        }
        gradients.extend(has_bias.iter().zip([d_b_ih, d_b_hh]).filter(|(is_there, _)| **is_there).map(|(_, d)| d));
        Ok(gradients)
    }
}
