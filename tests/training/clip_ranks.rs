//! Clipping where ranks have different gradients, or none.
use crate::common::{added_to, assert_error, floats, gradients, ranks, sharded, tensor};
use candle_core::backprop::GradStore;
use candle_core::{Module, Var};
use candle_ddp::nn::{Linear, linear};
use candle_ddp::optim::{
    Lamb, NormType, Optimizer, ParamsLamb, ParamsSgd, Sgd, ZeroRedundancyOptimizer, clip_grad_norm,
    clip_grad_norm_with, clip_grad_value,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Role, Sharding, backward_with};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

type Ddp = DistributedDataParallel<(Linear, Linear)>;

/// A layer whose gradients are averaged, and one of each rank's own.
fn model(pg: &ProcessGroup) -> Result<Ddp> {
    model_with(pg, Sharding::Off)
}

fn model_with(pg: &ProcessGroup, sharding: Sharding) -> Result<Ddp> {
    let build =
        |vb: VarBuilder| Ok::<_, candle_core::Error>((linear(6, 6, vb.pp("shared"))?, linear(6, 2, vb.pp("expert"))?));
    let role = |name: &str| if name.starts_with("expert.") { Role::Ignored } else { Role::Parameter };
    let options = DdpOptions { init_seed: Some(5), role: Arc::new(role), sharding, ..Default::default() };
    DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)
}

fn backward(ddp: &Ddp, step: u64) -> Result<GradStore> {
    let rank = ddp.process_group().rank();
    let x = (tensor(&[4, 6], 10 * step + rank as u64) * (1. + rank as f64))?;
    let y = ddp.call(|(shared, expert)| expert.forward(&shared.forward(&x)?))?;
    let loss = (y.sqr()?.mean_all()? * 10.)?;
    // The sum of two passes has its own memory.
    let mut grads = ddp.backward(&(&loss * 0.5)?)?;
    let options = added_to(&mut grads);
    backward_with(&(loss * 0.5)?, &[ddp], options)
}

fn of(ddp: &Ddp, layer: &str) -> Vec<Var> {
    let all = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with(layer));
    all.map(|(_, var)| var).collect()
}

fn norm(values: &[f32], norm_type: NormType) -> f64 {
    let values = values.iter().map(|value| f64::from(*value));
    match norm_type {
        NormType::Inf => values.map(f64::abs).fold(0., f64::max),
        _ => values.map(|value| value * value).sum::<f64>().sqrt(),
    }
}

fn shared(ddp: &Ddp) -> Vec<f32> {
    of(ddp, "shared.").iter().flat_map(|var| floats(var)).collect()
}

#[test]
fn the_norm_is_that_of_averaged_gradients() {
    let found = ranks(3, |pg| {
        let ddp = model(&pg)?;
        let (averaged, experts) = (of(&ddp, "shared."), of(&ddp, "expert."));
        let mut norms = Vec::new();
        for norm_type in [NormType::L2, NormType::Inf] {
            let mut grads = backward(&ddp, 1)?;
            let (all, own) = (gradients(&grads, &averaged), gradients(&grads, &experts));
            let expected = norm(&all, norm_type);
            let options = candle_ddp::optim::ClipOptions { norm_type, ..Default::default() };
            let found = clip_grad_norm_with(&mut grads, &ddp, 0.5, options)?.to_scalar::<f64>()?;
            assert!((found - expected).abs() < 1e-5 * expected && expected > 1., "{found} {expected}");
            for (vars, before) in [(&averaged, all), (&experts, own.clone())] {
                let scaled: Vec<f32> = before.iter().map(|value| (f64::from(*value) * 0.5 / found) as f32).collect();
                let after = gradients(&grads, vars);
                let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
                assert!(after.iter().zip(&scaled).all(is_close), "{after:?} {scaled:?}");
            }
            norms.push(found.to_bits());
            // Alone, they are limited by their own norm.
            let mut grads = backward(&ddp, 1)?;
            let found = clip_grad_norm_with(&mut grads, experts.clone(), 0.5, options)?.to_scalar::<f64>()?;
            assert!((found - norm(&own, norm_type)).abs() < 1e-5 * found, "{found}");
        }
        Ok(norms)
    });
    assert!(found.iter().all(|norms| norms == &found[0]), "{found:?}");
}

/// By the function, by the optimizer, and inside of LAMB's step.
#[test]
fn shared_parameters_stay_the_same_on_all_ranks() {
    type Step = Box<dyn FnMut(&Ddp, &mut GradStore) -> Result<()>>;
    let steps: [fn(&Ddp) -> Result<Step>; 3] = [
        |ddp| {
            let mut optimizer = Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
            Ok(Box::new(move |ddp, grads| {
                clip_grad_norm(grads, ddp, 0.5)?;
                optimizer.step(grads)
            }))
        },
        |ddp| {
            let mut optimizer = Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
            Ok(Box::new(move |_, grads| {
                optimizer.clip_grad_norm(grads, 0.5)?;
                optimizer.step(grads)
            }))
        },
        |ddp| {
            let mut optimizer = Lamb::new(ddp, ParamsLamb { lr: 0.1, max_grad_norm: Some(0.5), ..Default::default() })?;
            Ok(Box::new(move |_, grads| optimizer.step(grads)))
        },
    ];
    for (number, make) in steps.into_iter().enumerate() {
        let found = ranks(2, |pg| {
            let ddp = model(&pg)?;
            let mut step = make(&ddp)?;
            // Not in the second, where the ranks compare their models.
            let mut grads = backward(&ddp, 1)?;
            step(&ddp, &mut grads)?;
            Ok(shared(&ddp))
        });
        assert_eq!(found[0], found[1], "{number}");
    }
}

/// The optimizer will use other gradients than those in the store.
#[test]
fn gradients_that_an_optimizer_keeps_are_not_clipped_by_others() {
    ranks(2, |pg| {
        let ddp = model_with(&pg, Sharding::Optimizer { ranks: None })?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd { lr: 1., ..Default::default() })?;
        let mut grads = backward(&ddp, 1)?;
        let refused = |result: Result<()>| match result {
            Err(Error::InvalidArgument { argument: "grads", reason }) => {
                assert!(
                    reason.contains("shared.weight") && reason.contains("optimizer's `clip_grad_norm`"),
                    "{reason}"
                );
            }
            other => panic!("{other:?}"),
        };
        refused(clip_grad_norm(&mut grads, &ddp, 0.5).map(drop));
        refused(clip_grad_value(&mut grads, &ddp, 0.5));
        clip_grad_norm(&mut grads, of(&ddp, "expert."), 0.5)?;
        let before = shared(&ddp);
        assert!(optimizer.clip_grad_norm(&mut grads, 0.5)?.to_scalar::<f64>()? > 0.5);
        optimizer.step(&grads)?;
        let moved: Vec<f32> = shared(&ddp).iter().zip(&before).map(|(after, before)| after - before).collect();
        let moved = norm(&moved, NormType::L2);
        assert!((moved - 0.5).abs() < 1e-4, "{moved}");
        Ok(())
    });
    // Those of a sharded model are pieces.
    ranks(2, |pg| {
        let ddp = model_with(&pg, sharded().sharding)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd { lr: 1., ..Default::default() })?;
        let mut grads = backward(&ddp, 1)?;
        assert_error(clip_grad_norm(&mut grads, &ddp, 0.5), &["grads: ", "shared.weight"]);
        assert!(optimizer.clip_grad_norm(&mut grads, 0.5)?.to_scalar::<f64>()? > 0.5);
        optimizer.step(&grads)
    });
}
