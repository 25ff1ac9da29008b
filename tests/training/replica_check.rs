//! Replicas that part are noticed.
use crate::common::{assert_error, ranks, tensor};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, linear};
use candle_ddp::optim::{AdamW, Optimizer, ParameterGroup, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, Error, JoinOptions, ProcessGroup, ReplicaCheck, Result, Role, Sharding,
};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

const OPTIONS: &str = "the optimizer's options";
const STEPS: &str = "the optimizer's number of steps";

fn options(every: u64) -> DdpOptions {
    DdpOptions { replica_check: Some(ReplicaCheck { every, warn_only: false }), ..Default::default() }
}

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 2, vb), options)
}

fn loss(ddp: &DistributedDataParallel<Linear>, seed: u64) -> Result<Tensor> {
    let rank = ddp.process_group().rank() as u64;
    Ok(ddp.forward(&tensor(&[4, 3], 10 * seed + rank))?.sqr()?.mean_all()?)
}

/// The number of passes until all ranks get the same error, and what it says.
fn found(
    options: DdpOptions,
    part: fn(&DistributedDataParallel<Linear>, &mut Sgd, u64) -> Result<()>,
) -> (u64, Vec<String>) {
    let found = ranks(3, |pg| {
        let ddp = model(&pg, options.clone())?;
        let mut sgd = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
        for pass in 1..=20 {
            match ddp.backward(&loss(&ddp, pass)?) {
                Ok(grads) => sgd.step(&grads)?,
                Err(Error::ReplicasDiffer { ranks, names, passes }) => {
                    assert_eq!((ranks, passes), (vec![1], pass));
                    return Ok(Some((pass, names)));
                }
                Err(error) => return Err(error),
            }
            part(&ddp, &mut sgd, pass)?;
        }
        Ok(None)
    });
    assert!(found.iter().all(|this| this == &found[0]), "{found:?}");
    found[0].clone().unwrap_or_default()
}

fn is_second(ddp: &DistributedDataParallel<Linear>) -> bool {
    ddp.process_group().rank() == 1
}

#[test]
fn ranks_that_part_are_named_with_their_variables() {
    let both_and = |own: &str| vec!["bias".to_string(), own.to_string(), "weight".to_string()];
    // Another learning rate, from the second step on.
    let rate: fn(&_, &mut Sgd, u64) -> _ = |ddp, sgd, _| sgd.set_learning_rate(if is_second(ddp) { 0.2 } else { 0.1 });
    assert_eq!(found(options(5), rate), (5, both_and(OPTIONS)));
    // One more step, in the fifth pass.
    let step: fn(&_, &mut Sgd, u64) -> _ = |ddp, sgd, pass| {
        if pass == 5 && is_second(ddp) {
            let mut ones = GradStore::default();
            for var in ddp.parameters() {
                ones.insert(&var, var.ones_like()?);
            }
            sgd.step(&ones)?;
        }
        Ok(())
    };
    assert_eq!(found(options(4), step), (8, vec!["bias".to_string(), "weight".to_string()]));
    // A bit of one number, right before the comparison: a step may round the difference away.
    let flip: fn(&_, &mut Sgd, u64) -> _ = |ddp, _, pass| {
        if pass == 2 && is_second(ddp) {
            let weight = ddp.named_parameters().into_iter().find(|(name, _)| name == "weight").unwrap().1;
            let mut values = weight.flatten_all()?.to_vec1::<f32>()?;
            values[4] = f32::from_bits(values[4].to_bits() ^ 1);
            weight.set(&Tensor::from_vec(values, weight.shape(), weight.device())?)?;
        }
        Ok(())
    };
    assert_eq!(found(options(3), flip), (3, vec!["weight".to_string()]));
    // Between the second pass and the 1000th.
    let late: fn(&_, &mut Sgd, u64) -> _ =
        |ddp, sgd, pass| sgd.set_learning_rate(if is_second(ddp) && pass > 2 { 0.2 } else { 0.1 });
    assert_eq!(found(options(1000), late), (10, both_and(OPTIONS)));
    // Nothing parts, nobody looks, or somebody only warns.
    assert_eq!(found(options(1), |_, _, _| Ok(())).0, 0);
    assert_eq!(found(DdpOptions { replica_check: None, ..options(1) }, flip).0, 0);
    let warns = ReplicaCheck { every: 1, warn_only: true };
    assert_eq!(found(DdpOptions { replica_check: Some(warns), ..options(1) }, flip).0, 0);
}

/// The ranks that are named when one rank of several has other weights.
fn odd(world_size: usize, odd: usize) -> Vec<usize> {
    let found = ranks(world_size, |pg| {
        let ddp = model(&pg, options(1))?;
        if pg.rank() == odd {
            let bias = ddp.named_parameters().into_iter().find(|(name, _)| name == "bias").unwrap().1;
            bias.set(&(bias.as_detached_tensor() + 1.)?)?;
        }
        match ddp.backward(&loss(&ddp, 1)?).map(drop) {
            Err(Error::ReplicasDiffer { ranks, names, .. }) if names == ["bias"] => Ok(ranks),
            other => panic!("{other:?}"),
        }
    });
    assert!(found.iter().all(|ranks| ranks == &found[0]), "{found:?}");
    found[0].clone()
}

#[test]
fn the_rank_that_most_others_contradict_is_named() {
    for rank in 0..3 {
        assert_eq!(odd(3, rank), [rank]);
    }
    // Of two, nobody knows.
    assert_eq!(odd(2, 0), [0, 1]);
    assert_eq!(odd(2, 1), [0, 1]);
}

/// A rank that built another model, too.
#[test]
fn a_model_that_only_rank_0_built_is_named_as_its_own() {
    let errors = ranks(3, |pg| {
        let outputs = if pg.rank() == 0 { 3 } else { 2 };
        let built = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(3, outputs, vb));
        match built.map(drop) {
            Err(Error::Mismatch { rank, difference, .. }) => Ok((rank, difference)),
            other => panic!("{other:?}"),
        }
    });
    for (rank, difference) in errors {
        assert_eq!(rank, 0);
        assert!(difference.contains("on rank 0, ") && difference.ends_with("on rank 1"), "{difference}");
    }
}

/// What the ranks find in the second pass, when optimizers have made one step and `again`.
fn found_after<O: Optimizer>(
    sharding: Sharding,
    new: fn(&DistributedDataParallel<Linear>) -> Result<O>,
    again: fn(&mut O, &GradStore) -> Result<()>,
) -> Vec<String> {
    let found = ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions { sharding, ..Default::default() })?;
        let mut optimizer = new(&ddp)?;
        let grads = ddp.backward(&loss(&ddp, 1)?)?;
        optimizer.step(&grads)?;
        if is_second(&ddp) {
            again(&mut optimizer, &grads)?;
        }
        drop(grads);
        match ddp.backward(&loss(&ddp, 2)?).map(drop) {
            Err(Error::ReplicasDiffer { names, passes: 2, ranks }) if ranks == [0, 1] => Ok(names),
            other => panic!("{other:?}"),
        }
    });
    let [first, second] = found.try_into().unwrap();
    assert_eq!(first, second);
    first
}

/// Also where it does not show in the variables: in the second pass, although the models are compared every 1000 passes.
#[test]
fn optimizers_that_differ_are_named() {
    fn adamw(lr: f64) -> ParamsAdamW {
        ParamsAdamW { lr, weight_decay: 0., ..Default::default() }
    }
    fn rate(ddp: &DistributedDataParallel<Linear>) -> f64 {
        if is_second(ddp) { 0.2 } else { 0.1 }
    }
    let all = ["bias", OPTIONS, "weight"];
    assert_eq!(found_after(Sharding::Off, |ddp| AdamW::new(ddp, adamw(rate(ddp))), |_, _| Ok(())), all);
    // At a learning rate of 0, only the number of steps differs.
    assert_eq!(found_after(Sharding::Off, |ddp| AdamW::new(ddp, adamw(0.)), Optimizer::step), [STEPS]);
    // Each rank updates its shard by its own learning rate, and all get the same model.
    let zero: fn(&DistributedDataParallel<Linear>) -> _ = |ddp| {
        let mut zero = ZeroRedundancyOptimizer::new(ddp, adamw(0.1))?;
        zero.set_learning_rate(rate(ddp))?;
        Ok(zero)
    };
    assert_eq!(found_after(Sharding::Optimizer { ranks: None }, zero, |_, _| Ok(())), [OPTIONS]);
    // Ranks may differ in what is not averaged.
    ranks(2, |pg| {
        let role = Arc::new(|name: &str| if name == "bias" { Role::Ignored } else { Role::Parameter });
        let ddp = model(&pg, DdpOptions { role, ..options(1) })?;
        let group = |(name, var), lr| ParameterGroup {
            parameters: vec![(name, var)],
            options: ParamsSgd { lr, ..Default::default() },
        };
        let groups = ddp.named_parameters().into_iter().map(|own| {
            let lr = if own.0 == "bias" { rate(&ddp) } else { 0.1 };
            group(own, lr)
        });
        let mut sgd = Sgd::from_groups(groups.collect())?;
        (0..4).try_for_each(|seed| sgd.step(&ddp.backward(&loss(&ddp, seed)?)?))
    });
}

/// They are in the buckets as well, and the next synchronised pass averages them.
#[test]
fn no_optimizer_steps_with_sums_of_no_sync() {
    let refused = |result: Result<()>| assert_error(result, &["sum of passes under no_sync"]);
    ranks(2, |pg| {
        let (ddp, other) = (model(&pg, options(1))?, model(&pg, options(1))?);
        let sgd = |ddp| Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() });
        let (mut of_ddp, mut of_other) = (sgd(&ddp)?, sgd(&other)?);
        let pass = || {
            let both = (loss(&ddp, 1)? + loss(&other, 2)?)?;
            candle_ddp::backward_with(&both, &[&ddp, &other], Default::default())
        };
        let guard = ddp.no_sync();
        let grads = pass()?;
        refused(of_ddp.step(&grads));
        // The gradients of the other model are averaged.
        of_other.step(&grads)?;
        drop((guard, grads));
        let grads = pass()?;
        of_ddp.step(&grads)?;
        Ok(())
    });
}

/// candle's own optimizers look at no marks. Ranks that have stepped with their own sums are found in the second synchronised pass.
#[test]
fn a_step_of_candles_optimizer_with_sums_of_no_sync_is_found() {
    ranks(2, |pg| {
        let ddp = model(&pg, DdpOptions::default())?;
        let mut sgd = <candle_nn::SGD as candle_nn::Optimizer>::new(ddp.parameters(), 0.1)?;
        let mut pass = |seed| {
            let grads = ddp.backward(&loss(&ddp, seed)?)?;
            Ok::<_, Error>(candle_nn::Optimizer::step(&mut sgd, &grads)?)
        };
        let guard = ddp.no_sync();
        pass(1)?;
        drop(guard);
        pass(2)?;
        let error = pass(3).unwrap_err();
        assert!(matches!(&error, Error::ReplicasDiffer { passes: 2, .. }), "{error:?}");
        Ok(())
    });
}

#[test]
fn options_must_be_usable_and_the_same() {
    ranks(2, |pg| {
        assert_error(model(&pg, options(0)), &["`every` must be at least 1"]);
        assert_error(model(&pg, options(5 + pg.rank() as u64)), &["every: 6"]);
        Ok(())
    });
}

/// Passes that only some ranks make do not count, and those after them do.
#[test]
fn passes_under_no_sync_and_in_a_join_do_not_count() {
    ranks(2, |pg| {
        let ddp = model(&pg, options(2))?;
        let mut sgd = Sgd::new(&ddp, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() })?;
        let pass = |sgd: &mut Sgd, seed| sgd.step(&ddp.backward(&loss(&ddp, seed)?)?);
        pass(&mut sgd, 0)?;
        for _ in 0..3 * pg.rank() {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, 1)?)?;
        }
        let joined =
            ddp.join(JoinOptions::default(), || (0..2 + pg.rank() as u64).try_for_each(|seed| pass(&mut sgd, seed)))?;
        joined.sync(&mut sgd)?;
        (10..15).try_for_each(|seed| pass(&mut sgd, seed))
    });
}

/// Without the broadcast, buffers may differ.
#[test]
fn buffers_are_compared_if_they_are_broadcast() {
    struct Net(BatchNorm, Linear);
    let run = |broadcast_buffers: bool, parts: bool| {
        ranks(2, |pg| {
            let varmap = VarMap::new();
            let options = DdpOptions { broadcast_buffers, ..options(1) };
            let build =
                |vb: VarBuilder| Ok::<_, Error>(Net(batch_norm(3, 1e-5, vb.pp("norm"))?, linear(3, 1, vb.pp("out"))?));
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
            let mut sgd = Sgd::new(&ddp, ParamsSgd::default())?;
            for seed in 0..3 {
                let x = tensor(&[8, 3], 2 * seed + pg.rank() as u64);
                let forward = |net: &Net| -> candle_core::Result<Tensor> {
                    let x = candle_core::ModuleT::forward_t(&net.0, &x, true)?;
                    candle_core::Module::forward(&net.1, &x)?.sqr()?.mean_all()
                };
                let loss = ddp.call(forward)?;
                sgd.step(&ddp.backward(&loss)?)?;
            }
            let mean = varmap.data().lock().unwrap()["norm.running_mean"].flatten_all()?.to_vec1::<f32>()?;
            let all = pg.all_gather_object(&mean)?;
            assert_eq!(all[0] != all[1], parts);
            Ok(())
        });
    };
    run(true, false);
    run(false, true);
}
