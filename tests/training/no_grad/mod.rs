//! Evaluation under `no_grad`: the same results, without graphs, and nothing of it is left to training.
mod module;
mod passes;

use crate::common::{bits, fill, tensor};
use candle_core::{DType, ModuleT, Tensor};
use candle_ddp::nn::{self, Dropout, is_grad_enabled};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result};
use candle_nn::{VarBuilder, VarMap};

/// Convolution, batch norm, dropout and a linear layer, and a parameter that candle's own operation gets.
pub(crate) struct Net<C, N, L> {
    conv: C,
    norm: N,
    dropout: Dropout,
    position: Tensor,
    head: L,
}

pub(crate) type Ours = Net<nn::Conv2d, nn::BatchNorm, nn::Linear>;
pub(crate) type Candles = Net<candle_nn::Conv2d, candle_nn::BatchNorm, candle_nn::Linear>;

/// Builds the model with the layers of a crate.
macro_rules! build {
    ($name:ident, $Net:ty, $layers:ident) => {
        pub(crate) fn $name(vb: VarBuilder) -> candle_core::Result<$Net> {
            let config = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
            Ok(Net {
                conv: $layers::conv2d(2, 3, 3, config, vb.pp("conv"))?,
                norm: $layers::batch_norm(3, candle_nn::BatchNormConfig::default(), vb.pp("norm"))?,
                dropout: Dropout::new(0.5),
                position: vb.get((3, 4, 4), "position")?,
                head: $layers::linear(48, 5, vb.pp("head"))?,
            })
        }
    };
}

build!(ours, Ours, nn);
build!(candles, Candles, candle_nn);

impl<C: candle_core::Module, N: ModuleT, L: candle_core::Module> ModuleT for Net<C, N, L> {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let x = self.norm.forward_t(&self.conv.forward(x)?, train)?;
        let x = self.dropout.forward(&x.broadcast_add(&self.position)?, train)?;
        self.head.forward(&x.flatten_from(1)?)
    }
}

type Build<M> = fn(VarBuilder) -> candle_core::Result<M>;

/// With a model of tensors that candle does not track, if `has_model` is true.
fn wrap<M>(
    pg: &ProcessGroup,
    build: Build<M>,
    has_model: bool,
    options: DdpOptions,
) -> Result<(VarMap, DistributedDataParallel<M>)> {
    let varmap = VarMap::new();
    build(VarBuilder::from_varmap(&varmap, DType::F32, pg.device()))?;
    fill(&varmap, 3);
    let variance = crate::common::var(&varmap, "norm.running_var");
    variance.set(&variance.ones_like()?)?;
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    let ddp = if has_model { ddp.with_no_grad_model(build)? } else { ddp };
    Ok((varmap, ddp))
}

fn images(seed: usize) -> Tensor {
    tensor(&[2, 2, 4, 4], seed as u64)
}

/// Trains in turns with evaluations, each of which sees the last step, and has the bits of a pass outside of `no_grad`.
fn check_outputs<M: ModuleT>(pg: &ProcessGroup, build: Build<M>, has_model: bool, options: DdpOptions) -> Result<()> {
    let (varmap, ddp) = wrap(pg, build, has_model, options)?;
    let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
    let x = images(7);
    let mut earlier = Vec::new();
    for step in 0..3 {
        // First, so that no other forward pass has updated the replicas.
        let found = nn::no_grad(|| ddp.forward_t(&x, false))?;
        assert!(!found.track_op());
        let again = nn::no_grad(|| ddp.call(|net| net.forward_t(&ddp.cast_forward_inputs(&x).unwrap(), false)))?;
        assert!(!has_model || !again.track_op());
        let outside = ddp.forward_t(&x, false)?;
        assert!(outside.track_op() && is_grad_enabled());
        assert_eq!(bits(&found), bits(&outside), "step {step}");
        assert_eq!(bits(&again), bits(&outside), "step {step}");
        assert_ne!(bits(&found), earlier, "step {step}: stale weights");
        earlier = bits(&found);
        let loss = ddp.forward_t(&images(step * 2 + pg.rank()), true)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
        optimizer.step(&ddp.backward(&loss)?)?;
    }
    // A file that is loaded counts as well.
    fill(&varmap, 9);
    let variance = crate::common::var(&varmap, "norm.running_var");
    variance.set(&variance.ones_like()?)?;
    let found = nn::no_grad(|| ddp.forward_t(&x, false))?;
    assert_ne!(bits(&found), earlier);
    assert_eq!(bits(&found), bits(&ddp.forward_t(&x, false)?));
    Ok(())
}

#[test]
fn outputs_have_the_same_bits_and_no_graph() {
    crate::common::ranks(2, |pg| {
        for has_model in [false, true] {
            check_outputs(&pg, ours, has_model, DdpOptions::default())?;
            check_outputs(&pg, candles, has_model, DdpOptions::default())?;
            let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
            let options = DdpOptions { precision, ..Default::default() };
            check_outputs(&pg, ours, has_model, options)?;
        }
        Ok(())
    });
}

/// Statistics are the same variables in both models. Training mode under `no_grad` changes them, as in PyTorch.
#[test]
fn batch_norms_of_both_models_have_the_same_statistics() {
    crate::common::ranks(1, |pg| {
        let means = |has_model, has_graph: bool| {
            let (varmap, ddp) = wrap(&pg, ours, has_model, DdpOptions::default())?;
            let forward = || ddp.forward_t(&images(1), true);
            if has_graph {
                forward()?
            } else {
                nn::no_grad(forward)?
            };
            Ok::<_, candle_ddp::Error>(bits(&crate::common::var(&varmap, "norm.running_mean")))
        };
        let expected = means(false, true)?;
        assert_eq!(means(false, false)?, expected);
        assert_eq!(means(true, false)?, expected);
        Ok(())
    });
}
