//! Programs with several models, each under DDP on a part of every batch and in one process on the whole batch.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses only some programs, and a failed test may panic
use crate::common::{Mlp, added_to, filled, floats, plain, tensor, var};
use candle_core::{DType, IndexOp, Module, Tensor, Var};
use candle_ddp::{Backward, DdpOptions, DistributedDataParallel, ProcessGroup, Result, backward_with};
use candle_nn::loss::{binary_cross_entropy_with_logit, mse};
use candle_nn::{Optimizer, SGD, VarBuilder};

pub(crate) fn mlp(sizes: [usize; 3], vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new(sizes, ["in", "out"], vb)
}

pub(crate) const NAMES: [&str; 4] = ["in.weight", "in.bias", "out.weight", "out.bias"];
const STEPS: usize = 8;
const BATCH: usize = 6;

/// A model trained in one process.
struct Plain {
    module: Mlp,
    vars: Vec<Var>,
}

impl Plain {
    fn new(sizes: [usize; 3], seed: u64) -> Self {
        let (module, varmap) = plain(|vb| mlp(sizes, vb), DType::F32, seed);
        Self { module, vars: NAMES.iter().map(|name| var(&varmap, name)).collect() }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.module.forward(x)?)
    }
}

pub(crate) type Ddp = DistributedDataParallel<Mlp>;

pub(crate) fn wrap(pg: &ProcessGroup, sizes: [usize; 3], seed: u64, options: &DdpOptions) -> Result<Ddp> {
    Ok(filled(pg, |vb| mlp(sizes, vb), options.clone(), seed)?.0)
}

pub(crate) fn all_floats(vars: &[Var]) -> Vec<f32> {
    vars.iter().flat_map(|var| floats(var)).collect()
}

fn bce(output: &Tensor, label: f64) -> Result<Tensor> {
    Ok(binary_cross_entropy_with_logit(output, &output.ones_like()?.detach().affine(label, 0.)?)?)
}

/// Rank `rank`'s part of a step's batch; without a rank, the whole batch.
fn batch(world_size: usize, rank: Option<usize>, columns: usize, seed: usize) -> Tensor {
    let whole = tensor(&[world_size * BATCH, columns], seed as u64);
    rank.map_or(whole.clone(), |rank| whole.i(rank * BATCH..(rank + 1) * BATCH).unwrap())
}

const G: ([usize; 3], u64) = ([3, 8, 4], 21);
const D: ([usize; 3], u64) = ([4, 9, 1], 22);

/// The training loop of PyTorch's DCGAN tutorial.
pub(crate) fn gan(pg: &ProcessGroup, options: &DdpOptions) -> Result<Vec<f32>> {
    let (g, d) = (wrap(pg, G.0, G.1, options)?, wrap(pg, D.0, D.1, options)?);
    let (mut optimizer_g, mut optimizer_d) = (SGD::new(g.parameters(), 0.2)?, SGD::new(d.parameters(), 0.2)?);
    for step in 0..STEPS {
        let real = batch(pg.world_size(), Some(pg.rank()), 4, step);
        let noise = batch(pg.world_size(), Some(pg.rank()), 3, 100 + step);
        let mut grads = d.backward(&bce(&d.forward(&real)?, 1.0)?)?;
        let fake = g.forward(&noise)?;
        grads = backward_with(&bce(&d.forward(&fake.detach())?, 0.0)?, &[&d], added_to(&mut grads))?;
        optimizer_d.step(&grads)?;

        let _frozen = d.freeze();
        let grads = g.backward(&bce(&d.forward(&fake)?, 1.0)?)?;
        assert!(d.parameters().iter().all(|var| grads.get(var).is_none()));
        optimizer_g.step(&grads)?;
    }
    Ok(all_floats(&[g.parameters(), d.parameters()].concat()))
}

pub(crate) fn plain_gan(world_size: usize) -> Vec<f32> {
    let (g, d) = (Plain::new(G.0, G.1), Plain::new(D.0, D.1));
    let mut optimizer_g = SGD::new(g.vars.clone(), 0.2).unwrap();
    let mut optimizer_d = SGD::new(d.vars.clone(), 0.2).unwrap();
    for step in 0..STEPS {
        let (real, noise) = (batch(world_size, None, 4, step), batch(world_size, None, 3, 100 + step));
        let fake = g.forward(&noise).unwrap();
        let of_real = bce(&d.forward(&real).unwrap(), 1.0).unwrap();
        let of_fake = bce(&d.forward(&fake.detach()).unwrap(), 0.0).unwrap();
        optimizer_d.backward_step(&(of_real + of_fake).unwrap()).unwrap();
        optimizer_g.backward_step(&bce(&d.forward(&fake).unwrap(), 1.0).unwrap()).unwrap();
    }
    all_floats(&[g.vars, d.vars].concat())
}

const SMALL: ([usize; 3], u64) = ([4, 7, 3], 31);
const LARGE: ([usize; 3], u64) = ([4, 12, 5], 32);
const ADAPTER: ([usize; 3], u64) = ([3, 6, 5], 33);

/// A student and an adapter learn from a teacher's outputs.
pub(crate) fn distillation(pg: &ProcessGroup, options: &DdpOptions) -> Result<Vec<f32>> {
    let student = wrap(pg, SMALL.0, SMALL.1, options)?;
    let teacher = wrap(pg, LARGE.0, LARGE.1, options)?;
    let adapter = wrap(pg, ADAPTER.0, ADAPTER.1, options)?;
    let mut optimizer = SGD::new([student.parameters(), adapter.parameters()].concat(), 0.2)?;
    for step in 0..STEPS {
        let x = batch(pg.world_size(), Some(pg.rank()), 4, step);
        let _frozen = teacher.freeze();
        let loss = mse(&adapter.forward(&student.forward(&x)?)?, &teacher.forward(&x)?)?;
        optimizer.step(&backward_with(&loss, &[&student, &adapter], Backward::default())?)?;
    }
    Ok(all_floats(&[student.parameters(), adapter.parameters(), teacher.parameters()].concat()))
}

pub(crate) fn plain_distillation(world_size: usize) -> Vec<f32> {
    let [student, teacher, adapter] = [SMALL, LARGE, ADAPTER].map(|(sizes, seed)| Plain::new(sizes, seed));
    let mut optimizer = SGD::new([&student.vars[..], &adapter.vars].concat(), 0.2).unwrap();
    for step in 0..STEPS {
        let x = batch(world_size, None, 4, step);
        let output = adapter.forward(&student.forward(&x).unwrap()).unwrap();
        optimizer.backward_step(&mse(&output, &teacher.forward(&x).unwrap()).unwrap()).unwrap();
    }
    all_floats(&[student.vars, adapter.vars, teacher.vars].concat())
}
