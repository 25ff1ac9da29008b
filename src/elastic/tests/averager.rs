//! Deaths between two outer steps of DiLoCo.
use super::shards::{States, generation};
use super::{Training, get, set};
use crate::Result;
use crate::elastic::State;
use crate::optim::{ParamsSgd, PeriodicModelAverager};
use crate::process_group::ProcessGroup;
use crate::state::{PerRank, RankZero, StateDict};
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use std::collections::BTreeMap;
use std::sync::Mutex;

const PERIOD: u64 = 3;

fn averager(pg: &ProcessGroup) -> Result<PeriodicModelAverager> {
    let outer = ParamsSgd { lr: 0.5, momentum: 0.5, nesterov: true, ..Default::default() };
    PeriodicModelAverager::new(pg, PERIOD, 0, outer)
}

/// A rank's local step.
fn step(weight: f32, rank: usize) -> f32 {
    weight * (1. - 0.1 * (rank + 1) as f32)
}

/// Trains to commit `until`, one for each averaging, and two local steps more.
fn train(until: u64) -> impl Fn(&ProcessGroup, &mut State<Training>) -> Result<()> + Sync {
    move |pg, state| {
        let mut averager = averager(pg)?;
        state.restore("averager", &mut averager)?;
        while state.commits() < until {
            set(state, step(get(state), pg.rank()));
            if averager.average_parameters(&state.varmap)? {
                state.commit_including(("averager", &mut averager))?;
            }
        }
        for _ in 0..2 {
            set(state, step(get(state), pg.rank()));
            assert!(!averager.average_parameters(&state.varmap)?);
        }
        Ok(())
    }
}

/// The weight as of the last commit, and the momentum.
fn committed(states: &mut States) -> Vec<[f32; 2]> {
    let of = |state: &mut State<Training>| {
        state.roll_back().unwrap();
        let momentum = &state.committed()["averager/momentum_buffer.w"];
        [get(state), momentum.to_device(&Device::Cpu).unwrap().to_vec1::<f32>().unwrap()[1]]
    };
    states.iter_mut().map(|state| of(state.as_mut().unwrap())).collect()
}

fn new(count: usize) -> States {
    (0..count).map(|_| None).collect()
}

#[test]
fn a_rank_that_is_replaced_between_outer_steps_continues_from_the_last_one() {
    let start = |mut states: States| {
        // All begin with rank 0's weight, which is not 0.
        states[0] = Some(super::state(4.));
        states
    };
    let (mut calm, errors) = generation(start(new(3)), train(4));
    assert_eq!(errors, [None, None, None]);
    let (mut states, _) = generation(start(new(3)), train(2));
    let differ: Vec<f32> = states.iter().map(|state| get(state.as_ref().unwrap())).collect();
    assert!(differ[0] != differ[1], "the last steps were local");
    states[1] = None;
    let (mut states, errors) = generation(states, train(4));
    assert_eq!(errors, [None, None, None]);
    let expected = committed(&mut calm);
    assert_eq!(committed(&mut states), expected);
    assert_eq!((expected[0], expected[1]), (expected[1], expected[2]));
}

#[test]
fn ranks_that_remain_average_over_fewer() {
    let mut states = new(3);
    states[0] = Some(super::state(4.));
    let (mut states, _) = generation(states, train(3));
    let [start, momentum] = committed(&mut states)[0];
    states.truncate(2);
    let (mut states, errors) = generation(states, train(4));
    assert_eq!(errors, [None, None]);
    let moved = |rank| start - (0..PERIOD).fold(start, |weight, _| step(weight, rank));
    let gradient = (moved(0) + moved(1)) / 2.;
    let momentum = 0.5 * momentum + gradient;
    let expected = start - 0.5 * (gradient + 0.5 * momentum);
    for [weight, found] in committed(&mut states) {
        assert!(
            (weight - expected).abs() < 1e-5 && (found - momentum).abs() < 1e-5,
            "{weight} {found} {expected} {momentum}"
        );
    }
}

/// Streaming: two fragments, of which each arrives a step after it was sent, and half of the local parameters remains.
const SPACING: u64 = 3;

fn pair() -> VarMap {
    let varmap = VarMap::new();
    for name in ["v", "w"] {
        let var = Var::from_tensor(&Tensor::new(4f32, &Device::Cpu).unwrap()).unwrap();
        varmap.data().lock().unwrap().insert(name.to_string(), var);
    }
    varmap
}

fn weights(varmap: &VarMap) -> [f32; 2] {
    ["v", "w"].map(|name| varmap.data().lock().unwrap()[name].to_scalar().unwrap())
}

/// A rank's local step, and its part in the averaging.
fn local(pg: &ProcessGroup, varmap: &VarMap, averager: &mut PeriodicModelAverager) -> Result<bool> {
    for var in varmap.all_vars() {
        let weight = step(var.to_scalar()?, pg.rank());
        var.set(&Tensor::new(weight, &Device::Cpu)?)?;
    }
    averager.average_parameters(varmap)
}

/// Trains to commit `until`, one for each fragment that arrives, and on until a fragment is in flight; or until it arrives, if the rank
/// `leaves` before it is sent. `wrap` says what the model is in a commit. Reports each rank's weights as of the last commit.
fn stream<M: StateDict>(
    until: u64,
    leaves: Option<usize>,
    wrap: impl Fn(VarMap) -> M + Sync,
    varmap: impl Fn(&M) -> &VarMap + Sync,
    found: &Mutex<BTreeMap<usize, [f32; 2]>>,
) -> impl Fn(&ProcessGroup, &mut State<Training>) -> Result<()> + Sync {
    move |pg, state| {
        let outer = ParamsSgd { lr: 0.5, momentum: 0.5, nesterov: true, ..Default::default() };
        let mut averager = PeriodicModelAverager::new(pg, 2 * SPACING, 0, outer)?.streaming(2, 1, 0.5)?;
        let mut model = wrap(pair());
        state.restore("weights", &mut model)?;
        state.restore("averager", &mut averager)?;
        while state.commits() < until {
            if local(pg, varmap(&model), &mut averager)? {
                state.commit_including((("weights", &mut model), ("averager", &mut averager)))?;
            }
        }
        found.lock().unwrap().insert(pg.rank(), weights(varmap(&model)));
        if leaves == Some(pg.rank()) {
            return Ok(());
        }
        for _ in 1..SPACING {
            assert!(!local(pg, varmap(&model), &mut averager)?);
        }
        if leaves.is_some() {
            return local(pg, varmap(&model), &mut averager).map(drop);
        }
        assert_eq!(averager.state_dict()?.contains_key("moved.v"), until % 2 == 1);
        Ok(())
    }
}

#[test]
fn a_rank_that_is_replaced_during_a_flight_continues_with_its_own_parameters() {
    let run = |states, until, leaves| {
        let found = Mutex::new(BTreeMap::new());
        let (states, errors) = generation(states, stream(until, leaves, PerRank, |model| &model.0, &found));
        (states, errors, found.into_inner().unwrap())
    };
    let (_, errors, expected) = run(new(3), 5, None);
    assert_eq!(errors, [None, None, None]);
    assert!(expected[&0] != expected[&1], "{expected:?}");
    for until in [2, 3] {
        for leaves in [None, Some(1)] {
            let (mut states, errors, _) = run(new(3), until, leaves);
            assert_eq!(
                [0, 1, 2].map(|rank: usize| errors[rank].is_some()),
                [leaves.is_some(), false, leaves.is_some()],
                "{errors:?}"
            );
            states[1] = None;
            let (_, errors, found) = run(states, 5, None);
            assert_eq!((errors, found), (vec![None; 3], expected.clone()), "replaced after commit {until}, {leaves:?}");
        }
    }
}

#[test]
fn ranks_that_remain_after_a_flight_continue_with_rank_0s_parameters() {
    let run = |states: States, until| {
        let (count, found) = (states.len(), Mutex::new(BTreeMap::new()));
        let (states, errors) = generation(states, stream(until, None, RankZero, |model| &model.0, &found));
        assert_eq!(errors, vec![None; count]);
        (states, found.into_inner().unwrap())
    };
    // Commit 1 is the first averaging; "v" arrives with commit 2, and "w" with commit 3.
    let (mut states, before) = run(new(3), 2);
    // Rank 1 dies, and a new one comes for each of two.
    states.remove(1);
    states.push(None);
    states.push(None);
    let (_, found) = run(states, 3);
    // "w" has been moving since the first averaging: four steps of rank 0, and then two of all four until it is sent.
    let common = [0, 1, 2].map(|rank| step(4., rank)).iter().sum::<f32>() / 3.;
    let ahead = |weight: f32, rank: usize, steps: u64| (0..steps).fold(weight, |weight, _| step(weight, rank));
    let sent = [0, 1, 2, 3].map(|rank| ahead(before[&0][1], rank, SPACING - 1));
    let gradient = common - sent.iter().sum::<f32>() / 4.;
    let result = common - 0.5 * (gradient + 0.5 * gradient);
    for (rank, [v, w]) in found {
        let expected = [ahead(before[&0][0], rank, SPACING), 0.5 * result + 0.5 * step(sent[rank], rank)];
        let differ = (v - expected[0]).abs().max((w - expected[1]).abs());
        assert!(differ < 1e-5, "rank {rank}: {:?}, not {expected:?}", [v, w]);
    }
}

/// Ranks have different parameters then.
#[test]
fn a_streamed_model_that_is_committed_as_the_same_on_all_ranks_is_an_error() {
    let found = Mutex::new(BTreeMap::new());
    // The first averaging makes them the same, and the first commit of a generation compares them.
    let (states, errors) = generation(new(2), stream(2, None, |varmap| varmap, |model| model, &found));
    assert_eq!(errors, [None, None]);
    let (_, errors) = generation(states, stream(3, None, |varmap| varmap, |model| model, &found));
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("weights") && error.contains("PerRank"), "{error}");
    }
}
