//! The state of an optimizer: whole, or in parts.
use super::FusedOptimizer;
use super::sharded::Sharded;
use super::slot::{Slot, key, state_dtype_of};
use crate::Result;
use crate::backend::Purpose;
use crate::optim::optimizer::{OPTIMIZER_SAVE, Optimizer, check_learning_rates};
use crate::optim::rule::UpdateRule;
use crate::placement::{Placement, Spread};
use crate::process_group::ProcessGroup;
use crate::state::file::WriteJob;
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use crate::variables::check_named;
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::path::Path;

static OPTIMIZER_STATE: Purpose = Purpose::of("an optimizer's state_dict");

/// For which parameters need names.
const SAVED: &str = "an optimizer to be saved or loaded";

/// The key of a state that was saved after a step had failed in its middle. An optimizer that loads it refuses to continue.
const TORN: &str = "failed_step";

impl<R: UpdateRule> FusedOptimizer<R> {
    /// The part of the state that every rank has: the learning rates, the numbers of steps, and the states of the parameters that each rank updates by
    /// itself.
    fn begin(&self, is_sharded: bool) -> Result<Share> {
        check_named(self.named, SAVED)?;
        let mut share = Share::begin(R::NAME, is_sharded)?;
        let dict = &mut share.dict;
        if self.is_torn {
            dict.insert(TORN.to_string(), state::count(1)?);
        }
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        let left_out = self.left_out()?;
        for (index, slot) in self.slots.iter().enumerate() {
            let steps = slot.steps - u64::from(left_out.contains(&index));
            dict.insert(key(&slot.name, "step"), state::count(steps)?);
        }
        for piece in &self.pieces {
            let name = &self.slots[piece.parameter].name;
            for (part, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                dict.insert(key(name, part), state.reshape(&piece.placement.shape)?);
            }
        }
        Ok(share)
    }

    /// Returns the whole state on all ranks, or on rank 0.
    fn consolidate(&self, sharded: &Sharded, on_all: bool) -> Result<Option<Dict>> {
        // Under hybrid sharding, each copy of the model gathers its state on its first rank.
        let group = sharded.reducer.groups().within();
        let mut dict = self.begin(false)?.dict;
        for (number, own) in sharded.shards.iter().enumerate() {
            let Some(dtype) = self.state_dtype(own.shard.parameters.first().copied())? else {
                continue;
            };
            for name in self.state_names() {
                let part = Tensor::zeros(own.shard.own.shape(), dtype, own.shard.own.device())?;
                for piece in &own.pieces {
                    if let Some(state) = self.state(piece.parameter, name, &piece.states) {
                        part.slice_set(state, 0, piece.offset)?;
                    }
                }
                self.spread_states(sharded, number, name, &part)?;
                let zeros = || Tensor::zeros(own.shard.cut.length(), dtype, part.device());
                let whole = (on_all || group.rank() == 0).then(zeros).transpose()?;
                match &whole {
                    Some(whole) if on_all => group.all_gather(whole, &part)?,
                    whole => group.gather(whole.as_ref(), &part, 0)?,
                }
                let Some(whole) = whole else { continue };
                for (place, number) in own.shard.parameters.iter().enumerate() {
                    if self.options_of(*number).states().contains(&name) {
                        let Slot { name: parameter, placement, .. } = &self.slots[*number];
                        let values = own.shard.cut.whole(&whole, place)?.reshape(&placement.shape)?;
                        dict.insert(key(parameter, name), values);
                    }
                }
            }
        }
        Ok((on_all || sharded.process_group().rank() == 0).then_some(dict))
    }

    /// Writes the whole state to one file; rank 0 writes.
    pub(super) fn save_together(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let dict = match &self.sharded {
            Some(sharded) => OPTIMIZER_STATE.during(|| self.consolidate(sharded, false)),
            None => (group.rank() == 0).then(|| self.state_dict()).transpose(),
        };
        let job = dict.and_then(|dict| dict.map(|dict| WriteJob::new(path, &dict)).transpose());
        OPTIMIZER_SAVE.during(|| group.write_together(job)).map(drop)
    }

    /// The names of all state tensors of any group, in the same order on all ranks.
    fn state_names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.options.iter().flat_map(|options| options.states()).copied().collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    pub(super) fn state<'a>(&self, parameter: usize, name: &str, states: &'a [Tensor]) -> Option<&'a Tensor> {
        let position = self.options_of(parameter).states().iter().position(|state| *state == name)?;
        states.get(position)
    }

    /// The dtype of the state in the bucket that contains `parameter`.
    fn state_dtype(&self, parameter: Option<usize>) -> Result<Option<DType>> {
        let Some(parameter) = parameter.map(|index| &self.slots[index]) else { return Ok(None) };
        state_dtype_of::<R>(&parameter.name, &parameter.var).map(Some)
    }
}

/// Contains `state.{name}.step` and the state under PyTorch's names (`state.{name}.exp_avg`) for each parameter, and
/// the groups' `learning_rates`. The program must keep the other options itself. It is the same with any sharding, on any number of ranks.
impl<R: UpdateRule> StateDict for FusedOptimizer<R> {
    /// Under sharding, returns the whole state on every rank; every rank must call it.
    /// [`save_distributed`](Optimizer::save_distributed) needs memory for it on rank 0 only.
    ///
    /// # Errors
    /// Returns an error of the process group, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for parameters without names.
    fn state_dict(&self) -> Result<Dict> {
        match &self.sharded {
            Some(sharded) => Ok(OPTIMIZER_STATE.during(|| self.consolidate(sharded, true))?.unwrap_or_default()),
            None => Ok(self.begin(false)?.dict),
        }
    }

    /// Loads a whole state. Every rank must pass the same.
    fn load_state_dict(&mut self, dict: &Dict) -> Result<()> {
        self.prepare(Saved::Whole(dict.clone()), 0, 1)?()
    }

    /// Has the learning rates and the numbers of steps as well.
    fn share(&self) -> Result<Share> {
        let mut share = self.begin(self.sharded.is_some())?;
        for piece in self.sharded.iter().flat_map(Sharded::pieces) {
            let name = &self.slots[piece.parameter].name;
            for (part, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                share.insert(&key(name, part), &piece.placement, state.clone())?;
            }
        }
        Ok(share)
    }

    fn can_prepare(&self) -> bool {
        self.sharded.is_some()
    }

    /// Takes a whole state, and the parts of it that the ranks of a world of any size have saved under sharding.
    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        check_named(self.named, SAVED)?;
        let mut loader = Loader::of(&saved, R::NAME, rank)?;
        let learning_rates = loader.learning_rates("learning_rates", self.options.len())?;
        let held = self.pieces().filter(|piece| !piece.states.is_empty());
        let held: HashMap<_, _> = held.map(|piece| (piece.parameter, piece)).collect();
        let (mut steps, mut states) = (Vec::new(), HashMap::new());
        for (index, slot) in self.slots.iter().enumerate() {
            let Slot { name, var, placement: Placement { shape, .. }, .. } = slot;
            steps.push(loader.count(&key(name, "step"))?);
            let none = || Placement { shape: shape.clone(), range: 0..0, spread: Spread::Shard };
            let placement = held.get(&index).map_or_else(none, |piece| piece.placement.clone());
            let dtype = state_dtype_of::<R>(name, var)?;
            let here = self.options_of(index).states().iter().map(|state| {
                let here = loader.part(&key(name, state), &placement, dtype)?;
                Ok(here.to_device(var.device())?)
            });
            states.insert(index, here.collect::<Result<Vec<_>>>()?);
        }
        let is_torn = loader.has(TORN) && loader.count(TORN)? > 0;
        loader.finish()?;
        check_learning_rates(&learning_rates, self.options.len())?;
        Ok(Box::new(move || {
            (self.is_torn, self.late) = (is_torn, Vec::new());
            for (options, learning_rate) in self.options.iter_mut().zip(learning_rates) {
                options.set_learning_rate(learning_rate);
            }
            let pieces = self.pieces.iter_mut().chain(self.sharded.iter_mut().flat_map(Sharded::pieces_mut));
            for piece in pieces.filter(|piece| !piece.states.is_empty()) {
                piece.states = states.remove(&piece.parameter).unwrap_or_default();
            }
            for (slot, steps) in self.slots.iter_mut().zip(steps) {
                slot.steps = steps;
            }
            Ok(())
        }))
    }
}
