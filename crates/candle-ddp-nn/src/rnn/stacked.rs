//! PyTorch's modules.
use super::cell::{Gru, Lstm};
use super::stack::{RNNOptions, Stack};
use super::{GRUState, LSTMState};
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

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
    /// Layers of `hidden_size`; the first takes `input_size` features.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for sizes or options that the fields
    /// exclude; the errors of `vb`.
    pub fn new(input_size: usize, hidden_size: usize, options: RNNOptions, vb: VarBuilder) -> Result<Self> {
        Ok(Self(Stack::new(input_size, hidden_size, options, &vb)?))
    }

    /// Returns the outputs, (steps, batch, directions × hidden), and the last state, each (layers × directions, batch, hidden), from the
    /// initial `state`, which is zero by default. Gradients flow through both. To carry a state to the next step of training, detach
    /// it.
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for an input or a state of another
    /// shape, dtype or device, or without steps; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
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
    /// The same, and an invalid argument for lengths that are 0 or exceed the input's, or another number of them.
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
    /// Layers of `hidden_size`; the first takes `input_size` features.
    ///
    /// # Errors
    /// The errors of [`StackedLSTM::new`].
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
