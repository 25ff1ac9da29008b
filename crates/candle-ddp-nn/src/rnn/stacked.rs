//! Several layers, in one direction or both.
use super::cell::{Cell, Gru, Lstm};
use super::layer::Layer;
use super::steps::{Packing, Steps};
use super::{GRUState, LSTMState};
use crate::dropout::Dropout;
use crate::view::{cat, narrow, reshape, transpose};
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use candle_nn::{Init, VarBuilder};
use std::marker::PhantomData;

/// The options of [`StackedLSTM`] and [`StackedGRU`], with PyTorch's names and defaults.
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
struct Stack<C> {
    /// Each in one direction or in both.
    layers: Vec<Vec<Layer>>,
    input_size: usize,
    hidden_size: usize,
    options: RNNOptions,
    cell: PhantomData<C>,
}

impl<C: Cell> Stack<C> {
    fn new(input_size: usize, hidden_size: usize, options: RNNOptions, vb: &VarBuilder) -> Result<Self> {
        let invalid = |argument, reason: &str| Err(Error::invalid(argument, reason).into());
        if hidden_size == 0 {
            return invalid("hidden_size", "it must be at least 1");
        }
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
    fn forward(
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

/// `torch.nn.LSTM`: layers of [`LSTM`](super::LSTM), in one direction or both, over whole sequences.
///
/// Parameters have PyTorch's names and layout: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, of layer 1 `weight_ih_l1` and
/// so on, backward `weight_ih_l0_reverse`, with the gates input, forget, cell and output. They are drawn uniformly between
/// ±1/√`hidden_size`.
///
/// On CPUs, each layer and direction is one operation: the inputs of all steps are multiplied at once, the recurrent weight is packed
/// once for all steps, and the gradients of the weights are single products. On CUDA, each step is a sequence of operations, so that
/// many short sequences are faster than a few long ones.
///
/// Dtypes are f32, f64, f16 and bf16. With 16 bits, gates and c are calculated in f32, and on CUDA products are, too. Under
/// [`autocast`](crate::autocast()), the layers are products and return 16 bits. Under [`no_grad`](crate::no_grad),
/// nothing is kept for a backward pass.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{RNNOptions, StackedLSTM};
/// let (varmap, device) = (VarMap::new(), Device::Cpu);
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
/// let lstm = StackedLSTM::new(3, 4, RNNOptions { num_layers: 2, ..Default::default() }, vb)?;
/// // Without weights, all gates are σ(0) = 1/2 and the new cell is tanh(0) = 0, so that c halves with each step.
/// for var in varmap.all_vars() {
///     var.set(&var.zeros_like()?)?;
/// }
/// let x = Tensor::ones((2, 5, 3), DType::F32, &device)?; // two steps of five sequences
/// let (outputs, state) = lstm.forward(&x, None, false)?;
/// assert_eq!((outputs.dims(), state.h.dims()), (&[2, 5, 4][..], &[2, 5, 4][..]));
/// let ones = candle_ddp_nn::rnn::LSTMState::new(state.h.ones_like()?, state.h.ones_like()?);
/// let (outputs, state) = lstm.forward(&x, Some(&ones), false)?;
/// assert_eq!(state.c.max_all()?.to_scalar::<f32>()?, 0.25);
/// assert!((outputs.get(1)?.max_all()?.to_scalar::<f32>()? - 0.5 * 0.25f32.tanh()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StackedLSTM(Stack<Lstm>);

impl StackedLSTM {
    /// Layers of `hidden_size`, of which the first takes `input_size` features.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], carried by candle's error, for sizes or options that the fields exclude; the errors of `vb`.
    pub fn new(input_size: usize, hidden_size: usize, options: RNNOptions, vb: VarBuilder) -> Result<Self> {
        Ok(Self(Stack::new(input_size, hidden_size, options, &vb)?))
    }

    /// Returns the outputs, (steps, batch, directions × hidden), and the last state, each (layers × directions, batch, hidden), from the
    /// initial `state`, which is zero by default. Gradients flow through both. To carry a state to the next step of training, detach
    /// it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], carried by candle's error, for an input or a state of another shape, dtype or device, or without
    /// steps; [`Error::UnsupportedDType`].
    pub fn forward(&self, x: &Tensor, state: Option<&LSTMState>, train: bool) -> Result<(Tensor, LSTMState)> {
        self.run(x, None, state, train)
    }

    /// [`forward`](Self::forward) of padded sequences, of which each ends after its length: `pack_padded_sequence` before PyTorch's
    /// module and `pad_packed_sequence` with the input's `total_length` after it. The lengths are in the batch's order, sorted or not.
    ///
    /// The outputs after a sequence's end are zero, the last state is the one at its end, and backward layers begin there. Padding costs
    /// no time.
    ///
    /// # Errors
    /// The same, and [`Error::InvalidArgument`] for lengths that are 0 or exceed the input's, or another number of them.
    pub fn forward_with_lengths(
        &self,
        x: &Tensor,
        lengths: &[usize],
        state: Option<&LSTMState>,
        train: bool,
    ) -> Result<(Tensor, LSTMState)> {
        self.run(x, Some(lengths), state, train)
    }

    fn run(
        &self,
        x: &Tensor,
        lengths: Option<&[usize]>,
        state: Option<&LSTMState>,
        train: bool,
    ) -> Result<(Tensor, LSTMState)> {
        let states = state.map(|LSTMState { h, c }| [h, c]);
        let (outputs, states) = self.0.forward(x, lengths, states.as_ref().map(|states| &states[..]), train)?;
        Ok((outputs, LSTMState::new(states[0].clone(), states[1].clone())))
    }
}

/// `torch.nn.GRU`: layers of [`GRU`](super::GRU), in one direction or both, over whole sequences.
///
/// Parameters have PyTorch's names and layout, as those of [`StackedLSTM`], with the gates reset, update and new; as in PyTorch, the
/// reset gate multiplies the recurrent product with its bias. What `StackedLSTM` says about devices, dtypes and modes holds here, too.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{RNNOptions, StackedGRU, rnn::GRUState};
/// let (varmap, device) = (VarMap::new(), Device::Cpu);
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
/// let gru = StackedGRU::new(3, 4, RNNOptions { bidirectional: true, batch_first: true, ..Default::default() }, vb)?;
/// for var in varmap.all_vars() {
///     var.set(&var.zeros_like()?)?;
/// }
/// // Without weights, h halves with each step. One sequence has three steps, the other one.
/// let (x, state) = (Tensor::ones((2, 3, 3), DType::F32, &device)?, Tensor::ones((2, 2, 4), DType::F32, &device)?);
/// let (outputs, state) = gru.forward_with_lengths(&x, &[3, 1], Some(&GRUState { h: state }), false)?;
/// let feature = |index| outputs.get_on_dim(2, index)?.to_vec2::<f32>();
/// assert_eq!(feature(0)?, [[0.5, 0.25, 0.125], [0.5, 0., 0.]]);
/// assert_eq!(feature(4)?, [[0.125, 0.25, 0.5], [0.5, 0., 0.]]);
/// assert_eq!(state.h.get_on_dim(2, 0)?.to_vec2::<f32>()?, [[0.125, 0.5], [0.125, 0.5]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StackedGRU(Stack<Gru>);

impl StackedGRU {
    /// Layers of `hidden_size`, of which the first takes `input_size` features.
    ///
    /// # Errors
    /// Those of [`StackedLSTM::new`].
    pub fn new(input_size: usize, hidden_size: usize, options: RNNOptions, vb: VarBuilder) -> Result<Self> {
        Ok(Self(Stack::new(input_size, hidden_size, options, &vb)?))
    }

    /// Returns the outputs and the last state, as [`StackedLSTM::forward`] does.
    ///
    /// # Errors
    /// The same.
    pub fn forward(&self, x: &Tensor, state: Option<&GRUState>, train: bool) -> Result<(Tensor, GRUState)> {
        self.run(x, None, state, train)
    }

    /// The same of padded sequences, as [`StackedLSTM::forward_with_lengths`].
    ///
    /// # Errors
    /// The same.
    pub fn forward_with_lengths(
        &self,
        x: &Tensor,
        lengths: &[usize],
        state: Option<&GRUState>,
        train: bool,
    ) -> Result<(Tensor, GRUState)> {
        self.run(x, Some(lengths), state, train)
    }

    fn run(
        &self,
        x: &Tensor,
        lengths: Option<&[usize]>,
        state: Option<&GRUState>,
        train: bool,
    ) -> Result<(Tensor, GRUState)> {
        let states = state.map(|GRUState { h }| [h]);
        let (outputs, states) = self.0.forward(x, lengths, states.as_ref().map(|states| &states[..]), train)?;
        Ok((outputs, GRUState { h: states[0].clone() }))
    }
}
