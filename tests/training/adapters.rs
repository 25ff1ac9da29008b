//! The advice of docs/migrating.md on LoRA and on layers that each rank has for itself.
use crate::common::{floats, ranks, tensor};
use candle_core::{Module, Tensor, Var};
use candle_ddp::nn::linear;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, Role};
use candle_nn::{Init, VarBuilder, VarMap};
use std::sync::Arc;

/// A linear layer with an adapter of rank 2.
struct Lora {
    base: candle_ddp::nn::Linear,
    down: Tensor,
    up: Tensor,
}

impl Lora {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let down = vb.get_with_hints((2, 4), "lora.down", Init::Randn { mean: 0., stdev: 0.5 })?;
        Ok(Self {
            base: linear(4, 3, vb.pp("base"))?,
            down,
            up: vb.get_with_hints((3, 2), "lora.up", Init::Const(0.))?,
        })
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.base.forward(x)? + x.matmul(&self.down.t()?)?.matmul(&self.up.t()?)?
    }
}

fn options(role: impl Fn(&str) -> Role + Send + Sync + 'static) -> DdpOptions {
    DdpOptions { role: Arc::new(role), ..Default::default() }
}

fn var(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

#[test]
fn only_an_adapter_is_trained_and_can_be_merged() {
    let trained = ranks(2, |pg| {
        let varmap = VarMap::new();
        let role = |name: &str| if name.starts_with("lora.") { Role::Parameter } else { Role::Frozen };
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, Lora::new, options(role))?;
        let names: Vec<String> = ddp.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["lora.down", "lora.up"]);
        let base = floats(&var(&varmap, "base.weight"));
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        for step in 0..3 {
            let x = tensor(&[5, 4], 10 * step + pg.rank() as u64);
            optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        }
        assert_eq!(floats(&var(&varmap, "base.weight")), base);
        // The adapter's product is added to the frozen weight.
        let x = tensor(&[5, 4], 99);
        let adapted = ddp.forward(&x)?;
        let (weight, up) = (var(&varmap, "base.weight"), var(&varmap, "lora.up"));
        weight.set(&(weight.as_tensor() + up.matmul(var(&varmap, "lora.down").as_tensor())?)?.detach())?;
        up.set(&up.zeros_like()?)?;
        let difference = (ddp.forward(&x)? - adapted)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 1e-5, "{difference}");
        Ok((floats(&var(&varmap, "lora.down")), floats(&weight)))
    });
    let trained = trained.unwrap();
    assert_eq!(trained[0], trained[1]);
}

/// Each rank has its own expert, behind a layer that all share.
#[test]
fn an_ignored_layer_has_the_gradient_of_its_own_rank_and_is_trained_with_it() {
    let found = ranks(2, |pg| {
        let varmap = VarMap::new();
        let role = |name: &str| if name.starts_with("expert.") { Role::Ignored } else { Role::Parameter };
        let build = |vb: VarBuilder| -> candle_core::Result<_> {
            Ok((linear(4, 3, vb.pp("shared"))?, linear(3, 2, vb.pp("expert"))?))
        };
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options(role))?;
        let (shared, expert) = (var(&varmap, "shared.weight"), var(&varmap, "expert.weight"));
        expert.set(&tensor(expert.dims(), 7 + pg.rank() as u64))?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let loss = ddp.call(|(shared, expert)| expert.forward(&shared.forward(&tensor(&[5, 4], pg.rank() as u64))?))?;
        let grads = ddp.backward(&loss.sqr()?.mean_all()?)?;
        let gradients = [&shared, &expert].map(|var| floats(grads.get(var).unwrap()));
        let before = floats(&expert);
        optimizer.step(&grads)?;
        assert_ne!(floats(&expert), before);
        Ok((floats(&shared), floats(&expert), gradients))
    });
    let [(shared, expert, gradients), (other_shared, other_expert, other_gradients)] = &found.unwrap()[..] else {
        panic!("two ranks")
    };
    assert_eq!((shared, &gradients[0]), (other_shared, &other_gradients[0]));
    assert!(expert != other_expert && gradients[1] != other_gradients[1]);
}
