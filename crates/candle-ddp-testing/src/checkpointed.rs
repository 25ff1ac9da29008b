//! A model that is computed in checkpoints, or without them.
use crate::{tensor, var};
use candle_core::{Module, Result, Tensor};
use candle_ddp_nn::{Dropout, Linear, checkpoint, linear, relu};
use candle_ddp_tensor::seed::Generator;
use candle_nn::{VarBuilder, VarMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Three layers with dropout, the second used twice; plain, in a checkpoint, or in nested checkpoints.
#[derive(Clone, Debug)]
pub struct Net {
    layers: [Linear; 3],
    dropout: Dropout,
    /// How often the middle has been computed.
    pub runs: Arc<AtomicUsize>,
    kind: Kind,
}

/// The checkpoints of a [`Net`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// None.
    Plain,
    /// One, of the middle.
    Checkpoint,
    /// A second one within it, of the last layer.
    Nested,
}

impl Net {
    /// Makes it with the variables of [`NAMES`].
    pub fn new(kind: Kind, vb: &VarBuilder) -> Result<Self> {
        let layer = |name: &str| linear(6, 6, vb.pp(name));
        let dropout = Dropout::with_generator(0.4, Arc::new(Mutex::new(Generator::new(5))));
        Ok(Self { layers: [layer("a")?, layer("b")?, layer("c")?], dropout, runs: Arc::default(), kind })
    }

    /// The part that a checkpoint computes.
    pub fn middle(&self, x: &Tensor) -> Result<Tensor> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        let x = self.dropout.forward(&relu(&self.layers[1].forward(x)?)?, true)?;
        // One of candle's own operations with a parameter.
        let x = (x * 1.5)?.broadcast_add(self.layers[0].bias().unwrap())?;
        if self.kind != Kind::Nested {
            return self.last(&x);
        }
        let net = self.clone();
        checkpoint(&[&x], move |x| net.last(&x[0]))
    }

    /// The last layer.
    pub fn last(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout.forward(&self.layers[2].forward(x)?, true)
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = relu(&self.layers[0].forward(x)?)?;
        let y = if self.kind == Kind::Plain {
            self.middle(&x)?
        } else {
            let net = self.clone();
            checkpoint(&[&x], move |x| net.middle(&x[0]))?
        };
        // The input and one of the checkpoint's layers are used outside it too.
        self.layers[1].forward(&(y + x)?)
    }
}

/// The names of its variables.
pub const NAMES: [&str; 6] = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"];

/// Sets all variables.
pub fn fill(varmap: &VarMap) {
    for (index, name) in NAMES.iter().enumerate() {
        let var = var(varmap, name);
        var.set(&tensor(var.dims(), index as u64 + 1)).unwrap();
    }
}
