//! Several layers, in one direction or both.
use super::cell::Cell;
use super::layer::Layer;
use super::steps::{Packing, Steps};
use crate::dropout::Dropout;
use crate::view::{cat, narrow, reshape, transpose};
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use candle_nn::{Init, VarBuilder};
use std::marker::PhantomData;

/// The options of [`StackedLSTM`](crate::StackedLSTM) and [`StackedGRU`](crate::StackedGRU), with PyTorch's names and defaults.
#[derive(Clone, Debug)]
pub struct RNNOptions {
    /// The number of layers, at least 1. Each takes the outputs of the one before.
    pub num_layers: usize,
    /// Whether the products have biases.
    pub bias: bool,
    /// Whether inputs and outputs are (batch, steps, features) instead of (steps, batch, features).
    pub batch_first: bool,
    /// The dropout of the outputs of all layers but the last one, in training. It needs at least two layers.
    pub dropout: Option<Dropout>,
    /// Whether each layer also runs from the last step to the first one.
    pub bidirectional: bool,
}

impl Default for RNNOptions {
    fn default() -> Self {
        Self { num_layers: 1, bias: true, batch_first: false, dropout: None, bidirectional: false }
    }
}

/// Layers of cells `C`.
#[derive(Clone, Debug)]
pub(super) struct Stack<C> {
    /// Each in one direction or in both.
    layers: Vec<Vec<Layer>>,
    input_size: usize,
    hidden_size: usize,
    options: RNNOptions,
    cell: PhantomData<C>,
}

impl<C: Cell> Stack<C> {
    pub(super) fn new(input_size: usize, hidden_size: usize, options: RNNOptions, vb: &VarBuilder) -> Result<Self> {
        let invalid = |argument, reason: &str| Err(Error::invalid(argument, reason).into());
        if options.num_layers == 0 {
            return invalid("num_layers", "it must be at least 1");
        }
        if options.num_layers == 1 && options.dropout.is_some() {
            return invalid("dropout", "it acts between layers, and there is only one: it must be None");
        }
        let directions: &[&str] = if options.bidirectional { &["", "_reverse"] } else { &[""] };
        let bound = 1.0 / (hidden_size as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let inits = ([init; 2], [options.bias.then_some(init); 2]);
        let layer = |number: usize| {
            let inputs = if number == 0 { input_size } else { directions.len() * hidden_size };
            let new =
                |direction: &&str| Layer::new::<C>((inputs, hidden_size), inits, &format!("l{number}{direction}"), vb);
            directions.iter().map(new).collect::<Result<Vec<_>>>()
        };
        let layers = (0..options.num_layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, input_size, hidden_size, options, cell: PhantomData })
    }

    /// Returns the outputs and the last states. Sequences without `lengths` are all as long as the input.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        lengths: Option<&[usize]>,
        states: Option<&[&Tensor]>,
        train: bool,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let Self { hidden_size, options, .. } = self;
        let (length, batch, features) = self.extents(x)?;
        let states = self.states(x, batch, states)?;
        let packing = lengths.map(|lengths| {
            check_lengths::<C>(lengths, length, batch)?;
            let row = |step: usize, sequence: usize| match options.batch_first {
                true => sequence * length + step,
                false => step * batch + sequence,
            };
            Packing::new(lengths, length, row, x.device())
        });
        let packing = packing.transpose()?;
        let (mut rows, steps) = match &packing {
            Some(packing) => (packing.pack.of(&reshape(x, (length * batch, features))?)?, packing.steps.clone()),
            None => {
                let x = if options.batch_first { transpose(x, 0, 1)? } else { x.clone() };
                (reshape(&x, (length * batch, features))?, Steps::even(length, batch))
            }
        };
        let count = steps.rows();
        let mut last = vec![Vec::new(); C::STATES];
        for (number, directions) in self.layers.iter().enumerate() {
            let mut outputs = Vec::new();
            for (direction, layer) in directions.iter().enumerate() {
                let state = |states: &Tensor| {
                    let state = narrow(states, 0, number * directions.len() + direction, 1)?;
                    let state = reshape(&state, (batch, *hidden_size))?;
                    packing.as_ref().map_or(Ok(state.clone()), |packing| packing.sort.of(&state))
                };
                let states = states.iter().map(state).collect::<Result<Vec<_>>>()?;
                let y = layer.run::<C>(&rows, &states, &steps.directed(direction > 0), false)?;
                outputs.push(narrow(&y, 0, 0, count)?);
                for (index, last) in last.iter_mut().enumerate() {
                    let state = narrow(&y, 0, count + index * batch, batch)?;
                    last.push(packing.as_ref().map_or(Ok(state.clone()), |packing| packing.restore.of(&state))?);
                }
            }
            rows = joined(&outputs, 1)?;
            if let Some(dropout) = options.dropout.as_ref().filter(|_| number + 1 < self.layers.len()) {
                rows = dropout.forward(&rows, train)?;
            }
        }
        let width = self.directions() * hidden_size;
        let outputs = match &packing {
            Some(packing) if options.batch_first => reshape(&packing.pad.of(&rows)?, (batch, length, width))?,
            Some(packing) => reshape(&packing.pad.of(&rows)?, (length, batch, width))?,
            None if options.batch_first => transpose(&reshape(&rows, (length, batch, width))?, 0, 1)?,
            None => reshape(&rows, (length, batch, width))?,
        };
        let shape = (self.layers.len() * self.directions(), batch, *hidden_size);
        let last = last.iter().map(|states| reshape(&joined(states, 0)?, shape)).collect::<Result<_>>()?;
        Ok((outputs, last))
    }

    fn directions(&self) -> usize {
        if self.options.bidirectional { 2 } else { 1 }
    }

    /// Steps, sequences and features.
    fn extents(&self, x: &Tensor) -> Result<(usize, usize, usize)> {
        let order = if self.options.batch_first { "batch, steps" } else { "steps, batch" };
        let (length, batch) = match (x.dims(), self.options.batch_first) {
            (&[length, batch, _], false) | (&[batch, length, _], true) => (length, batch),
            _ => (0, 0),
        };
        if length == 0 || x.dim(2)? != self.input_size {
            let (size, x) = (self.input_size, describe(x.dtype(), x.shape()));
            let reason = format!("it is {x}: it must be ({order}, {size}), with at least one step");
            return Err(Error::invalid(C::INPUT, reason).into());
        }
        Ok((length, batch, self.input_size))
    }

    /// The given states, or zeros.
    fn states(&self, x: &Tensor, batch: usize, states: Option<&[&Tensor]>) -> Result<Vec<Tensor>> {
        let shape = (self.layers.len() * self.directions(), batch, self.hidden_size);
        let Some(states) = states else {
            return Ok(vec![Tensor::zeros(shape, x.dtype(), x.device())?; C::STATES]);
        };
        for state in states {
            if state.dims3().ok() != Some(shape) {
                let found = describe(state.dtype(), state.shape());
                let reason =
                    format!("it is {found}: it must be {shape:?}, for layers times directions, batch, hidden size");
                return Err(Error::invalid(C::STATE, reason).into());
            }
        }
        Ok(states.iter().map(|state| (*state).clone()).collect())
    }
}

fn check_lengths<C: Cell>(lengths: &[usize], longest: usize, batch: usize) -> Result<()> {
    if lengths.len() != batch || lengths.iter().any(|&length| length == 0 || length > longest) {
        let reason =
            format!("they are {lengths:?}: there must be one for each of {batch} sequences, from 1 to {longest}");
        return Err(Error::invalid(C::LENGTHS, reason).into());
    }
    Ok(())
}

fn joined(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    match parts {
        [one] => Ok(one.clone()),
        parts => cat(&parts.iter().collect::<Vec<_>>(), dim),
    }
}
