//! Recurrent layers, whose sequences are single operations.
mod cell;
mod cpu;
mod cuda;
mod layer;
mod plan;
mod stack;
mod stacked;
mod steps;

use crate::view::{narrow, reshape, transpose};
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
#[doc(no_inline)]
pub use candle_nn::rnn::*;
use cell::{Gru, Lstm};
use layer::Layer;
pub use stack::RNNOptions;
pub use stacked::{StackedGRU, StackedLSTM};
use steps::Steps;

/// A drop-in for [`candle_nn::LSTM`]: one layer of long short-term memory in one direction, whose parameters have the names and the
/// layout of PyTorch's. For whole sequences, several layers or both directions, see [`StackedLSTM`].
///
/// [`RNN::step`] and [`RNN::seq`] are single operations. As in candle, `LSTMConfig::direction` only names the parameters: the steps are
/// in the order of the input.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{RNN, lstm};
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = lstm(3, 4, Default::default(), vb)?;
/// let states = layer.seq(&Tensor::ones((2, 5, 3), DType::F32, &Device::Cpu)?)?; // two sequences of five steps
/// assert_eq!((states.len(), layer.states_to_tensor(&states)?.dims()), (5, &[2, 5, 4][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LSTM {
    layer: Layer,
    config: LSTMConfig,
}

/// [`LSTM::new`].
///
/// # Errors
/// Returns the errors of `vb`.
pub fn lstm(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: VarBuilder) -> Result<LSTM> {
    LSTM::new(in_dim, hidden_dim, config, vb)
}

impl LSTM {
    /// A layer that takes `in_dim` features.
    ///
    /// # Errors
    /// Returns the errors of `vb`.
    pub fn new(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: VarBuilder) -> Result<Self> {
        let inits = ([config.w_ih_init, config.w_hh_init], [config.b_ih_init, config.b_hh_init]);
        let direction = match config.direction {
            Direction::Forward => "",
            Direction::Backward => "_reverse",
        };
        let suffix = format!("l{}{direction}", config.layer_idx);
        Ok(Self { layer: Layer::new::<Lstm>((in_dim, hidden_dim), inits, &suffix, &vb)?, config })
    }

    /// How the layer was made.
    pub fn config(&self) -> &LSTMConfig {
        &self.config
    }
}

impl RNN for LSTM {
    type State = LSTMState;

    fn zero_state(&self, batch_dim: usize) -> Result<LSTMState> {
        let zeros = self.layer.zeros(batch_dim)?;
        Ok(LSTMState::new(zeros.clone(), zeros))
    }

    fn step(&self, input: &Tensor, LSTMState { h, c }: &LSTMState) -> Result<LSTMState> {
        let batch = input.dim(0)?;
        let y = self.layer.run::<Lstm>(input, &[h.clone(), c.clone()], &Steps::even(1, batch), false)?;
        Ok(LSTMState::new(narrow(&y, 0, batch, batch)?, narrow(&y, 0, 2 * batch, batch)?))
    }

    fn seq_init(&self, input: &Tensor, LSTMState { h, c }: &LSTMState) -> Result<Vec<LSTMState>> {
        let (batch, length, rows) = step_rows(input)?;
        let y = self.layer.run::<Lstm>(&rows, &[h.clone(), c.clone()], &Steps::even(length, batch), true)?;
        let h = parts(narrow(&y, 0, 0, length * batch)?, length)?;
        let c = parts(narrow(&y, 0, (length + 2) * batch, length * batch)?, length)?;
        Ok(h.into_iter().zip(c).map(|(h, c)| LSTMState::new(h, c)).collect())
    }

    fn states_to_tensor(&self, states: &[LSTMState]) -> Result<Tensor> {
        Tensor::stack(&states.iter().map(|state| state.h.clone()).collect::<Vec<_>>(), 1)
    }
}

/// The rows of an input of (batch, steps, features), step by step, after the batch and the number of steps.
fn step_rows(input: &Tensor) -> Result<(usize, usize, Tensor)> {
    let (batch, length, features) = input.dims3()?;
    Ok((batch, length, reshape(&transpose(input, 0, 1)?, (length * batch, features))?))
}

/// `rows` in `count` equal parts. Halves of halves: in the backward pass, each part of the whole would be as large as the whole.
fn parts(rows: Tensor, count: usize) -> Result<Vec<Tensor>> {
    if count <= 1 {
        return Ok(vec![rows; count]);
    }
    let (size, first) = (rows.dim(0)? / count, count / 2);
    let mut all = parts(narrow(&rows, 0, 0, first * size)?, first)?;
    all.extend(parts(narrow(&rows, 0, first * size, (count - first) * size)?, count - first)?);
    Ok(all)
}

/// A drop-in for [`candle_nn::GRU`]: one layer of gated recurrent units in one direction, with the parameters of PyTorch's. For whole
/// sequences, several layers or both directions, see [`StackedGRU`].
///
/// [`RNN::step`] and [`RNN::seq`] are single operations.
#[derive(Clone, Debug)]
pub struct GRU {
    layer: Layer,
    config: GRUConfig,
}

/// [`GRU::new`].
///
/// # Errors
/// Returns the errors of `vb`.
pub fn gru(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: VarBuilder) -> Result<GRU> {
    GRU::new(in_dim, hidden_dim, config, vb)
}

impl GRU {
    /// A layer that takes `in_dim` features.
    ///
    /// # Errors
    /// Returns the errors of `vb`.
    pub fn new(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: VarBuilder) -> Result<Self> {
        let inits = ([config.w_ih_init, config.w_hh_init], [config.b_ih_init, config.b_hh_init]);
        Ok(Self { layer: Layer::new::<Gru>((in_dim, hidden_dim), inits, "l0", &vb)?, config })
    }

    /// How the layer was made.
    pub fn config(&self) -> &GRUConfig {
        &self.config
    }
}

impl RNN for GRU {
    type State = GRUState;

    fn zero_state(&self, batch_dim: usize) -> Result<GRUState> {
        Ok(GRUState { h: self.layer.zeros(batch_dim)? })
    }

    fn step(&self, input: &Tensor, GRUState { h }: &GRUState) -> Result<GRUState> {
        let batch = input.dim(0)?;
        let y = self.layer.run::<Gru>(input, std::slice::from_ref(h), &Steps::even(1, batch), false)?;
        Ok(GRUState { h: narrow(&y, 0, batch, batch)? })
    }

    fn seq_init(&self, input: &Tensor, GRUState { h }: &GRUState) -> Result<Vec<GRUState>> {
        let (batch, length, rows) = step_rows(input)?;
        let y = self.layer.run::<Gru>(&rows, std::slice::from_ref(h), &Steps::even(length, batch), false)?;
        let states = parts(narrow(&y, 0, 0, length * batch)?, length)?;
        Ok(states.into_iter().map(|h| GRUState { h }).collect())
    }

    fn states_to_tensor(&self, states: &[GRUState]) -> Result<Tensor> {
        Tensor::cat(&states.iter().map(|state| state.h.clone()).collect::<Vec<_>>(), 1)
    }
}
