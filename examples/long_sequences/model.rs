//! A causal transformer of sequences that are spread over ranks. All of it but the attention works on each position alone, and so on a part
//! of the sequence as on the whole.
use candle_core::{Module, Result, Tensor};
use candle_ddp::nn::{
    AttentionOptions, Embedding, LayerNorm, Linear, add, embedding, gelu, layer_norm, linear, narrow,
    scaled_dot_product_attention_qkvpacked,
};
use candle_ddp::{Block, ProcessGroup, WithGrad, block};
use candle_nn::{Init, VarBuilder};

pub(crate) const VOCABULARY: usize = 8;
/// The positions of a whole sequence, and the heads: multiples of the number of ranks over which a sequence is spread.
pub(crate) const LENGTH: usize = 48;
const HEADS: usize = 12;
const WIDTH: usize = 4 * HEADS;

/// The ranks over which each sequence is spread, and this rank's place among them. Each has equally many consecutive positions.
#[derive(Clone)]
pub(crate) struct Ranks {
    all: WithGrad,
    rank: usize,
    count: usize,
}

impl Ranks {
    pub(crate) fn new(group: &ProcessGroup) -> candle_ddp::Result<Self> {
        Ok(Self { all: group.with_grad()?, rank: group.rank(), count: group.world_size() })
    }

    /// This rank's positions of sequences whose positions are dimension `dim`.
    pub(crate) fn part(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let own = LENGTH / self.count;
        narrow(x, dim, self.rank * own, own)
    }

    /// Attention of whole sequences, from `qkv` [batch, own positions, 3 × width] to [batch, own positions, width].
    fn attention(&self, qkv: &Tensor) -> Result<Tensor> {
        let (batch, own, count) = (qkv.dim(0)?, qkv.dim(1)?, self.count);
        let width = WIDTH / count; // of the heads of one rank
        // From [the rank that gets the heads, batch, own positions, 3, its heads] to [the rank that had the positions, …, own heads].
        let by_heads = qkv.reshape((batch, own, 3, count, width))?.permute((3, 0, 1, 2, 4))?.contiguous()?;
        let whole = self.all.all_to_all(&by_heads)?.transpose(0, 1)?.reshape((batch, LENGTH, 3 * width))?;
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        let y = scaled_dot_product_attention_qkvpacked(&whole, HEADS / count, options)?;
        // And back, from [the rank that gets the positions, …, own heads] to [the rank that had the heads, batch, own positions, its heads].
        let by_positions = y.reshape((batch, count, own, width))?.transpose(0, 1)?.contiguous()?;
        self.all.all_to_all(&by_positions)?.permute((1, 2, 0, 3))?.reshape((batch, own, WIDTH))
    }
}

struct Layer {
    ranks: Ranks,
    norms: [LayerNorm; 2],
    qkv: Linear,
    projection: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(ranks: Ranks, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            ranks,
            norms: [layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?, layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?],
            qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            projection: linear(WIDTH, WIDTH, vb.pp("projection"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.ranks.attention(&self.qkv.forward(&self.norms[0].forward(x)?)?)?;
        let x = add(x, &self.projection.forward(&y)?)?;
        add(&x, &self.down.forward(&gelu(&self.up.forward(&self.norms[1].forward(&x)?)?)?)?)
    }
}

pub(crate) struct Transformer {
    ranks: Ranks,
    tokens: Embedding,
    positions: Tensor,
    layers: Vec<Block<Layer>>,
    head: Linear,
}

impl Transformer {
    pub(crate) fn new(ranks: &Ranks, vb: VarBuilder) -> Result<Self> {
        let layer = |number| block(vb.pp(format!("layers.{number}")), |vb| Layer::new(ranks.clone(), vb));
        Ok(Self {
            ranks: ranks.clone(),
            tokens: embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            positions: vb.get_with_hints((LENGTH, WIDTH), "positions", Init::Randn { mean: 0., stdev: 0.5 })?,
            layers: (0..2).map(layer).collect::<Result<_>>()?,
            head: linear(WIDTH, VOCABULARY, vb.pp("head"))?,
        })
    }
}

impl Module for Transformer {
    /// From this rank's positions, u32[batch, own positions], to logits [batch, own positions, vocabulary].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = add(&self.tokens.forward(x)?, &self.ranks.part(&self.positions, 0)?)?;
        self.head.forward(&self.layers.iter().try_fold(x, |x, layer| layer.forward(&x))?)
    }
}
