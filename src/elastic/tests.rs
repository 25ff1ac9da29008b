//! Commits, and which of them ranks take over; ranks are threads.
#![allow(clippy::unwrap_used)]
mod shards;

use super::synchronise::synchronise;
use super::{Parts, Progress, State};
use crate::amp::{GradScaler, GradScalerOptions};
use crate::data::{Dataset, DistributedSampler, LoaderOptions, SamplerOptions, StatefulDataLoader};
use crate::process_group::spawn;
use crate::seed::Generator;
use crate::state::StateDict;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;

struct Training {
    varmap: VarMap,
    noise: Generator,
    progress: Progress,
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
    let mut state = State::new(Training { varmap, noise: Generator::new(1), progress: Progress::default() });
    state.commit_first().unwrap();
    state
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
    state.progress.advance(3, 10);
    state.commit().unwrap();
    let offset = state.noise.offset();
    set(&state, 3.);
    state.progress.advance(3, 10);
    state.noise.next_u64();
    state.roll_back().unwrap();
    assert_eq!((get(&state), state.progress.samples, state.noise.offset(), state.commits()), (2., 3, offset, 1));
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
            synchronise(&mut state, &pg, ranks[pg.rank()].1)?;
            Ok((get(&state), state.commits()))
        });
        let expected = (root as f32, ranks[root].0);
        assert_eq!(values.unwrap(), [expected; 3], "{ranks:?}");
    }
    // Nobody is new, and none ahead: each goes back by itself.
    let values = spawn(2, |pg| {
        let mut state = state(pg.rank() as f32);
        set(&state, 100.);
        synchronise(&mut state, &pg, false)?;
        Ok(get(&state))
    });
    assert_eq!(values.unwrap(), [0., 1.]);
}

#[test]
fn parts_of_a_group_are_committed_with_the_others() {
    let scales = spawn(2, |pg| {
        let mut state = state(1.);
        let scaler =
            |scale| GradScaler::new(&pg, Vec::new(), GradScalerOptions { init_scale: scale, ..Default::default() });
        let mut first = scaler(8.)?;
        assert!(!state.restore("scaler", &mut first)?);
        if pg.rank() == 0 {
            state.commit_with(&[("scaler", &first)])?;
        }
        synchronise(&mut state, &pg, pg.rank() == 1)?;
        let mut second = scaler(2.)?;
        assert!(state.restore("scaler", &mut second)?);
        Ok(second.state().scale)
    });
    assert_eq!(scales.unwrap(), [8., 8.]);
}

#[test]
fn a_loader_goes_on_in_the_middle_of_an_epoch_with_other_ranks() {
    struct Numbers;
    impl Dataset for Numbers {
        type Sample = usize;

        fn len(&self) -> usize {
            12
        }

        fn get(&self, index: usize, _: &mut Generator) -> crate::Result<usize> {
            Ok(index)
        }
    }
    let loader = |world_size, rank| {
        let in_order = SamplerOptions { shuffle: false, ..Default::default() };
        let sampler = DistributedSampler::new(12, world_size, rank, in_order).unwrap();
        let options = LoaderOptions { batch_size: 2, ..Default::default() };
        StatefulDataLoader::new(Numbers, sampler, options, |samples: Vec<usize>| Ok(samples)).unwrap()
    };
    let (mut state, old) = (state(1.), loader(2, 0));
    for batch in old.iter().take(1) {
        assert_eq!(batch.unwrap(), [0, 2]);
        state.commit_with(&[("loader", &old)]).unwrap();
    }
    let mut new = loader(3, 1);
    assert!(state.restore("loader", &mut new).unwrap());
    assert_eq!(new.iter().map(Result::unwrap).collect::<Vec<_>>(), [vec![5, 8], vec![11]]);
}

#[test]
fn names_that_cannot_be_told_apart_are_refused() {
    struct Wrong(&'static [&'static str], Vec<Progress>);
    impl Parts for Wrong {
        fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
            self.0.iter().copied().zip(self.1.iter_mut().map(|part| part as &mut dyn StateDict)).collect()
        }
    }
    for (names, expected) in [
        (&["a", "a"][..], "two parts have the name a"),
        (&["a/b", "c"][..], "\"a/b\" is no name"),
        (&["", "c"][..], "\"\" is no name"),
    ] {
        let mut state = State::new(Wrong(names, vec![Progress::default(); 2]));
        let error = state.commit().unwrap_err().to_string();
        assert!(error.contains(expected) && state.commits() == 0, "{error}");
    }
    assert_eq!(DType::I64, Progress::default().state_dict().unwrap()["epoch"].dtype());
}
