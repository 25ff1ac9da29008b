//! Shards of ranks that are gone come from the ranks that mirror them.
use super::{Training, state};
use crate::Result;
use crate::elastic::State;
use crate::elastic::synchronise::synchronise;
use crate::placement::{Placement, Spread};
use crate::process_group::{ProcessGroup, spawn};
use crate::rendezvous::Store;
use crate::state::{Loader, Parts, PutInPlace, Saved, Share, StateDict};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// A multiple of the world sizes.
const ELEMENTS: usize = 24;

/// This rank's part of a list of numbers.
struct Slice {
    rank: usize,
    world_size: usize,
    values: Vec<f32>,
}

impl Slice {
    fn new(pg: &ProcessGroup) -> Self {
        let (rank, world_size) = (pg.rank(), pg.world_size());
        Self { rank, world_size, values: vec![0.; ELEMENTS / world_size] }
    }

    fn start(&self) -> usize {
        self.rank * ELEMENTS / self.world_size
    }

    fn placement(&self) -> Placement {
        let range = self.start()..self.start() + self.values.len();
        Placement { shape: ELEMENTS.into(), range, spread: Spread::Shard }
    }

    /// The values after a commit.
    fn of(&self, commit: u64) -> Vec<f32> {
        (0..ELEMENTS / self.world_size).map(|index| (100 * commit as usize + self.start() + index) as f32).collect()
    }
}

impl StateDict for Slice {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        panic!("no rank has it whole")
    }

    fn load_state_dict(&mut self, _: &HashMap<String, Tensor>) -> Result<()> {
        panic!("no rank has it whole")
    }

    fn share(&self) -> Result<Share> {
        let mut share = Share::begin("slice", true)?;
        share.insert("values", &self.placement(), Tensor::new(self.values.as_slice(), &Device::Cpu)?)?;
        Ok(share)
    }

    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        let mut loader = Loader::of(&saved, "slice", rank)?;
        let Saved::Shards(shards) = saved else { panic!("no rank has it whole") };
        let parts = shards.iter().flatten().filter(|(key, part)| key.starts_with("values@") && part.stride() != [0]);
        assert_eq!(parts.map(|(_, part)| part.elem_count()).sum::<usize>(), self.values.len(), "the rest stays away");
        let values = loader.part("values", &self.placement(), DType::F32)?.to_vec1()?;
        loader.finish()?;
        Ok(Box::new(move || {
            self.values = values;
            Ok(())
        }))
    }
}

pub(super) type States = Vec<Option<State<Training>>>;

/// Runs a generation with the states of the ranks that were there before it, and new ones for the others. Returns the states,
/// and what went wrong.
pub(super) fn generation(
    states: States,
    body: impl Fn(&ProcessGroup, &mut State<Training>) -> Result<()> + Sync,
) -> (States, Vec<Option<String>>) {
    let states: Vec<_> = states.into_iter().map(Mutex::new).collect();
    let errors = spawn(states.len(), |pg| {
        let mut own = states[pg.rank()].lock().unwrap();
        let is_new = own.is_none();
        let state = own.get_or_insert_with(|| state(pg.rank() as f32));
        let result = synchronise(state, &pg, super::entrance(is_new)).and_then(|()| body(&pg, state));
        state.shards.unlink();
        Ok(result.err().map(|error| error.to_string()))
    });
    (states.into_iter().map(|state| state.into_inner().unwrap()).collect(), errors.unwrap())
}

/// Restores the part as of commit `from`, and continues to commit `to`.
fn go_on(from: u64, to: u64) -> impl Fn(&ProcessGroup, &mut State<Training>) -> Result<()> + Sync {
    move |pg, state| {
        let mut slice = Slice::new(pg);
        assert_eq!((state.restore("slice", &mut slice)?, state.commits()), (from > 0, from));
        assert_eq!(slice.values, if from > 0 { slice.of(from) } else { vec![0.; slice.values.len()] });
        for commit in from + 1..=to {
            slice.values = slice.of(commit);
            state.commit_including(("slice", &mut slice))?;
        }
        Ok(())
    }
}

/// The states of `world_size` ranks after a few commits.
fn after(world_size: usize, commits: u64) -> States {
    let (states, errors) = generation((0..world_size).map(|_| None).collect(), go_on(0, commits));
    assert_eq!(errors, vec![None; world_size]);
    states
}

#[test]
fn ranks_that_are_replaced_one_after_the_other_get_their_shards() {
    for world_size in [2, 3, 4] {
        let mut states = after(world_size, 2);
        for generation in 0..2 * world_size {
            states[generation % world_size] = None;
            // Also without a commit in between.
            let from = 2 + generation as u64 / 2;
            let (next, errors) = self::generation(states, go_on(from, from + generation as u64 % 2));
            assert_eq!(errors, vec![None; world_size], "generation {generation} of {world_size} ranks");
            states = next;
        }
    }
}

#[test]
fn shards_are_dealt_out_again_when_there_are_fewer_ranks_or_more() {
    let mut states = after(4, 3);
    states.remove(2);
    let (mut states, errors) = generation(states, go_on(3, 3));
    assert_eq!(errors, [None, None, None]);
    // Before they have committed, the shards are still those of four ranks.
    states.remove(0);
    let (mut states, errors) = generation(states, go_on(3, 5));
    assert_eq!(errors, [None, None]);
    states.extend([None, None]);
    let (mut states, errors) = generation(states, go_on(5, 6));
    assert_eq!(errors, vec![None; 4]);
    states.truncate(3);
    let (mut states, errors) = generation(states, go_on(6, 6));
    assert_eq!(errors, vec![None; 3]);
    states.truncate(2);
    let (mut states, errors) = generation(states, go_on(6, 6));
    assert_eq!(errors, vec![None; 2]);
    states.truncate(1);
    let (_, errors) = generation(states, go_on(6, 8));
    assert_eq!(errors, [None]);
}

/// Rank 1 is gone when it should exchange its shards with its neighbours, which wait for it, and theirs for them; rank 5 is far
/// enough away to end its commit.
#[test]
fn a_rank_that_is_ahead_goes_back_to_the_shards_that_all_have() {
    let (mut states, errors) = generation(after(8, 2), |pg, state| {
        // The first commit of a generation waits for all ranks.
        go_on(2, 3)(pg, state)?;
        let mut slice = Slice::new(pg);
        slice.values = slice.of(4);
        if pg.rank() == 1 {
            let waited = pg.store().wait(&["ahead"], Some(Duration::from_secs(60)));
            pg.abort("it is gone");
            return Ok(waited?);
        }
        state.commit_including(("slice", &mut slice))?;
        if pg.rank() == 5 { Ok(pg.store().set("ahead", b"")?) } else { Ok(()) }
    });
    let commits: Vec<u64> = states.iter().flatten().map(State::commits).collect();
    assert_eq!((&errors[1], commits[2], commits[5]), (&None, 3, 4), "{errors:?}");
    states[1] = None;
    let (_, errors) = generation(states, go_on(3, 5));
    assert_eq!(errors, vec![None; 8]);
}

#[test]
fn what_two_neighbours_held_is_lost_and_all_ranks_say_so() {
    let mut states = after(4, 2);
    (states[1], states[2]) = (None, None);
    let (_, errors) = generation(states, go_on(2, 2));
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("the shard of rank 1 in commit 2") && error.contains("checkpoint"), "{error}");
    }
}

#[test]
fn a_commit_that_is_sharded_is_not_saved_by_one_rank() {
    let states = after(2, 1);
    let error = states[0].as_ref().unwrap().state_dict().unwrap_err().to_string();
    assert!(error.contains("save the parts themselves with a Checkpointer"), "{error}");
    let (_, errors) = generation(states, |pg, state| {
        let (mut slice, mut other) = (Slice::new(pg), Slice::new(pg));
        state.restore("slice", &mut slice)?;
        state.commit_including((("slice", &mut slice), ("model", &mut other)))
    });
    assert!(errors.iter().flatten().all(|error| error.contains("two parts have the name model")), "{errors:?}");
    assert_eq!(errors.iter().flatten().count(), 2);
}

/// A part that keeps the tensors that it is given.
struct Keeper(Tensor);

impl StateDict for Keeper {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::from([("kept".to_string(), self.0.clone())]))
    }

    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        self.0 = dict["kept"].clone();
        Ok(())
    }
}

impl Parts for Keeper {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("keeper", self)]
    }
}

#[test]
fn a_part_may_keep_what_it_is_given() {
    let value = |state: &State<Keeper>| state.0.to_vec1::<f32>().unwrap()[0];
    let mut state = State::new(Keeper(Tensor::ones(3, DType::F32, &Device::Cpu).unwrap()));
    state.commit().unwrap();
    state.roll_back().unwrap();
    // It is changed in place, which does not change the commit.
    crate::tensor::copy::copy(&state.0, &Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap()).unwrap();
    state.roll_back().unwrap();
    assert_eq!(value(&state), 1.);
    state.commit().unwrap();
    assert_eq!(value(&state), 1.);
}
