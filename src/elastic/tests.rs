//! Commits, and which of them ranks take over; ranks are threads.
#![allow(clippy::unwrap_used)]
mod averager;
mod schedules;
mod shards;
mod skipped;

use super::State;
use super::synchronise::{Entrance, synchronise};
use crate::Error;
use crate::amp::{GradScaler, GradScalerOptions};
use crate::data::{DataLoader, DistributedSampler, LoaderOptions, LoaderState, SamplerOptions};
use crate::process_group::{ProcessGroup, spawn};
use crate::seed::Generator;
use crate::state::{Parts, RankZero, StateDict};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use std::sync::Mutex;

struct Training {
    varmap: VarMap,
    noise: Generator,
    progress: LoaderState,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("noise", &mut self.noise), ("progress", &mut self.progress)]
    }
}

fn state(value: f32) -> State<Training> {
    let varmap = VarMap::new();
    let var = Var::from_tensor(&Tensor::new(&[value, value], &Device::Cpu).unwrap()).unwrap();
    varmap.data().lock().unwrap().insert("w".to_string(), var);
    let progress = LoaderState { dataset_len: 10, ..Default::default() };
    let mut state = State::new(Training { varmap, noise: Generator::new(1), progress });
    state.commit_first().unwrap();
    state
}

fn entrance(is_new: bool) -> Entrance {
    Entrance { generation: 1, is_new, has_begun: false, start_over: true }
}

fn set(state: &State<Training>, value: f32) {
    state.varmap.data().lock().unwrap()["w"].set(&Tensor::new(&[value, value], &Device::Cpu).unwrap()).unwrap();
}

fn get(state: &State<Training>) -> f32 {
    state.varmap.data().lock().unwrap()["w"].to_vec1::<f32>().unwrap()[1]
}

#[test]
fn a_commit_is_a_copy_to_which_the_state_goes_back() {
    let mut state = state(1.);
    set(&state, 2.);
    state.progress.advance(3);
    state.commit().unwrap();
    let offset = state.noise.offset();
    set(&state, 3.);
    state.progress.advance(3);
    state.noise.next_u64();
    state.roll_back().unwrap();
    assert_eq!((get(&state), state.progress.consumed, state.noise.offset(), state.commits()), (2., 3, offset, 1));
    // Of the first commit as well.
    let mut first = self::state(1.);
    set(&first, 5.);
    first.roll_back().unwrap();
    assert_eq!((get(&first), first.commits()), (1., 0));
}

#[test]
fn a_checkpoint_holds_the_last_commit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let mut saved = state(1.);
    set(&saved, 2.);
    saved.commit().unwrap();
    set(&saved, 3.);
    saved.save(&path).unwrap();
    let mut loaded = state(7.);
    loaded.load(&path).unwrap();
    assert_eq!((get(&loaded), loaded.commits()), (2., 1));
    let error = loaded.load_state_dict(&saved.varmap.state_dict().unwrap()).unwrap_err().to_string();
    assert!(error.contains("not the state of an elastic run"), "{error}");
    // What does not fit changes nothing.
    let mut part = saved.state_dict().unwrap();
    part.remove("progress/epoch").unwrap();
    let mut other = state(7.);
    assert!(other.load_state_dict(&part).unwrap_err().to_string().contains("epoch"));
    assert_eq!((get(&other), other.commits()), (7., 0));
    other.roll_back().unwrap();
}

#[test]
fn all_take_over_the_commit_of_the_rank_that_is_furthest() {
    // (commits, whether the process is new) of each rank, and whose state all have in the end.
    for (ranks, root) in [
        (vec![(3, false), (4, false), (0, true)], 1),
        (vec![(0, true), (0, false), (0, false)], 1),
        (vec![(0, true), (0, true), (0, true)], 0),
        (vec![(5, true), (0, false), (5, true)], 0),
    ] {
        let values = spawn(3, |pg| {
            let mut state = state(pg.rank() as f32);
            for _ in 0..ranks[pg.rank()].0 {
                state.commit()?;
            }
            // What a step has changed before it failed.
            set(&state, 100.);
            synchronise(&mut state, &pg, entrance(ranks[pg.rank()].1))?;
            Ok((get(&state), state.commits()))
        });
        let expected = (root as f32, ranks[root].0);
        assert_eq!(values.unwrap(), [expected; 3], "{ranks:?}");
    }
    // Nobody is new, and none ahead: each goes back by itself.
    let values = spawn(2, |pg| {
        let mut state = state(pg.rank() as f32);
        set(&state, 100.);
        synchronise(&mut state, &pg, entrance(false))?;
        Ok(get(&state))
    });
    assert_eq!(values.unwrap(), [0., 1.]);
}

/// No rank has been in an earlier generation, and one of them knows that there was one.
#[test]
fn when_all_ranks_were_lost_they_begin_with_the_programs_checkpoint() {
    let enter = |rank: usize, has_begun| Entrance { has_begun: has_begun && rank == 1, ..entrance(true) };
    let values = |has_begun: bool, finds: fn(usize) -> Option<u64>| {
        spawn(2, move |pg| {
            let load = move |state: &mut State<Training>, pg: &ProcessGroup| {
                assert_eq!(pg.world_size(), 2);
                let Some(commits) = finds(pg.rank()) else { return Ok(false) };
                set(state, 10. + pg.rank() as f32);
                state.set_commits(commits);
                Ok(true)
            };
            let mut state = state(pg.rank() as f32).on_total_loss(load);
            synchronise(&mut state, &pg, enter(pg.rank(), has_begun))?;
            let value = get(&state);
            // It is the commit to which they go back.
            set(&state, 100.);
            state.roll_back()?;
            assert_eq!(get(&state), value);
            Ok((value, state.commits()))
        })
        .unwrap()
    };
    assert_eq!(values(true, |_| Some(7)), [(10., 7); 2]);
    assert_eq!(values(true, |_| Some(0)), [(10., 0); 2]);
    assert_eq!(values(true, |rank| (rank == 1).then_some(0)), [(11., 0); 2]);
    assert_eq!(values(true, |rank| Some(rank as u64)), [(11., 1); 2]);
    assert_eq!(values(true, |_| None), [(0., 0); 2]);
    // The first start of a run is none of its losses.
    assert_eq!(values(false, |_| Some(7)), [(0., 0); 2]);

    // Without a checkpoint, the program may prefer an error, which both ranks get.
    let ends = spawn(2, |pg| {
        let mut state = state(1.).on_total_loss(|_, _| Ok(false));
        let entrance = Entrance { start_over: false, ..enter(pg.rank(), true) };
        Ok(synchronise(&mut state, &pg, entrance).unwrap_err().to_string())
    });
    for error in ends.unwrap() {
        assert!(error.contains("all ranks of the run were lost, and every commit with them"), "{error}");
    }
    // One that was loaded before the run is one.
    let loaded = spawn(2, |pg| {
        let mut state = state(1.);
        state.set_commits(3);
        synchronise(&mut state, &pg, Entrance { start_over: false, ..enter(pg.rank(), true) })?;
        Ok(state.commits())
    });
    assert_eq!(loaded.unwrap(), [3, 3]);
}

#[test]
fn parts_of_a_group_are_committed_with_the_others() {
    let scales = spawn(2, |pg| {
        let mut state = state(1.);
        let scaler =
            |scale| GradScaler::new(&pg, &VarMap::new(), GradScalerOptions { init_scale: scale, ..Default::default() });
        let mut first = scaler(8.)?;
        assert!(!state.restore("scaler", &mut first)?);
        if pg.rank() == 0 {
            state.commit_including(("scaler", &mut first))?;
        }
        synchronise(&mut state, &pg, entrance(pg.rank() == 1))?;
        let mut second = scaler(2.)?;
        assert!(state.restore("scaler", &mut second)?);
        Ok(second.current_scale())
    });
    assert_eq!(scales.unwrap(), [8., 8.]);
}

#[test]
fn a_commit_that_lacks_a_part_of_the_group_is_refused() {
    spawn(2, |pg| {
        let mut state = state(1.);
        let refused = |state: &mut State<Training>| match state.commit() {
            Err(Error::InvalidArgument { argument: "parts", reason }) => assert!(reason.contains("scaler"), "{reason}"),
            other => panic!("{other:?}"),
        };
        let mut scaler = GradScaler::new(&pg, &VarMap::new(), GradScalerOptions::default())?;
        synchronise(&mut state, &pg, entrance(false))?;
        state.commit_including(("scaler", &mut scaler))?;
        refused(&mut state);
        state.commit_including(("scaler", &mut scaler))?;
        assert_eq!(state.commits(), 2);
        // In the first commit of the next group as well, also if the program has forgotten to restore the part.
        synchronise(&mut state, &pg, entrance(false))?;
        refused(&mut state);
        let error = state.commit_including(("scaler", &mut scaler)).unwrap_err().to_string();
        assert!(error.contains("call State::restore"), "{error}");
        state.restore("scaler", &mut scaler)?;
        // A part of the state itself may be restored, too.
        state.restore("progress", &mut LoaderState { dataset_len: 10, ..Default::default() })?;
        state.commit_including(("scaler", &mut scaler))?;
        assert_eq!(state.commits(), 3);
        // Before the first commit.
        let mut state = self::state(1.);
        synchronise(&mut state, &pg, entrance(false))?;
        assert!(!state.restore("scaler", &mut scaler)?);
        refused(&mut state);
        Ok(())
    })
    .unwrap();
}

/// A run with random numbers of each rank.
struct Noisy(Generator);

impl Parts for Noisy {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("noise", &mut self.0)]
    }
}

type Noises = Vec<Option<State<Noisy>>>;

/// Runs a generation of the ranks that there are, of which those that are `None` are new processes. Each rank commits after two
/// steps with as many numbers as `rank + 1`, and draws in a third one that fails. Returns the states, and what each rank has drawn,
/// by step.
fn noisy(states: Noises) -> (Noises, Vec<Vec<Vec<u64>>>) {
    let states: Vec<_> = states.into_iter().map(Mutex::new).collect();
    let drawn = spawn(states.len(), |pg| {
        let mut own = states[pg.rank()].lock().unwrap();
        let is_new = own.is_none();
        let state = own.get_or_insert_with(|| State::new(Noisy(Generator::for_rank(9, pg.rank()))));
        if is_new {
            state.commit_first()?;
        }
        synchronise(state, &pg, entrance(is_new))?;
        let mut steps = Vec::new();
        for step in 0..3 {
            steps.push((0..=pg.rank()).map(|_| state.0.next_u64()).collect());
            pg.barrier()?;
            if step < 2 {
                state.commit()?;
            }
        }
        state.shards.unlink();
        Ok(steps)
    });
    (states.into_iter().map(|state| state.into_inner().unwrap()).collect(), drawn.unwrap())
}

#[test]
fn each_rank_continues_with_its_own_random_numbers() {
    for lost in 0..3 {
        let (mut states, first) = noisy(vec![None, None, None]);
        states[lost] = None;
        let (mut states, second) = noisy(states);
        // The failed step is done again, also by the process that takes the place of another.
        for rank in 0..3 {
            assert_eq!(second[rank][0], first[rank][2], "rank {rank}");
        }
        // What was committed is not drawn again, by as many ranks, fewer, or more.
        let mut seen = std::collections::HashSet::new();
        let mut see = |drawn: &[Vec<Vec<u64>>]| {
            let all = drawn.iter().flat_map(|steps| steps[..2].concat()).all(|number| seen.insert(number));
            assert!(all, "a number is drawn twice");
        };
        see(&first);
        see(&second);
        states.remove(lost);
        let (mut states, third) = noisy(states);
        see(&third);
        states.extend([None, None]);
        let (states, fourth) = noisy(states);
        see(&fourth);
        let error = states[0].as_ref().unwrap().state_dict().unwrap_err().to_string();
        assert!(error.contains("only its own shard (noise)"), "{error}");
    }
}

#[test]
fn parts_that_differ_are_an_error_in_the_first_commit() {
    struct Losses(RankZero<f64>, f64);
    impl Parts for Losses {
        fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
            vec![("any", &mut self.0), ("best", &mut self.1)]
        }
    }
    let errors = spawn(3, |pg| {
        let mut state = State::new(Losses(RankZero(0.), f64::INFINITY));
        state.commit_first()?;
        synchronise(&mut state, &pg, entrance(true))?;
        state.0.0 = pg.rank() as f64;
        state.commit()?;
        assert_eq!(state.commits(), 1);
        // The next generation, in which ranks compute a loss for themselves.
        synchronise(&mut state, &pg, entrance(false))?;
        state.1 = if pg.rank() == 2 { 0.5 } else { 0.7 };
        let error = state.commit().unwrap_err();
        assert!(pg.failure().is_none());
        Ok(error.to_string())
    });
    for error in errors.unwrap() {
        assert!(error.contains("the part \"best\" is not the same on all ranks: value on rank 2 differ"), "{error}");
    }
}

#[test]
fn a_loader_continues_in_the_middle_of_an_epoch_with_other_ranks() {
    let loader = |world_size, rank| {
        let in_order = SamplerOptions { shuffle: false, ..Default::default() };
        let sampler = DistributedSampler::new(12, rank, world_size, in_order).unwrap();
        let options = LoaderOptions { batch_size: 2, ..Default::default() };
        DataLoader::from_sampler(0..12, sampler, options, |samples: Vec<usize>| Ok(samples)).unwrap()
    };
    let (mut state, mut old) = (state(1.), loader(2, 0));
    for batch in old.iter().take(1) {
        assert_eq!(batch.unwrap(), [0, 2]);
        state.commit_including(("loader", &mut old)).unwrap();
    }
    let mut new = loader(3, 1);
    assert!(state.restore("loader", &mut new).unwrap());
    assert_eq!(new.iter().map(Result::unwrap).collect::<Vec<_>>(), [vec![5, 8], vec![11]]);
}

#[test]
fn names_that_cannot_be_told_apart_are_refused() {
    struct Wrong(&'static [&'static str], Vec<LoaderState>);
    impl Parts for Wrong {
        fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
            self.0.iter().copied().zip(self.1.iter_mut().map(|part| part as &mut dyn StateDict)).collect()
        }
    }
    for (names, expected) in [
        (&["a", "a"][..], "two parts have the name a"),
        (&["a/b", "c"][..], "\"a/b\" is not a valid part name"),
        (&["", "c"][..], "\"\" is not a valid part name"),
    ] {
        let mut state = State::new(Wrong(names, vec![LoaderState::default(); 2]));
        let error = state.commit().unwrap_err().to_string();
        assert!(error.contains(expected) && state.commits() == 0, "{error}");
    }
    assert_eq!(DType::I64, LoaderState::default().state_dict().unwrap()["epoch"].dtype());
}
