//! One layer of a recurrent network in one direction, over whole sequences, as one operation.
use super::cell::Cell;
use super::plan::Plan;
use super::steps::Steps;
use super::{cpu, cuda};
use crate::autocast::Casts;
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe_placed;
use candle_nn::{Init, VarBuilder};
use std::marker::PhantomData;

/// The parameters of a layer in one direction.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) w_ih: Tensor,
    pub(super) w_hh: Tensor,
    pub(super) b_ih: Option<Tensor>,
    pub(super) b_hh: Option<Tensor>,
}

impl Layer {
    /// `inits` are for the weights of inputs and states, and for their biases. `suffix` ends the names.
    pub(super) fn new<C: Cell>(
        (inputs, hidden): (usize, usize),
        (weights, biases): ([Init; 2], [Option<Init>; 2]),
        suffix: &str,
        vb: &VarBuilder,
    ) -> Result<Self> {
        if hidden == 0 {
            return Err(Error::invalid("hidden_size", "it must be at least 1").into());
        }
        let rows = C::GATES * hidden;
        let bias = |name: &str, init: Option<Init>| {
            init.map(|init| vb.get_with_hints(rows, &format!("{name}_{suffix}"), init)).transpose()
        };
        Ok(Self {
            w_ih: vb.get_with_hints((rows, inputs), &format!("weight_ih_{suffix}"), weights[0])?,
            w_hh: vb.get_with_hints((rows, hidden), &format!("weight_hh_{suffix}"), weights[1])?,
            b_ih: bias("bias_ih", biases[0])?,
            b_hh: bias("bias_hh", biases[1])?,
        })
    }

    pub(super) fn hidden(&self) -> Result<usize> {
        self.w_hh.dim(1)
    }

    /// A state of zeros.
    pub(super) fn zeros(&self, batch: usize) -> Result<Tensor> {
        Tensor::zeros((batch, self.hidden()?), self.w_hh.dtype(), self.w_hh.device())
    }

    /// Runs over the rows of `x`, those of each step after the earlier ones, from the states h and c, (batch, hidden). Returns rows: the
    /// outputs, the last h, the last c, and with `cells` c after each step, in the order of the outputs.
    pub(super) fn run<C: Cell>(&self, x: &Tensor, states: &[Tensor], steps: &Steps, cells: bool) -> Result<Tensor> {
        let Self { w_ih, w_hh, b_ih, b_hh } = self;
        let parameters = [Some(w_ih), Some(w_hh), b_ih.as_ref(), b_hh.as_ref()];
        if let Some(casts) = Casts::of_product([x].into_iter().chain(parameters.into_iter().flatten()).chain(states))? {
            let parameter = |of: &Option<Tensor>| of.as_ref().map(|of| casts.of(of)).transpose();
            let (w_ih, w_hh) = (casts.of(w_ih)?, casts.of(w_hh)?);
            let layer = Self { w_ih, w_hh, b_ih: parameter(b_ih)?, b_hh: parameter(b_hh)? };
            let states = states.iter().map(|state| casts.of(state)).collect::<Result<Vec<_>>>()?;
            return casts.result(layer.run::<C>(&casts.of(x)?, &states, steps, cells)?, x);
        }
        let (batch, hidden) = (steps.batch(), self.hidden()?);
        let check = |argument, x: &Tensor, weight: &Tensor, rows: usize, what: &str| {
            let columns = weight.dim(1)?;
            let alike = x.dtype() == weight.dtype() && x.device().same_device(weight.device());
            if alike && x.dims() == [rows, columns] {
                return Ok(());
            }
            let (x, weight) = (describe_placed(x), describe_placed(weight));
            let reason = format!(
                "it is {x}{what}, and the weight is {weight}: it must be ({rows}, {columns}) of the same dtype and on the same device"
            );
            Err(candle_core::Error::from(Error::invalid(argument, reason)))
        };
        check(C::INPUT, x, w_ih, steps.rows(), "")?;
        states.iter().try_for_each(|state| check(C::STATE, state, w_hh, batch, " per layer and direction"))?;
        let arguments = [x, w_ih, w_hh].into_iter().chain(states).chain(b_ih).chain(b_hh);
        let arguments = arguments.map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let arguments: Vec<&Tensor> = arguments.iter().collect();
        let has_bias = [b_ih.is_some(), b_hh.is_some()];
        let plan = Plan { steps: steps.clone(), inputs: w_ih.dim(1)?, hidden, has_bias, cells, cell: PhantomData::<C> };
        if x.device().is_cuda() { cuda::run(plan, &arguments) } else { cpu::run(plan, &arguments) }
    }
}
