//! Deaths between two outer steps of DiLoCo.
use super::shards::{States, generation};
use super::{Training, get, set};
use crate::Result;
use crate::elastic::State;
use crate::optim::{ParamsSgd, PeriodicModelAverager};
use crate::process_group::ProcessGroup;
use candle_core::Device;

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
