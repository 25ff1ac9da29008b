//! AdamW, with its states on every rank or spread over the ranks.
use candle_core::backprop::GradStore;
use candle_ddp::optim::{AdamW, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DistributedDataParallel, Result};
use candle_nn::Optimizer as _;

pub(crate) enum Optimizer {
    Plain(AdamW),
    Zero(ZeroRedundancyOptimizer<ParamsAdamW>),
}

impl Optimizer {
    pub(crate) fn new<M>(ddp: &DistributedDataParallel<M>, learning_rate: f64, zero: bool) -> Result<Self> {
        let options = ParamsAdamW { lr: learning_rate, ..Default::default() };
        Ok(match zero {
            true => Self::Zero(ZeroRedundancyOptimizer::new(ddp, options)?),
            false => Self::Plain(AdamW::from_named(ddp.named_parameters(), options)?),
        })
    }

    pub(crate) fn step(&mut self, gradients: &GradStore) -> Result<()> {
        match self {
            Self::Plain(optimizer) => Ok(optimizer.step(gradients)?),
            Self::Zero(optimizer) => optimizer.step(gradients),
        }
    }
}
