//! Models that some of the ranks have together, while others have copies of them.
use super::*;
use crate::common::{assert_error, try_ranks};
use candle_ddp::{Failure, OnNonFinite, SpawnOptions, spawn_with};
use std::sync::Mutex;
use std::time::Duration;

fn hybrid(shard_ranks: usize) -> DdpOptions {
    DdpOptions {
        sharding: Sharding::Blocks { reshard_after_forward: true, ranks: Some(shard_ranks) },
        ..Default::default()
    }
}

fn hybrid_optimizer(ranks: usize) -> DdpOptions {
    DdpOptions { sharding: Sharding::Optimizer { ranks: Some(ranks) }, ..Default::default() }
}

/// Checks that training with these options and this step has the losses of plain training. Gradients may be added in another order,
/// unless they are those of two ranks or of one group.
fn same_losses(options: &DdpOptions, step: &Step) {
    for (ranks, shard_ranks) in [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)] {
        crate::common::ranks(ranks, |pg| {
            let (losses, output) = train(&pg, &made, options.clone(), step)?;
            let blocks = |reshard_after_forward| Sharding::Blocks { reshard_after_forward, ranks: Some(shard_ranks) };
            for sharding in [blocks(true), blocks(false), hybrid_optimizer(shard_ranks).sharding] {
                let hybrid = train(&pg, &made, DdpOptions { sharding, ..options.clone() }, step)?;
                if ranks == 2 || shard_ranks == ranks {
                    assert_eq!(hybrid, (losses.clone(), output.clone()), "{ranks} ranks, {sharding:?}");
                }
                for (loss, expected) in hybrid.0.iter().chain(&hybrid.1).zip(losses.iter().chain(&output)) {
                    assert!((loss - expected).abs() < 1e-5, "{ranks} ranks, {sharding:?}: {hybrid:?}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn copies_train_as_one_model() {
    same_losses(&DdpOptions::default(), &plain_step);
    let options = DdpOptions { on_non_finite: Some(OnNonFinite::Skip { at_most: 3 }), ..Default::default() };
    same_losses(&options, &|ddp, optimizer, pg, number| {
        // A rank that all others must hear of.
        let factor = if number == 2 && pg.rank() + 1 == pg.world_size() { f64::NAN } else { 1. };
        let loss = loss(ddp, pg, number)?;
        optimizer.step(&ddp.backward(&(&loss * factor)?)?)?;
        assert_eq!(ddp.skipped_steps(), u64::from(number >= 2));
        Ok(loss.to_scalar()?)
    });
}

#[test]
fn all_copies_begin_with_rank_0s_values() {
    let values = ranks(4, |pg| {
        let varmap = VarMap::new();
        DistributedDataParallel::with_options(&pg, &varmap, Net::new, hybrid(2))?;
        let vars = varmap.data().lock().unwrap();
        let mut all = Vec::new();
        for (name, var) in vars.iter() {
            all.push((name.clone(), var.flatten_all()?.to_vec1::<f32>()?));
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    });
    assert_eq!((&values[0], &values[1]), (&values[2], &values[3]));
    assert_ne!(values[0], values[1]);
}

#[test]
fn a_copy_that_differs_is_found() {
    let check = candle_ddp::ReplicaCheck { every: 1, warn_only: false };
    ranks(4, |pg| {
        let varmap = VarMap::new();
        let (ddp, mut optimizer) = made(&pg, &varmap, DdpOptions { replica_check: Some(check), ..hybrid(2) })?;
        plain_step(&ddp, &mut optimizer, &pg, 0)?;
        plain_step(&ddp, &mut optimizer, &pg, 1)?;
        if pg.rank() == 3 {
            let var = varmap.data().lock().unwrap()["layers.1.second.weight"].clone();
            var.set(&(var.as_detached_tensor() + 1e-3)?)?;
        }
        match ddp.backward(&loss(&ddp, &pg, 2)?) {
            Err(Error::ReplicasDiffer { names, ranks, .. }) => {
                assert_eq!((names, ranks), (vec!["layers.1.second.weight".to_string()], vec![2, 3]));
                Ok(())
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn the_estimate_of_memory_is_the_same_on_all_copies() {
    let all = ranks(4, |pg| {
        let estimate = |options| {
            let (ddp, optimizer) = made(&pg, &VarMap::new(), options)?;
            ddp.memory_estimate(&optimizer)
        };
        let blocks = [estimate(hybrid(2))?, estimate(sharded())?];
        let zero = [estimate(hybrid_optimizer(2))?, estimate(DdpOptions::default())?];
        for [half, quarter] in [&blocks, &zero] {
            assert!(half.devices[0].optimizer >= 2 * quarter.devices[0].optimizer - 64, "{half}\n{quarter}");
            assert!(half.devices[0].gradients >= 2 * quarter.devices[0].gradients - 64, "{half}\n{quarter}");
        }
        Ok([blocks, zero].map(|[half, _]| half))
    });
    assert_eq!((&all[0], &all[1]), (&all[2], &all[3]));
}

#[test]
fn wrong_numbers_of_ranks_are_an_error_on_every_rank() {
    let new = |pg: &ProcessGroup, options| DistributedDataParallel::with_options(pg, &VarMap::new(), Net::new, options);
    for wrong in [0, 3, 8] {
        ranks(4, |pg| {
            let parameter = vec![("weight".to_string(), candle_core::Var::ones(3, DType::F32, pg.device())?)];
            let from_vars = DistributedDataParallel::from_vars(&pg, (), parameter, hybrid_optimizer(wrong));
            let errors = [hybrid(wrong), hybrid_optimizer(wrong)].map(|options| new(&pg, options).err());
            for error in errors.into_iter().chain([from_vars.err()]) {
                let error = error.unwrap().to_string();
                assert!(error.contains(&format!("must divide the number of ranks, 4, but is {wrong}")), "{error}");
            }
            pg.barrier()
        });
    }
    ranks(4, |pg| {
        let error = new(&pg, hybrid(if pg.rank() == 1 { 4 } else { 2 })).unwrap_err();
        assert!(matches!(error, Error::Mismatch { rank: 1, .. }), "{error}");
        assert_error(new(&pg, hybrid(if pg.rank() == 1 { 3 } else { 2 })), &["must divide"]);
        // A rank whose optimizer's state all ranks have together.
        let options = if pg.rank() == 1 { of_zero() } else { hybrid_optimizer(2) };
        let error = new(&pg, options).unwrap_err();
        assert!(matches!(error, Error::Mismatch { rank: 1, .. }), "{error}");
        // A rank without sharding at all.
        let options = if pg.rank() == 1 { DdpOptions::default() } else { sharded() };
        let error = new(&pg, options).unwrap_err();
        assert!(matches!(error, Error::Mismatch { rank: 1, .. }), "{error}");
        pg.barrier()
    });
}

/// The other ranks first notice that the rank leaves groups that the program does not know.
#[test]
fn every_rank_has_the_first_error_and_its_ranks_number_in_the_world() {
    for (guilty, place) in [(3, "forward"), (0, "forward"), (3, "step"), (2, "backward")] {
        let found: Mutex<[Option<String>; 4]> = Mutex::default();
        let step = move |ddp: &Ddp, optimizer: &mut Optim, pg: &ProcessGroup, number: usize| {
            let fails = |here| match (pg.rank(), number, here) == (guilty, 2, place) {
                true => Err(Error::InvalidArgument { argument: "luck", reason: "it has run out".to_string() }),
                false => Ok(()),
            };
            fails("forward")?;
            let loss = loss(ddp, pg, number)?;
            fails("backward")?;
            let grads = ddp.backward(&loss)?;
            fails("step")?;
            optimizer.step(&grads)?;
            Ok(0.)
        };
        let failed = try_ranks(4, |pg| {
            let result = train(&pg, &made, hybrid(2), &step).map(drop);
            found.lock().unwrap()[pg.rank()] = result.as_ref().err().map(ToString::to_string);
            result
        });
        let cause = "luck: it has run out";
        assert_error(failed, &[cause]);
        for (rank, error) in found.into_inner().unwrap().into_iter().enumerate() {
            let error = error.unwrap();
            assert!(error.contains(cause), "{guilty} fails in {place}, rank {rank}: {error}");
            let is_named = error.starts_with(&format!("rank {guilty} ended the group"));
            assert_eq!(is_named, rank != guilty, "{guilty} fails in {place}, rank {rank}: {error}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_has_its_number_in_the_world() {
    // With the first, all ranks wait in the group of all ranks as well.
    let missed = |on_non_finite: Option<OnNonFinite>| {
        let waiting = Mutex::new(0);
        // Enough for the first step on a machine that is busy with other tests.
        let options = SpawnOptions { world_size: 4, timeout: Duration::from_secs(15), ..Default::default() };
        let ran = spawn_with(options, |pg| {
            let (ddp, mut optimizer) = made(&pg, &VarMap::new(), DdpOptions { on_non_finite, ..hybrid(2) })?;
            plain_step(&ddp, &mut optimizer, &pg, 0)?;
            if pg.rank() == 3 {
                // Until all others have given up.
                while *waiting.lock().unwrap() < 3 {
                    std::thread::sleep(Duration::from_millis(10));
                }
                return Ok(());
            }
            let error = plain_step(&ddp, &mut optimizer, &pg, 1).unwrap_err();
            *waiting.lock().unwrap() += 1;
            // Rank 0 is in no small group with rank 3, and waits for rank 2.
            let Error::Group(Failure::TimedOut { waiting_for, .. }) = &error else { panic!("{error}") };
            assert!(waiting_for.contains(&3) && error.to_string().contains('3'), "{error}");
            assert!(on_non_finite.is_none() || *waiting_for == [3], "{error}");
            Ok(())
        });
        ran.unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| missed(None));
        scope.spawn(|| missed(Some(OnNonFinite::Skip { at_most: 3 })));
    });
}
