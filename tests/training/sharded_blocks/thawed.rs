//! A head that is trained first, then everything: the head keeps its moments, however the model is spread over the ranks.
use super::averages::{Values, assert_same, whole};
use super::*;
use crate::common::{going_on, waves};
use candle_ddp::Role;
use candle_ddp::checkpoint::{self, Checkpointer, CheckpointerOptions, LoadOptions, StateDict};
use candle_ddp::optim::ParameterGroup;
use std::path::Path;
use std::sync::Arc;

/// The steps with the head alone, and then with everything.
const STEPS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Off,
    Zero,
    Blocks(Sharding),
}

fn params(lr: f64) -> ParamsAdamW {
    ParamsAdamW { lr, ..Default::default() }
}

fn model(pg: &ProcessGroup, varmap: &VarMap, kind: Kind, is_frozen: bool) -> candle_ddp::Result<Ddp> {
    let role = move |name: &str| if is_frozen && !name.starts_with("head.") { Role::Frozen } else { Role::Parameter };
    let sharding = match kind {
        Kind::Off => Sharding::Off,
        Kind::Zero => Sharding::Optimizer { ranks: None },
        Kind::Blocks(sharding) => sharding,
    };
    let (init_seed, precision) = (Some(7), Precision::Pure(DType::F64));
    let options = DdpOptions { role: Arc::new(role), sharding, init_seed, precision, ..Default::default() };
    DistributedDataParallel::with_options(pg, varmap, Net::new, options)
}

/// The parameters that are trained from the beginning, or the others.
fn group(ddp: &Ddp, is_head: bool) -> ParameterGroup<ParamsAdamW> {
    let parameters = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("head.") == is_head);
    ParameterGroup { parameters: parameters.collect(), options: params(if is_head { 0.05 } else { 0.02 }) }
}

fn train_for(optimizer: &mut AdamW, ddp: &Ddp, steps: std::ops::Range<u64>) -> candle_ddp::Result<()> {
    for number in steps {
        let (rank, ranks) = (ddp.process_group().rank(), ddp.process_group().world_size());
        let batch = waves(&[12, 3], number as usize * 11).narrow(0, rank * 12 / ranks, 12 / ranks)?;
        optimizer.step(&ddp.backward(&ddp.forward(&batch)?.sqr()?.mean_all()?)?)?;
    }
    Ok(())
}

/// The thawed model, from the weights of the frozen one.
fn thawed(pg: &ProcessGroup, varmap: VarMap, kind: Kind, path: &Path) -> candle_ddp::Result<(Ddp, VarMap)> {
    let Kind::Blocks(_) = kind else { return Ok((model(pg, &varmap, kind, false)?, varmap)) };
    checkpoint::save_distributed(pg, &varmap, path)?;
    let varmap = VarMap::new();
    let ddp = model(pg, &varmap, kind, false)?;
    checkpoint::load_distributed(pg, &varmap, path, LoadOptions::default())?;
    Ok((ddp, varmap))
}

/// `adds` the others to the optimizer of the head, or makes a new one, which loads what is known.
fn train(ranks: usize, kind: Kind, adds: bool) -> Values {
    let folder = tempfile::tempdir().unwrap();
    let mut run = crate::common::ranks(ranks, |pg| {
        let varmap = VarMap::new();
        let ddp = model(&pg, &varmap, kind, true)?;
        let mut optimizer = AdamW::from_groups(vec![group(&ddp, true)])?;
        train_for(&mut optimizer, &ddp, 0..STEPS)?;
        let (all, varmap) = thawed(&pg, varmap, kind, &folder.path().join("thawed"))?;
        if adds {
            optimizer.add_param_group(group(&all, false))?;
        } else {
            let state = optimizer.state_dict()?;
            drop(optimizer);
            optimizer = AdamW::from_groups(vec![group(&all, true), group(&all, false)])?;
            let report = optimizer.load_known(&state)?;
            assert_eq!(report.loaded, ["head.bias", "head.weight"]);
        }
        drop(ddp);
        train_for(&mut optimizer, &all, STEPS..2 * STEPS)?;
        whole(&pg, &varmap, &folder.path().join("model"))
    });
    run.remove(0)
}

const HYBRID: Sharding = Sharding::Blocks { reshard_after_forward: true, ranks: Some(2) };
const BLOCKS: Sharding = Sharding::Blocks { reshard_after_forward: true, ranks: None };

#[test]
fn a_head_keeps_its_moments_when_the_others_are_thawed() {
    let expected = train(1, Kind::Off, true);
    for (ranks, kind) in
        [(2, Kind::Off), (2, Kind::Zero), (3, Kind::Zero), (3, Kind::Blocks(BLOCKS)), (4, Kind::Blocks(HYBRID))]
    {
        for adds in [true, false] {
            assert_same(&train(ranks, kind, adds), &expected, &format!("{ranks} ranks, {kind:?}, adds: {adds}"));
        }
    }
}

#[test]
fn a_checkpoint_from_before_the_thaw_is_one_error_that_says_what_to_do() {
    for kind in [Kind::Off, Kind::Zero, Kind::Blocks(BLOCKS)] {
        let folder = tempfile::tempdir().unwrap();
        ranks(2, |pg| {
            let mut varmap = VarMap::new();
            let ddp = model(&pg, &varmap, kind, true)?;
            let mut optimizer = AdamW::from_groups(vec![group(&ddp, true)])?;
            train_for(&mut optimizer, &ddp, 0..1)?;
            let mut checkpointer = Checkpointer::new(&pg, folder.path(), CheckpointerOptions::default())?;
            checkpointer.save(1, (("model", &mut varmap), ("optimizer", &mut optimizer)))?.wait()?;
            drop((optimizer, ddp));
            let mut varmap = VarMap::new();
            let ddp = model(&pg, &varmap, kind, false)?;
            let mut checkpointer = going_on(&pg, folder.path())?;
            // As many groups with other parameters, and more groups.
            for (number, groups) in
                [vec![group(&ddp, false)], vec![group(&ddp, true), group(&ddp, false)]].into_iter().enumerate()
            {
                if number == 0 && kind != Kind::Off {
                    continue; // all parameters must be in a group
                }
                let mut optimizer = AdamW::from_groups(groups)?;
                let parts = (("model", &mut varmap), ("optimizer", &mut optimizer));
                let error = checkpointer.load_latest(parts).unwrap_err();
                assert!(matches!(error, Error::CheckpointPart { .. }), "{kind:?}: {error:?}");
                let text = error.to_string();
                assert!(number == 0 || text.contains("load_known"), "{kind:?}: {text}");
                assert!(number == 1 || text.contains("state."), "{kind:?}: {text}");
            }
            Ok(())
        });
    }
}
