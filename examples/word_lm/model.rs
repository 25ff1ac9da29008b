//! A language model of words: embedding, recurrent layers, and a head that may share the embedding's weights.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::rnn::{GRUState, LSTMState};
use candle_ddp::nn::{Dropout, Embedding, Linear, RNNOptions, StackedGRU, StackedLSTM, linear_cross_entropy};
use candle_nn::{Init, VarBuilder};
use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Kind {
    Lstm,
    Gru,
}

#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) kind: Kind,
    pub(crate) vocabulary: usize,
    /// The lengths of embeddings and of states, which are equal if they are `tied`.
    pub(crate) emsize: usize,
    pub(crate) nhid: usize,
    pub(crate) nlayers: usize,
    pub(crate) dropout: f32,
    pub(crate) tied: bool,
}

pub(crate) struct WordLm {
    encoder: Embedding,
    layers: Layers,
    decoder: Linear,
    dropout: Dropout,
}

enum Layers {
    Lstm(StackedLSTM),
    Gru(StackedGRU),
}

impl WordLm {
    pub(crate) fn new(config: Config, vb: VarBuilder) -> Result<Self> {
        let Config { kind, vocabulary, emsize, nhid, nlayers, dropout, tied } = config;
        let init = Init::Uniform { lo: -0.1, up: 0.1 };
        let encoder = vb.get_with_hints((vocabulary, emsize), "encoder.weight", init)?;
        let head = if tied { encoder.clone() } else { vb.get_with_hints((vocabulary, nhid), "decoder.weight", init)? };
        let bias = vb.get_with_hints(vocabulary, "decoder.bias", Init::Const(0.))?;
        let dropout = Dropout::new(dropout);
        let between = (nlayers > 1).then(|| dropout.clone());
        let options = RNNOptions { num_layers: nlayers, dropout: between, ..Default::default() };
        let layers = match kind {
            Kind::Lstm => Layers::Lstm(StackedLSTM::new(emsize, nhid, options, vb.pp("rnn"))?),
            Kind::Gru => Layers::Gru(StackedGRU::new(emsize, nhid, options, vb.pp("rnn"))?),
        };
        Ok(Self { encoder: Embedding::new(encoder, emsize), layers, decoder: Linear::new(head, Some(bias)), dropout })
    }

    /// The cross entropy of words u32[T, B] and those that follow each of them, and the state after them: h, and of an LSTM c. The
    /// state before them is zero by default.
    pub(crate) fn loss(
        &self,
        words: &Tensor,
        next: &Tensor,
        state: Option<&[Tensor]>,
        train: bool,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let x = self.dropout.forward(&self.encoder.forward(words)?, train)?;
        let (y, state) = match &self.layers {
            Layers::Lstm(layers) => {
                let state = state.map(|state| LSTMState::new(state[0].clone(), state[1].clone()));
                let (y, LSTMState { h, c }) = layers.forward(&x, state.as_ref(), train)?;
                (y, vec![h, c])
            }
            Layers::Gru(layers) => {
                let state = state.map(|state| GRUState { h: state[0].clone() });
                let (y, GRUState { h }) = layers.forward(&x, state.as_ref(), train)?;
                (y, vec![h])
            }
        };
        let y = self.dropout.forward(&y, train)?;
        let loss = linear_cross_entropy(&y, self.decoder.weight(), self.decoder.bias(), next)?;
        Ok((loss, state))
    }
}
