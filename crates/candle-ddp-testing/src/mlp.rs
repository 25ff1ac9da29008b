//! Models of tests.
use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear};

/// Two layers with a tanh between them.
#[derive(Debug)]
pub struct Mlp(Linear, Linear);

impl Mlp {
    /// Makes them with these names, from `sizes[0]` numbers over `sizes[1]` to `sizes[2]`.
    pub fn new(sizes: [usize; 3], names: [&str; 2], vb: VarBuilder) -> Result<Self> {
        Ok(Self(linear(sizes[0], sizes[1], vb.pp(names[0]))?, linear(sizes[1], sizes[2], vb.pp(names[1]))?))
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}
