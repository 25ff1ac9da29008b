//! Optimizer state on disk: whole, or one shard per rank.
use super::FusedOptimizer;
use super::sharded::Sharded;
use super::shards::{SAVING, file, read_shards};
use super::slot::{Slot, key, state_dtype_of};
use crate::backend::label;
use crate::optim::optimizer::{Optimizer, check_learning_rates};
use crate::optim::rule::UpdateRule;
use crate::placement::{Placement, Spread};
use crate::process_group::ProcessGroup;
use crate::random::random_bytes;
use crate::state::file::{WriteJob, read_safetensors, write_safetensors};
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use crate::variables::check_named;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::path::Path;

/// For which parameters need names.
const SAVED: &str = "an optimizer to be saved or loaded";

/// The key of a state that was saved after a step had failed in its middle. An optimizer that loads it refuses to continue.
const TORN: &str = "failed_step";

impl<R: UpdateRule> FusedOptimizer<R> {
    /// Returns the whole state on rank `to`, and `None` on the others: PyTorch's `consolidate_state_dict(to)`. Every
    /// rank must call it. Without sharding, every rank has the whole state, and gets it.
    ///
    /// # Errors
    /// Returns an error of the process group, and those of [`state_dict`](StateDict::state_dict).
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<HashMap<String, Tensor>>> {
        match &self.sharded {
            Some(sharded) => label::OPTIMIZER_STATE.during(|| self.consolidate(sharded, Some(to))),
            None => self.state_dict().map(Some),
        }
    }

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
        for slot in &self.slots {
            dict.insert(key(&slot.name, "step"), state::count(slot.steps)?);
        }
        for piece in &self.pieces {
            let name = &self.slots[piece.parameter].name;
            for (part, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                dict.insert(key(name, part), state.reshape(&piece.placement.shape)?);
            }
        }
        Ok(share)
    }

    /// Returns the whole state on rank `to`, or on all ranks.
    fn consolidate(&self, sharded: &Sharded, to: Option<usize>) -> Result<Option<Dict>> {
        let is_here = to.is_none_or(|to| sharded.process_group().rank() == to);
        // Under hybrid sharding, each copy of the model gathers its state on the rank with the same place.
        let group = sharded.reducer.groups().within();
        let to = to.map(|to| to % group.world_size());
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
                let whole = match to.is_none_or(|to| group.rank() == to) {
                    true => Some(Tensor::zeros(own.shard.cut.length(), dtype, part.device())?),
                    false => None,
                };
                match (to, &whole) {
                    (Some(to), whole) => group.gather(whole.as_ref(), &part, to)?,
                    (None, Some(whole)) => group.all_gather(whole, &part)?,
                    (None, None) => {}
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
        Ok(is_here.then_some(dict))
    }

    /// Writes the whole state to one file; rank 0 writes.
    pub(super) fn save_together(&self, group: &ProcessGroup, path: &Path) -> Result<()> {
        let dict = match &self.sharded {
            Some(sharded) => label::OPTIMIZER_STATE.during(|| self.consolidate(sharded, Some(0))),
            None => (group.rank() == 0).then(|| self.state_dict()).transpose(),
        };
        let job = dict.and_then(|dict| dict.map(|dict| WriteJob::new(path, &dict)).transpose());
        label::OPTIMIZER_SAVE.during(|| group.write_together(job)).map(drop)
    }

    /// All ranks load it, or none.
    pub(super) fn load_together(&mut self, group: &ProcessGroup, read: Result<Saved>) -> Result<()> {
        let prepared = read.and_then(|saved| self.prepare(saved, group.rank(), group.world_size()));
        label::OPTIMIZER_LOAD.during(|| group.agree(prepared))?()
    }

    fn sharded(&self) -> Result<&Sharded> {
        let reason = "the optimizer's model is not sharded, so every rank has the whole state: use `save_distributed` and `load_distributed`";
        self.sharded.as_ref().ok_or_else(|| Error::invalid("sharding", reason))
    }

    /// Writes each rank's shard to its own file in `folder`, which must exist: `shard-00000-of-00002.safetensors` and
    /// so on. Every rank must call it. If ranks are on several machines, `folder` must be on a shared file system.
    ///
    /// The files are renamed once all ranks' files are on disk. If a rank dies at that moment, a mixture of old and
    /// new files remains, which [`load_shards`](Self::load_shards) detects and refuses. Save to another folder each
    /// time to keep the last complete set.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not write its file, and without sharding.
    pub fn save_shards(&self, folder: impl AsRef<Path>) -> Result<()> {
        let group = self.sharded()?.process_group();
        let (rank, world_size) = (group.rank(), group.world_size());
        let saving = Tensor::new(&[i64::from_le_bytes(random_bytes()?)], group.device())?;
        label::OPTIMIZER_SAVE.during(|| group.broadcast(&saving, 0))?;
        let path = file(folder.as_ref(), rank, world_size);
        let dict = self.share().map(|Share { mut dict, .. }| {
            dict.insert(SAVING.to_string(), saving);
            dict
        });
        let job = dict.and_then(|dict| WriteJob::new(&path, &dict)).map(Some);
        label::OPTIMIZER_SAVE.during(|| group.write_together(job)).map(drop)
    }

    /// Loads the files of [`save_shards`](Self::save_shards) from a world of any size. Every rank must call it and reads
    /// all files, one after the other.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not load them: [`Error::InvalidArgument`](crate::Error::InvalidArgument) if files are from
    /// different saves or worlds, [`Error::Io`](crate::Error::Io) if one is missing.
    pub fn load_shards(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        let group = self.sharded()?.process_group().clone();
        self.load_together(&group, read_shards(folder.as_ref()).map(Saved::Shards))
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
    /// [`consolidate_state_dict`](Self::consolidate_state_dict) needs memory for it on one rank only, and so does [`save`](Self::save).
    ///
    /// # Errors
    /// Returns an error of the process group, and [`Error::InvalidArgument`] for parameters without names.
    fn state_dict(&self) -> Result<Dict> {
        match &self.sharded {
            Some(sharded) => Ok(label::OPTIMIZER_STATE.during(|| self.consolidate(sharded, None))?.unwrap_or_default()),
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
            self.is_torn = is_torn;
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

    /// Under sharding, every rank must call it, and rank 0 writes, as with [`save_distributed`](Optimizer::save_distributed).
    fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        match &self.sharded {
            Some(sharded) => self.save_together(sharded.process_group(), path.as_ref()),
            None => write_safetensors(path.as_ref(), &self.state_dict()?),
        }
    }

    /// Under sharding, every rank must call it and reads the file. It is an error on every rank if one of them could not load it.
    fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let Some(sharded) = &self.sharded else { return self.load_state_dict(&read_safetensors(path.as_ref())?) };
        let group = sharded.process_group().clone();
        self.load_together(&group, read_safetensors(path.as_ref()).map(Saved::Whole))
    }
}
