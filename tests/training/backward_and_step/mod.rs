//! `backward_and_step`: the bits of `backward` and `step`, in whatever parts the step is made.
mod errors;
mod parts;
mod same_bits;

use crate::common::{Between, filled, floats, tensor};
use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Role, Unused, nn};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use std::collections::HashMap;
use std::sync::Arc;

const WIDTH: usize = 4;

/// Layers of this crate and of candle, tied weights, buffers, a layer that not all ranks use in all steps, one that no rank uses, and a
/// variable that each rank has for itself.
struct Net {
    embedding: nn::Embedding,
    hidden: nn::Linear,
    norm: nn::BatchNorm,
    theirs: candle_nn::Linear,
    sometimes: candle_nn::Linear,
    own: Tensor,
    output: nn::Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let embedding = nn::embedding(5, WIDTH, vb.pp("embedding"))?;
        candle_nn::linear(2, 2, vb.pp("never"))?;
        Ok(Self {
            output: nn::Linear::new(embedding.embeddings().clone(), None),
            embedding,
            hidden: nn::linear(WIDTH, WIDTH, vb.pp("hidden"))?,
            norm: nn::batch_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            theirs: candle_nn::linear(WIDTH, WIDTH, vb.pp("theirs"))?,
            sometimes: candle_nn::linear(WIDTH, WIDTH, vb.pp("sometimes"))?,
            own: vb.get(WIDTH, "own")?,
        })
    }

    /// The loss of a rank in a step, in which it uses all parameters or not.
    fn loss(&self, rank: usize, step: usize) -> candle_core::Result<Tensor> {
        let tokens = Tensor::new(&[rank as u32, (step % 5) as u32, 3], self.hidden.weight().device())?;
        let x = self.hidden.forward(&self.embedding.forward(&tokens)?)?.tanh()?;
        let mut x = self.theirs.forward(&self.norm.forward_t(&x, true)?)?;
        if (rank + step) % 3 == 1 {
            x = self.sometimes.forward(&x)?;
        }
        x = nn::add(&x, &self.own.to_dtype(x.dtype())?)?;
        self.output.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()
    }
}

type Ddp = DistributedDataParallel<Net>;

/// A bucket for each parameter. The step has parts from the second pass on.
fn tiny() -> DdpOptions {
    DdpOptions {
        unused: Unused::Allow,
        replica_check: None,
        role: Arc::new(|name| if name == "own" { Role::Ignored } else { Role::Parameter }),
        ..crate::common::tiny()
    }
}

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<(Ddp, VarMap)> {
    filled(pg, |vb| Net::new(vb), options, 3)
}

fn loss(ddp: &Ddp, step: usize) -> Result<Tensor> {
    let rank = ddp.process_group().rank();
    ddp.call(|net| net.loss(rank, step))
}

fn adamw(ddp: &Ddp) -> Result<AdamW> {
    AdamW::new(ddp, ParamsAdamW { lr: 0.05, ..Default::default() })
}

/// An optimizer that counts its calls.
struct Counting<'a, O> {
    optimizer: O,
    /// Whether each part was the last.
    parts: Vec<bool>,
    steps: usize,
    /// Runs after each part.
    then: Option<Box<dyn FnMut() + 'a>>,
}

impl<O: Optimizer> Counting<'_, O> {
    fn new(optimizer: O) -> Self {
        Self { optimizer, parts: Vec::new(), steps: 0, then: None }
    }

    /// The calls since the last time: whole steps, parts, and last parts.
    fn take(&mut self) -> [usize; 3] {
        let last = self.parts.iter().filter(|is_last| **is_last).count();
        [std::mem::take(&mut self.steps), std::mem::take(&mut self.parts).len() - last, last]
    }
}

impl<O: Optimizer> Optimizer for Counting<'_, O> {
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.steps += 1;
        self.optimizer.step(grads)
    }

    fn takes_parts(&self) -> Result<bool> {
        self.optimizer.takes_parts()
    }

    fn step_part(&mut self, grads: &GradStore, is_last: bool) -> Result<()> {
        self.optimizer.step_part(grads, is_last)?;
        self.parts.push(is_last);
        self.then.iter_mut().for_each(|then| then());
        Ok(())
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.optimizer.learning_rates()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        self.optimizer.set_learning_rates(learning_rates)
    }

    fn clip_grad_norm(&mut self, grads: &mut GradStore, max_norm: f64) -> Result<Tensor> {
        self.optimizer.clip_grad_norm(grads, max_norm)
    }
}

impl<O: StateDict> StateDict for Counting<'_, O> {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.optimizer.state_dict()
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.optimizer.load_state_dict(state)
    }
}

type Two = DistributedDataParallel<[nn::Linear; 2]>;

fn two(pg: &ProcessGroup, options: DdpOptions) -> Result<(Two, VarMap)> {
    let build = |vb: VarBuilder| Ok::<_, Error>([nn::linear(3, 4, vb.pp("a"))?, nn::linear(4, 2, vb.pp("b"))?]);
    filled(pg, build, options, 3)
}

/// In the backward pass, `between` comes after the gradients of the second layer.
fn loss_of_two(ddp: &Two, between: impl Fn() -> candle_core::Result<()> + Send + Sync + 'static) -> Result<Tensor> {
    let x = tensor(&[3, 3], 10 + ddp.process_group().rank() as u64);
    ddp.call(|[a, b]| b.forward(&a.forward(&x)?.apply_op1(Between(between))?)?.sqr()?.mean_all())
}

fn values_of<M>(ddp: &DistributedDataParallel<M>) -> Vec<Vec<f32>> {
    ddp.parameters().iter().map(|var| floats(var)).collect()
}
