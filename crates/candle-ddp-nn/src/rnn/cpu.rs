//! The layer on a CPU.
use super::cell::Cell;
use super::plan::Plan;
use crate::gemm::{Lanes, Panels, Strides, gemm, product, threads, wide};
use candle_core::{Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{narrow_vec, slice, slice_tensor, tensor, with_slice};
use candle_ddp_tensor::column_sums::column_sums;
use candle_ddp_tensor::function::{Function, apply, is_tracked};
use candle_ddp_tensor::{Element, dispatch, vectorise};

/// [`Layer::run`](super::layer::Layer::run), of which these are the arguments of the plan. All tensors are contiguous.
pub(super) fn run<C: Cell>(plan: Plan<C>, arguments: &[&Tensor]) -> Result<Tensor> {
    let (x, hidden) = (arguments[0], plan.hidden);
    dispatch!(x.dtype(), C::NAME, T => {
        let keeps = arguments.iter().any(|argument| is_tracked(argument));
        let (result, kept) = read::<T, _>(arguments, |arguments| plan.forward(arguments, keeps))?;
        let shape = Shape::from((result.len() / hidden, hidden));
        let [x, w_ih, w_hh] = [0, 1, 2].map(|index: usize| arguments[index].detach());
        let result = (Storage::Cpu(T::to_cpu_storage_owned(result)), shape);
        apply(arguments, result, Backward { plan, x, w_ih, w_hh, kept })
    })
}

/// Passes the elements of contiguous tensors to `work`.
fn read<T: WithDType, R>(tensors: &[&Tensor], work: impl FnOnce(&[&[T]]) -> Result<R>) -> Result<R> {
    let storages: Vec<_> = tensors.iter().map(|tensor| tensor.storage_and_layout()).collect();
    let elements = storages.iter().map(|(storage, layout)| match &**storage {
        Storage::Cpu(storage) => slice::<T>(storage, layout),
        _ => candle_core::bail!("the tensor must be on the CPU"),
    });
    work(&elements.collect::<Result<Vec<_>>>()?)
}

/// The values that the backward pass needs: the gates, those that the cell keeps, and h before each step.
struct Kept<T>([Vec<T>; 3]);

impl<C: Cell> Plan<C> {
    fn forward<T: Element<Real: Lanes>>(&self, arguments: &[&[T]], keeps: bool) -> Result<(Vec<T>, Kept<T>)> {
        let Self { steps, inputs, hidden, has_bias, .. } = self;
        let (rows, hidden, width) = (steps.rows(), *hidden, C::GATES * hidden);
        let [x, w_ih, w_hh, rest @ ..] = arguments else { candle_core::bail!("{}: arguments are missing", C::NAME) };
        let (states, biases) = rest.split_at(C::STATES);
        let mut biases = biases.iter();
        let mut bias = |is_there: &bool| match is_there.then(|| biases.next()).flatten() {
            Some(bias) => wide(bias).into_owned(),
            None => vec![T::Real::default(); width],
        };
        let [b_ih, b_hh] = has_bias.each_ref().map(&mut bias);
        let mut gates = b_ih.repeat(rows);
        let factors = ((*x, Strides::rows(*inputs)), (*w_ih, Strides::transposed(*inputs)));
        gemm((rows, width, *inputs), &mut gates, true, factors.0, factors.1, threads())?;
        let w_hh = Panels::new((hidden, width), (&wide(w_hh), Strides::transposed(hidden)));
        let mut states = states.iter().map(|state| wide(state).into_owned());
        let [mut h, mut c] = [states.next().unwrap_or_default(), states.next().unwrap_or_default()];
        let mut result = vec![T::from_f64(0.0); rows * hidden];
        let (mut earlier, mut kept, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        if self.cells {
            cells.resize(rows * hidden, T::from_f64(0.0));
        }
        // The rows of a step are not in order if the steps are not.
        if keeps {
            earlier.resize(rows * hidden, T::Real::default());
            kept.resize(rows * hidden, T::Real::default());
        }
        let mut recurrent = Vec::new();
        for (start, count) in steps.order() {
            let (states, all) = (0..count * hidden, start * hidden..(start + count) * hidden);
            let h = &mut h[states.clone()];
            let c = if C::STATES > 1 { &mut c[states] } else { &mut [] };
            let gates = &mut gates[start * width..(start + count) * width];
            recurrent.clear();
            (0..count).for_each(|_| recurrent.extend_from_slice(&b_hh));
            w_hh.add_product(h, &mut recurrent, threads());
            if keeps {
                earlier[all.clone()].copy_from_slice(h);
                C::keep(hidden, &recurrent, c, &mut kept[all.clone()]);
            }
            C::forward(hidden, gates, &recurrent, h, c);
            let result = &mut result[all.clone()];
            vectorise!(|| {
                for (result, h) in result.iter_mut().zip(h) {
                    *result = T::narrow(*h);
                    *h = result.widen();
                }
            });
            if self.cells {
                cells[all].iter_mut().zip(c).for_each(|(cell, c)| *cell = T::narrow(*c));
            }
        }
        result.extend(narrow_vec::<T>(h));
        result.extend(narrow_vec::<T>(c));
        result.extend(cells);
        let kept = if keeps { [gates, kept, earlier] } else { Default::default() };
        Ok((result, Kept(kept.map(narrow_vec::<T>))))
    }
}

struct Backward<C, T> {
    plan: Plan<C>,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    kept: Kept<T>,
}

impl<C: Cell, T: Element<Real: Lanes>> Function for Backward<C, T> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Plan { steps, inputs, hidden, has_bias, .. } = &self.plan;
        let (rows, batch, inputs, hidden) = (steps.rows(), steps.batch(), *inputs, *hidden);
        let width = C::GATES * hidden;
        let Products { d_states, d_gates, d_recurrent } = with_slice::<T, _>(gradient, |gradient| {
            with_slice::<T, _>(&self.w_hh, |w_hh| Ok(self.through_time(gradient, w_hh, needed)))
        })?;
        let of_products = |values| tensor::<T>(values, &Shape::from((rows, width)));
        let d_gates = of_products(d_gates);
        let d_recurrent = if C::DIFFERS { of_products(d_recurrent) } else { d_gates.clone() };
        let weight = |is_needed: bool, d: &Tensor, x: &[T], columns: usize| {
            let with_d = |d: &[T]| {
                let factors = ((d, Strides::transposed(width)), (x, Strides::rows(columns)));
                let values = product((width, columns, rows), factors.0, factors.1, None, threads())?;
                Ok(slice_tensor(values, &Shape::from((width, columns))))
            };
            is_needed.then(|| with_slice::<T, _>(d, with_d)).transpose()
        };
        let dx = || {
            with_slice::<T, _>(&d_gates, |d| {
                with_slice::<T, _>(&self.w_ih, |w_ih| {
                    let factors = ((d, Strides::rows(width)), (w_ih, Strides::rows(inputs)));
                    product((rows, inputs, width), factors.0, factors.1, None, threads())
                })
            })
        };
        let Kept([_, _, earlier]) = &self.kept;
        let mut gradients = vec![
            needed[0].then(dx).transpose()?.map(|dx| slice_tensor(dx, self.x.shape())),
            with_slice::<T, _>(&self.x, |x| weight(needed[1], &d_gates, x, inputs))?,
            weight(needed[2], &d_recurrent, earlier, hidden)?,
        ];
        let d_states = d_states.into_iter().take(C::STATES);
        gradients.extend(d_states.map(|d| Some(tensor::<T>(d, &Shape::from((batch, hidden))))));
        for (is_there, d) in has_bias.iter().zip([&d_gates, &d_recurrent]) {
            if *is_there {
                let is_needed = needed[gradients.len()];
                gradients.push(is_needed.then(|| column_sums(d, &Shape::from(width))).transpose()?);
            }
        }
        Ok(gradients)
    }
}

/// The gradients of the states, and of the products of the inputs and of the states.
struct Products<R> {
    d_states: [Vec<R>; 2],
    d_gates: Vec<R>,
    /// Empty if it is the same.
    d_recurrent: Vec<R>,
}

impl<C: Cell, T: Element<Real: Lanes>> Backward<C, T> {
    fn through_time(&self, gradient: &[T], w_hh: &[T], needed: &[bool]) -> Products<T::Real> {
        let Plan { steps, hidden, .. } = &self.plan;
        let (rows, hidden, width) = (steps.rows(), *hidden, C::GATES * hidden);
        let (of_outputs, rest) = gradient.split_at(rows * hidden);
        let (of_h, rest) = rest.split_at(steps.batch() * hidden);
        let (of_c, of_cells) = rest.split_at((C::STATES - 1) * of_h.len());
        let [mut dh, mut dc] = [wide(of_h).into_owned(), wide(of_c).into_owned()];
        let mut d_gates = vec![T::Real::default(); rows * width];
        let mut d_recurrent = if C::DIFFERS { d_gates.clone() } else { Vec::new() };
        let w_hh = Panels::new((width, hidden), (&wide(w_hh), Strides::rows(hidden)));
        let Kept([gates, kept, earlier]) = &self.kept;
        let order = steps.order();
        for (index, &(start, count)) in order.iter().enumerate().rev() {
            let (states, all) = (0..count * hidden, start * hidden..(start + count) * hidden);
            let products = start * width..(start + count) * width;
            let dh = &mut dh[states.clone()];
            let dc = if C::STATES > 1 { &mut dc[states] } else { &mut [] };
            let add = |sums: &mut [T::Real], values: &[T]| {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.widen());
            };
            add(dh, &of_outputs[all.clone()]);
            if !of_cells.is_empty() {
                add(dc, &of_cells[all.clone()]);
            }
            let d_gates = &mut d_gates[products.clone()];
            let d_recurrent = if C::DIFFERS { &mut d_recurrent[products.clone()] } else { &mut [] };
            let kept = [&gates[products], &kept[all.clone()], &earlier[all]];
            C::backward(hidden, kept, [dh, dc], [d_gates, d_recurrent]);
            // Nothing is before the first step but h.
            if index > 0 || needed[3] {
                w_hh.add_product(if C::DIFFERS { d_recurrent } else { d_gates }, dh, threads());
            }
        }
        Products { d_states: [dh, dc], d_gates, d_recurrent }
    }
}
