//! Averages of sharded models have the values of one process that has the whole batch, and are saved.
use super::{Ddp, Optim, made, sharded};
use crate::common::{assert_error, going_on, ranks, waves};
use candle_core::{DType, Tensor};
use candle_ddp::checkpoint::{self, StateDict};
use candle_ddp::optim::{Ema, Optimizer, ParamsSgd, PeriodicModelAverager};
use candle_ddp::{DdpOptions, Error, Precision, ProcessGroup, Result, Sharding};
use candle_nn::VarMap;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

pub(super) type Values = BTreeMap<String, Vec<f64>>;

fn model(pg: &ProcessGroup, varmap: &VarMap, sharding: Sharding) -> Result<(Ddp, Optim)> {
    made(pg, varmap, DdpOptions { precision: Precision::Pure(DType::F64), sharding, ..Default::default() })
}

/// A step with this rank's part of a batch.
fn step(ddp: &Ddp, optimizer: &mut Optim, number: u64) -> Result<()> {
    let (rank, ranks) = (ddp.process_group().rank(), ddp.process_group().world_size());
    let batch = waves(&[12, 3], number as usize * 11).narrow(0, rank * 12 / ranks, 12 / ranks)?;
    optimizer.step(&ddp.backward(&ddp.forward(&batch)?.sqr()?.mean_all()?)?)
}

/// The whole variables, by a file.
pub(super) fn whole(pg: &ProcessGroup, varmap: &VarMap, path: &Path) -> Result<Values> {
    checkpoint::save_distributed(pg, varmap, path)?;
    let values = |(name, tensor): (String, Tensor)| Ok((name, tensor.flatten_all()?.to_vec1()?));
    checkpoint::read(path)?.into_iter().map(values).collect()
}

#[track_caller]
pub(super) fn assert_same(found: &Values, expected: &Values, what: &str) {
    assert!(found.keys().eq(expected.keys()) && !found.is_empty(), "{what}");
    for (name, values) in found {
        let difference = values.iter().zip(&expected[name]).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
        assert!(difference < 1e-12 && values.len() == expected[name].len(), "{what}: {name} differs by {difference}");
    }
}

/// A step and its average.
fn update(ddp: &Ddp, optimizer: &mut Optim, ema: &mut Ema, number: u64) -> Result<()> {
    step(ddp, optimizer, number)?;
    ema.update()
}

/// The values with a moment of the optimizer.
fn with_moment(mut values: Values, optimizer: &Optim) -> Result<Values> {
    let moment = &optimizer.state_dict()?["state.stem.weight.exp_avg"];
    values.insert("moment".to_string(), moment.flatten_all()?.to_vec1()?);
    Ok(values)
}

/// Checks that the pieces of a model that several ranks have are those of the first of them.
fn assert_saved_once(pg: &ProcessGroup, sharding: Sharding, parts: [&dyn StateDict; 2]) -> Result<()> {
    let (Sharding::Blocks { ranks, .. } | Sharding::Optimizer { ranks }) = sharding else { return Ok(()) };
    let is_copy = ranks.is_some_and(|ranks| pg.rank() >= ranks);
    for part in parts {
        let share = part.share()?;
        let pieces = share.dict.keys().filter(|name| name.rsplit_once('@').is_some_and(|(_, at)| at != "shape"));
        assert!(!share.spread.is_per_rank() || (pieces.count() == 0) == is_copy, "rank {}, {sharding:?}", pg.rank());
    }
    Ok(())
}

/// The averaged model after each second step of one process, which saves and loads nothing on the way.
fn unbroken(steps: u64, decay: Option<f64>) -> Vec<Values> {
    let folder = tempfile::tempdir().unwrap();
    let mut run = ranks(1, |pg| {
        let varmap = VarMap::new();
        let (ddp, mut optimizer) = model(&pg, &varmap, Sharding::Optimizer { ranks: None })?;
        let mut ema = Ema::new(&ddp, decay)?;
        let mut found = Vec::new();
        for number in 0..steps {
            update(&ddp, &mut optimizer, &mut ema, number)?;
            if number % 2 == 1 {
                ema.apply()?;
                found.push(with_moment(whole(&pg, &varmap, &folder.path().join("model"))?, &optimizer)?);
                ema.restore()?;
            }
        }
        Ok(found)
    });
    run.remove(0)
}

/// Continues a run in these steps, and saves it. Returns the averaged model.
fn averaged(ranks: usize, sharding: Sharding, steps: Range<u64>, decay: Option<f64>, folder: &Path) -> Values {
    let mut run = crate::common::ranks(ranks, |pg| {
        let mut varmap = VarMap::new();
        let (ddp, mut optimizer) = model(&pg, &varmap, sharding)?;
        let mut ema = Ema::new(&ddp, decay)?;
        let mut checkpointer = going_on(&pg, folder.join("run"))?;
        let last =
            checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer), ("ema", &mut ema)))?;
        assert_eq!((last, ema.updates()), (steps.start.checked_sub(1), steps.start));
        steps.clone().try_for_each(|number| update(&ddp, &mut optimizer, &mut ema, number))?;
        let parts = (("model", &mut varmap), ("optimizer", &mut optimizer), ("ema", &mut ema));
        checkpointer.save(steps.end - 1, parts)?.wait()?;
        assert_saved_once(&pg, sharding, [&varmap, &optimizer])?;
        let weights = whole(&pg, &varmap, &folder.join("model"))?;
        ema.apply()?;
        let averaged = whole(&pg, &varmap, &folder.join("model"))?;
        assert!(steps.start > 0 || averaged != weights);
        ema.restore()?;
        assert_eq!(whole(&pg, &varmap, &folder.join("model"))?, weights);
        with_moment(averaged, &optimizer)
    });
    run.pop().unwrap()
}

#[test]
fn averages_are_those_of_one_process_and_are_resumed_by_any_number_of_ranks() {
    let blocks = |ranks| Sharding::Blocks { reshard_after_forward: true, ranks };
    let zero = |ranks| Sharding::Optimizer { ranks };
    let runs = [
        (2, blocks(None)),
        (3, blocks(None)),
        (2, zero(None)),
        (1, blocks(None)),
        (2, zero(None)),
        (4, blocks(Some(2))),
        (2, blocks(None)),
        (4, blocks(Some(1))),
        (3, zero(None)),
        (4, zero(Some(2))),
        (2, zero(Some(1))),
        (4, blocks(Some(2))),
    ];
    for (decay, runs) in [(Some(0.7), &runs[..]), (None, &runs[..4])] {
        let folder = tempfile::tempdir().unwrap();
        let expected = unbroken(2 * runs.len() as u64, decay);
        for (number, (ranks, sharding)) in runs.iter().copied().enumerate() {
            let steps = 2 * number as u64..2 * number as u64 + 2;
            let found = averaged(ranks, sharding, steps, decay, folder.path());
            assert_same(&found, &expected[number], &format!("{ranks} ranks, {sharding:?}, decay: {decay:?}"));
            let saved = folder.path().join(format!("run/step-{:08}", 2 * number + 1));
            assert_eq!(saved.join("ema.safetensors").exists(), !matches!(sharding, Sharding::Blocks { .. }));
        }
    }
}

/// Two models that ranks 0 and 1, and ranks 2 and 3 have together.
#[test]
fn pieces_are_averaged_with_the_same_pieces_of_other_models() {
    let folder = tempfile::tempdir().unwrap();
    let found = ranks(4, |pg| {
        let of = |groups: [&[usize]; 2]| -> Result<ProcessGroup> {
            let [first, second] = groups.map(|ranks| pg.new_group(ranks));
            Ok(first?.or(second?).unwrap())
        };
        let (island, same) = (of([&[0, 1], &[2, 3]])?, of([&[0, 2], &[1, 3]])?);
        let varmap = VarMap::new();
        let (ddp, mut optimizer) = model(&island, &varmap, sharded().sharding)?;
        let mut averager = PeriodicModelAverager::new(&same, 2, 1, None)?;
        for number in 0..5 {
            step(&ddp, &mut optimizer, 10 * number + pg.rank() as u64 / 2)?;
            assert_eq!(averager.average_parameters(&ddp)?, number % 2 == 1);
        }
        let weights = whole(&island, &varmap, &folder.path().join(format!("{}", pg.rank() / 2)))?;
        // The ranks that have a model together have other pieces.
        let mut wrong = PeriodicModelAverager::new(&island, 2, 0, None)?;
        match wrong.average_parameters(&ddp) {
            Err(Error::Mismatch { rank: 1, difference, .. }) => {
                assert!(difference.contains("head.bias f64[1], elements 0 to 1 on rank 1"), "{difference}");
            }
            other => panic!("{other:?}"),
        }
        let outer = ParamsSgd { lr: 0.7, ..Default::default() };
        let refused = PeriodicModelAverager::new(&same, 2, 0, outer)?.average_parameters(&ddp);
        assert_error(refused, &["without an outer optimizer, or use Sharding::Optimizer"]);
        Ok(weights)
    });
    let mut expected = ranks(1, |pg| {
        let varmaps = [VarMap::new(), VarMap::new()];
        let mut models = varmaps
            .iter()
            .map(|varmap| model(&pg, varmap, Sharding::Optimizer { ranks: None }))
            .collect::<Result<Vec<_>>>()?;
        for number in 0..5 {
            for (island, (ddp, optimizer)) in models.iter_mut().enumerate() {
                step(ddp, optimizer, 10 * number + island as u64)?;
            }
            if number % 2 == 1 {
                for (one, other) in models[0].0.parameters().iter().zip(models[1].0.parameters()) {
                    let mean = ((one.as_tensor() + other.as_tensor())? * 0.5)?.detach();
                    one.set(&mean)?;
                    other.set(&mean)?;
                }
            }
        }
        varmaps.iter().map(|varmap| whole(&pg, varmap, &folder.path().join("one"))).collect::<Result<Vec<_>>>()
    });
    let expected = expected.remove(0);
    assert!(expected[0] != expected[1]);
    for (rank, found) in found.iter().enumerate() {
        assert_same(found, &expected[rank / 2], &format!("rank {rank}"));
    }
}

#[test]
fn the_pieces_of_an_average_are_not_saved_as_if_they_were_whole() {
    ranks(2, |pg| {
        let (ddp, _optimizer) = model(&pg, &VarMap::new(), sharded().sharding)?;
        let mut ema = Ema::new(&ddp, 0.9)?;
        ema.update()?;
        for result in [ema.averages().map(drop), ema.state_dict().map(drop)] {
            match result {
                Err(Error::Parameter { reason, .. }) => {
                    assert!(reason.contains("save the Ema with a Checkpointer"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
        Ok(())
    });
}
