//! A graph network: nodes pass messages along edges, with candle's `index_select` and `index_add`.
use candle_core::{Device, Module, Result, Tensor};
use candle_ddp::nn::{LayerNorm, Linear, add, layer_norm, linear, relu};
use candle_nn::{FuncT, VarBuilder, func_t};

/// The edges that end in each node, for each sample of the batch.
const EDGES: usize = 8;
/// The nodes of a sample.
pub(super) const NODES: usize = 256;
pub(super) const WIDTH: usize = 128;

/// The network, for `batch` samples of [`NODES`] nodes each, whose edges are the same in each step.
pub(super) fn gnn(vb: VarBuilder) -> Result<FuncT<'static>> {
    let first = linear(WIDTH, WIDTH, vb.pp("first"))?;
    let layers = (0..4).map(|layer| Layer::new(vb.pp(format!("layers.{layer}")))).collect::<Result<Vec<_>>>()?;
    let last = linear(WIDTH, 1, vb.pp("last"))?;
    Ok(func_t(move |x, _| {
        let (source, target) = edges(x.dim(0)?, x.device())?;
        let x = first.forward(&x.flatten(0, 1)?)?;
        let x = layers.iter().try_fold(x, |x, layer| layer.forward(&x, &source, &target))?;
        last.forward(&x)
    }))
}

/// The sources and the targets of the edges, each within its sample.
fn edges(batch: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let number = |edge: usize| (edge / EDGES, edge % EDGES);
    let source = |edge| {
        let (node, turn) = number(edge);
        (node / NODES * NODES + (node * (2 * turn + 3) + 17 * turn) % NODES) as u32
    };
    let edges = batch * NODES * EDGES;
    let of = |node: &dyn Fn(usize) -> u32| Tensor::from_iter((0..edges).map(node), device);
    Ok((of(&source)?, of(&|edge| number(edge).0 as u32)?))
}

struct Layer {
    message: Linear,
    own: Linear,
    update: Linear,
    norm: LayerNorm,
}

impl Layer {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            message: linear(WIDTH, WIDTH, vb.pp("message"))?,
            own: linear(WIDTH, WIDTH, vb.pp("own"))?,
            update: linear(WIDTH, WIDTH, vb.pp("update"))?,
            norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
        })
    }

    fn forward(&self, x: &Tensor, source: &Tensor, target: &Tensor) -> Result<Tensor> {
        let messages = relu(&self.message.forward(&x.index_select(source, 0)?)?)?;
        let sums = Tensor::zeros(x.shape(), messages.dtype(), x.device())?.index_add(target, &messages, 0)?;
        let update = relu(&add(&self.own.forward(x)?, &self.update.forward(&sums)?)?)?;
        self.norm.forward(&add(x, &update)?)
    }
}
