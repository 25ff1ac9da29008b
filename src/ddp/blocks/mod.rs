//! Blocks of a model whose parameters are spread over the ranks: PyTorch's `fully_shard`.
mod build;
mod flat;
#[cfg(test)]
mod tests;
mod unit;

pub(super) use build::{Blocks, Construction};

use crate::tensor::function::is_grad_enabled;
use crate::tensor::hold::explained;
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_ddp_nn::{Results, Run, autocast_mode, checkpoint_holding, set_autocast};
use candle_nn::VarBuilder;
use std::fmt;
use std::sync::Arc;
use unit::Unit;
pub(super) use unit::{Held, Units};

/// A part of a model, such as a layer of a transformer, that [`DdpOptions::sharding`](crate::DdpOptions::sharding) spreads over the ranks.
/// Without it, this is the plain module.
///
/// It is called like the module: [`Module`] and [`ModuleT`] have `forward` and `forward_t`, and [`call`](Self::call) takes any number of
/// tensors. Made by [`block`].
pub struct Block<M> {
    module: Arc<M>,
    unit: Option<Arc<Unit>>,
}

/// Builds a part of a model whose parameters are gathered together: PyTorch's `fully_shard(block)`. [`Sharding`](crate::Sharding) has an
/// example.
///
/// `build` requests the block's variables, as any constructor does. They must not be requested anywhere else: tied weights are in one
/// block, or outside of all. Buffers, such as running statistics, stay whole on every rank.
///
/// # Errors
/// The errors of `build`; an error for a block within a block. Under sharding, on all ranks, errors for blocks that differ between ranks,
/// and errors of the group.
pub fn block<'a, M, E>(
    vb: VarBuilder<'a>,
    build: impl FnOnce(VarBuilder<'a>) -> std::result::Result<M, E>,
) -> std::result::Result<Block<M>, E>
where
    E: From<candle_core::Error>,
{
    let Some(construction) = Construction::current() else {
        return Ok(Block { module: Arc::new(build(vb)?), unit: None });
    };
    construction.open(vb.prefix())?;
    let module = build(vb)?;
    let unit = construction.close()?;
    Ok(Block { module: Arc::new(module), unit })
}

impl<M: Send + Sync + 'static> Block<M> {
    /// Runs `function` on the module and `inputs`: for forward passes that take other arguments than one tensor. Under sharding it runs again
    /// in the backward pass, and everything that [`checkpoint`](crate::nn::checkpoint) says about its function is true of this one.
    ///
    /// It returns a tensor, or several in a pair, a triple or a `Vec`. A result that is a view of a parameter, such as the first rows of an
    /// embedding of positions, is copied.
    ///
    /// # Errors
    /// The errors of `function`; errors of the group that gathers the parameters; [`Error::InvalidArgument`](crate::Error::InvalidArgument),
    /// carried by candle's error, for a parameter of another block.
    pub fn call<F, T>(&self, inputs: &[&Tensor], function: F) -> Result<T>
    where
        F: Fn(&M, &[Tensor]) -> Result<T> + Send + Sync + 'static,
        T: Results,
    {
        let plain = |inputs: &[&Tensor]| {
            let inputs: Vec<Tensor> = inputs.iter().map(|input| (*input).clone()).collect();
            function(&self.module, &inputs)
        };
        let Some(unit) = &self.unit else { return plain(inputs) };
        let owned = |results: T| results.replace(&mut |result| unit.own(result));
        if !is_grad_enabled() {
            let _held = unit.hold(Run::Forward)?;
            return plain(inputs).and_then(owned).map_err(explained);
        }
        if !unit.reshards() {
            unit.keep()?;
            return plain(inputs).and_then(owned).map_err(explained);
        }
        let (module, unit) = (Arc::clone(&self.module), Arc::clone(unit));
        let computed = checkpoint_holding(inputs, move |inputs, run| {
            let held = unit.hold(run)?;
            // The casts of the block's parameters end with the block.
            Ok((set_autocast(autocast_mode(), || function(&module, inputs))?, held))
        });
        computed.map_err(explained)
    }

    /// The module's forward pass.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor>
    where
        M: Module,
    {
        self.call(&[x], |module, inputs| module.forward(&inputs[0]))
    }

    /// The module's forward pass in training or evaluation mode.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor>
    where
        M: ModuleT,
    {
        self.call(&[x], move |module, inputs| module.forward_t(&inputs[0], train))
    }
}

/// Allows `xs.apply_t(&block, train)`.
impl<M: ModuleT + Send + Sync + 'static> ModuleT for Block<M> {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_t(x, train)
    }
}

impl<M: fmt::Debug> fmt::Debug for Block<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("module", &self.module).field("is_sharded", &self.unit.is_some()).finish()
    }
}
