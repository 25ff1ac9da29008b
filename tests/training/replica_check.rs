//! Replicas that part are noticed.
use crate::common::{ranks, tensor};
use candle_core::{DType, Tensor};
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, linear};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, JoinOptions, ProcessGroup, ReplicaCheck, Result};
use candle_nn::{VarBuilder, VarMap};

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
    let found = found.unwrap();
    assert!(found.iter().all(|this| this == &found[0]), "{found:?}");
    found[0].clone().unwrap_or_default()
}

fn is_second(ddp: &DistributedDataParallel<Linear>) -> bool {
    ddp.process_group().rank() == 1
}

#[test]
fn ranks_that_part_are_named_with_their_variables() {
    let both = vec!["bias".to_string(), "weight".to_string()];
    // Another learning rate, from the first step on.
    let rate: fn(&_, &mut Sgd, u64) -> _ = |ddp, sgd, _| sgd.set_learning_rate(if is_second(ddp) { 0.2 } else { 0.1 });
    assert_eq!(found(options(5), rate), (5, both.clone()));
    // One more step, in the fifth pass.
    let step: fn(&_, &mut Sgd, u64) -> _ = |ddp, sgd, pass| {
        if pass == 5 && is_second(ddp) {
            let _guard = ddp.no_sync();
            sgd.step(&ddp.backward(&loss(ddp, 99)?)?)?;
        }
        Ok(())
    };
    let with_sums = found(options(4), step);
    assert_eq!(with_sums, (8, both));
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
    // Nothing parts, nobody looks, or somebody only warns.
    assert_eq!(found(options(1), |_, _, _| Ok(())).0, 0);
    assert_eq!(found(DdpOptions { replica_check: None, ..options(1) }, flip).0, 0);
    let warns = ReplicaCheck { every: 1, warn_only: true };
    assert_eq!(found(DdpOptions { replica_check: Some(warns), ..options(1) }, flip).0, 0);
}

#[test]
fn options_must_be_usable_and_the_same() {
    let messages = ranks(2, |pg| Ok(model(&pg, options(0)).map(drop).unwrap_err().to_string())).unwrap();
    assert!(messages.iter().all(|text| text.contains("`every` must be at least 1")), "{messages:?}");
    let messages = ranks(2, |pg| {
        let options = options(if pg.rank() == 0 { 5 } else { 6 });
        Ok(model(&pg, options).map(drop).unwrap_err().to_string())
    });
    let messages = messages.unwrap();
    assert!(messages.iter().all(|text| text.contains("every: 6")), "{messages:?}");
}

/// Passes that only some ranks make do not count, and those after them do.
#[test]
fn passes_under_no_sync_and_in_a_join_do_not_count() {
    ranks(2, |pg| {
        let ddp = model(&pg, options(2))?;
        let mut sgd = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
        let mut pass = |ddp: &DistributedDataParallel<Linear>, seed| sgd.step(&ddp.backward(&loss(ddp, seed)?)?);
        pass(&ddp, 0)?;
        for _ in 0..3 * pg.rank() {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, 1)?)?;
        }
        // The learning rate is the only state of the optimizer.
        ddp.join(JoinOptions::default(), || (0..2 + pg.rank() as u64).try_for_each(|seed| pass(&ddp, seed)))?;
        for seed in 10..15 {
            pass(&ddp, seed)?;
        }
        Ok(())
    })
    .unwrap();
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
        })
        .unwrap();
    };
    run(true, false);
    run(false, true);
}

#[test]
fn sharded_optimizers_and_several_models_keep_replicas_equal() {
    ranks(2, |pg| {
        let ddp = model(&pg, options(1))?;
        let mut zero = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() })?;
        for seed in 0..4 {
            zero.step(&ddp.backward(&loss(&ddp, seed)?)?)?;
        }
        let halves = DistributedDataParallel::with_options(
            &pg,
            &VarMap::new(),
            |vb| linear(3, 2, vb),
            DdpOptions { dtype: DType::BF16, ..options(1) },
        )?;
        let both = |seed| -> Result<Tensor> {
            let x = tensor(&[4, 3], seed).to_dtype(DType::BF16)?;
            Ok((loss(&ddp, seed)? + halves.forward(&x)?.sqr()?.mean_all()?.to_dtype(DType::F32)?)?)
        };
        for seed in 0..3 {
            candle_ddp::backward_with(&both(seed)?, &[&ddp, &halves], Default::default())?;
        }
        Ok(())
    })
    .unwrap();
}
