//! BERT with a head that classifies: transformers' `BertForSequenceClassification`, with its names in the `VarMap`.
//!
//! Everything here has a name of candle-nn. A program whose `Cargo.toml` puts candle-ddp-nn in candle-nn's place needs the same
//! file without the first line.
use candle_ddp::nn as candle_nn;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_nn::{
    Activation, Dropout, Embedding, Init, LayerNorm, Linear, VarBuilder, add, flatten, layer_norm, matmul, narrow,
    reshape, transpose,
};
use serde::Deserialize;

/// The number added to the scores of padding, whose weights are then zero after the softmax, in any dtype.
const HIDDEN: f64 = 1e9;

/// Sizes and rates, as `config.json` names them.
#[derive(Deserialize)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) hidden_act: Activation,
    pub(crate) hidden_dropout_prob: f32,
    pub(crate) attention_probs_dropout_prob: f32,
    pub(crate) classifier_dropout: Option<f32>,
    pub(crate) max_position_embeddings: usize,
    pub(crate) type_vocab_size: usize,
    pub(crate) initializer_range: f64,
    pub(crate) layer_norm_eps: f64,
}

impl Config {
    fn linear(&self, in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
        let weight = vb.get_with_hints((out_dim, in_dim), "weight", self.init())?;
        Ok(Linear::new(weight, Some(vb.get_with_hints(out_dim, "bias", Init::Const(0.))?)))
    }

    fn embedding(&self, count: usize, vb: VarBuilder) -> Result<Embedding> {
        let table = vb.get_with_hints((count, self.hidden_size), "weight", self.init())?;
        Ok(Embedding::new(table, self.hidden_size))
    }

    fn norm(&self, vb: VarBuilder) -> Result<LayerNorm> {
        layer_norm(self.hidden_size, self.layer_norm_eps, vb)
    }

    fn init(&self) -> Init {
        Init::Randn { mean: 0., stdev: self.initializer_range }
    }
}

/// The sum of three embeddings: of a token, of its position, and of its sentence, the first or the second.
struct Embeddings {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Embeddings {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            words: config.embedding(config.vocab_size, vb.pp("word_embeddings"))?,
            positions: config.embedding(config.max_position_embeddings, vb.pp("position_embeddings"))?,
            types: config.embedding(config.type_vocab_size, vb.pp("token_type_embeddings"))?,
            norm: config.norm(vb.pp("LayerNorm"))?,
            dropout: Dropout::new(config.hidden_dropout_prob),
        })
    }

    fn forward(&self, ids: &Tensor, types: &Tensor, train: bool) -> Result<Tensor> {
        let positions = Tensor::arange(0, ids.dim(1)? as u32, ids.device())?;
        let x = (self.words.forward(ids)? + self.types.forward(types)?)?;
        let x = x.broadcast_add(&self.positions.forward(&positions)?)?;
        self.dropout.forward(&self.norm.forward(&x)?, train)
    }
}

struct SelfAttention {
    heads: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    dropout: Dropout,
}

impl SelfAttention {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let linear = |name| config.linear(config.hidden_size, config.hidden_size, vb.pp(name));
        Ok(Self {
            heads: config.num_attention_heads,
            query: linear("query")?,
            key: linear("key")?,
            value: linear("value")?,
            dropout: Dropout::new(config.attention_probs_dropout_prob),
        })
    }

    /// From [B, T, hidden size] and a mask [B, 1, 1, T] that is added to the scores.
    fn forward(&self, x: &Tensor, mask: &Tensor, train: bool) -> Result<Tensor> {
        let (batch, tokens, width) = x.dims3()?;
        let size = width / self.heads;
        let heads = |layer: &Linear| transpose(&reshape(&layer.forward(x)?, (batch, tokens, self.heads, size))?, 1, 2);
        let scores = (matmul(&heads(&self.query)?, &transpose(&heads(&self.key)?, 2, 3)?)? / (size as f64).sqrt())?;
        let weights = softmax_last_dim(&scores.broadcast_add(mask)?)?;
        let y = matmul(&self.dropout.forward(&weights, train)?, &heads(&self.value)?)?;
        flatten(&transpose(&y, 1, 2)?, 2, 3)
    }
}

/// The end of attention and of the two layers after it: one more layer, a residual connection and a norm.
struct Output {
    dense: Linear,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Output {
    fn new(config: &Config, in_dim: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            dense: config.linear(in_dim, config.hidden_size, vb.pp("dense"))?,
            norm: config.norm(vb.pp("LayerNorm"))?,
            dropout: Dropout::new(config.hidden_dropout_prob),
        })
    }

    fn forward(&self, x: &Tensor, residual: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.dropout.forward(&self.dense.forward(x)?, train)?;
        self.norm.forward(&add(&x, residual)?)
    }
}

struct Layer {
    attention: SelfAttention,
    attention_output: Output,
    intermediate: Linear,
    activation: Activation,
    output: Output,
}

impl Layer {
    fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        let Config { hidden_size, intermediate_size, .. } = *config;
        Ok(Self {
            attention: SelfAttention::new(config, vb.pp("attention.self"))?,
            attention_output: Output::new(config, hidden_size, vb.pp("attention.output"))?,
            intermediate: config.linear(hidden_size, intermediate_size, vb.pp("intermediate.dense"))?,
            activation: config.hidden_act,
            output: Output::new(config, intermediate_size, vb.pp("output"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.attention_output.forward(&self.attention.forward(x, mask, train)?, x, train)?;
        let y = self.activation.forward(&self.intermediate.forward(&x)?)?;
        self.output.forward(&y, &x, train)
    }
}

pub(crate) struct BertForSequenceClassification {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    pooler: Linear,
    dropout: Dropout,
    classifier: Linear,
}

impl BertForSequenceClassification {
    pub(crate) fn new(config: &Config, classes: usize, vb: VarBuilder) -> Result<Self> {
        let (width, bert) = (config.hidden_size, vb.pp("bert"));
        let layer = |index| Layer::new(config, bert.pp(format!("encoder.layer.{index}")));
        Ok(Self {
            embeddings: Embeddings::new(config, bert.pp("embeddings"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            pooler: config.linear(width, width, bert.pp("pooler.dense"))?,
            dropout: Dropout::new(config.classifier_dropout.unwrap_or(config.hidden_dropout_prob)),
            classifier: config.linear(width, classes, vb.pp("classifier"))?,
        })
    }

    /// From tokens and their types, u32[B, T], and a mask u32[B, T] that is 0 for padding, to logits [B, classes].
    pub(crate) fn forward(&self, ids: &Tensor, types: &Tensor, mask: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.embeddings.forward(ids, types, train)?;
        let mask = mask.to_dtype(DType::F32)?.affine(HIDDEN, -HIDDEN)?.to_dtype(x.dtype())?;
        let mask = mask.unsqueeze(1)?.unsqueeze(1)?;
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, &mask, train))?;
        let first = flatten(&narrow(&x, 1, 0, 1)?, 0, 1)?;
        let pooled = self.pooler.forward(&first)?.tanh()?;
        self.classifier.forward(&self.dropout.forward(&pooled, train)?)
    }
}
