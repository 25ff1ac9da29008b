//! The advice of docs/models.md on layers that each rank has for itself.
use crate::common::{floats, ranks, tensor, var, with_role};
use candle_core::Module;
use candle_ddp::nn::linear;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, Role};
use candle_nn::{VarBuilder, VarMap};

/// Each rank has its own expert, behind a layer that all share.
#[test]
fn an_ignored_layer_has_the_gradient_of_its_own_rank_and_is_trained_with_it() {
    let found = ranks(2, |pg| {
        let varmap = VarMap::new();
        let role = |name: &str| if name.starts_with("expert.") { Role::Ignored } else { Role::Parameter };
        let build = |vb: VarBuilder| -> candle_core::Result<_> {
            Ok((linear(4, 3, vb.pp("shared"))?, linear(3, 2, vb.pp("expert"))?))
        };
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, with_role(role))?;
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
    let [(shared, expert, gradients), (other_shared, other_expert, other_gradients)] = &found[..] else {
        panic!("two ranks")
    };
    assert_eq!((shared, &gradients[0]), (other_shared, &other_gradients[0]));
    assert!(expert != other_expert && gradients[1] != other_gradients[1]);
}
