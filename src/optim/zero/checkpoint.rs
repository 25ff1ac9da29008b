//! Optimizer state on disk: whole, in the format of this crate's other optimizers, or one shard per rank.
use super::ZeroRedundancyOptimizer;
use super::layout::Trained;
use super::shards::{SAVING, file, read_shards};
use crate::Result;
use crate::backend::label;
use crate::optim::fused::{key, state_dtype_of};
use crate::optim::optimizer::{Optimizer, check_learning_rates};
use crate::optim::rule::UpdateRule;
use crate::placement::{Placement, Spread};
use crate::random::random_bytes;
use crate::state::file::{WriteJob, read_safetensors};
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::path::Path;

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// Returns the whole state on rank `to`, and `None` on the others: PyTorch's `consolidate_state_dict(to)`. Every
    /// rank must call it.
    ///
    /// It is the state dict of the [`FusedOptimizer`](crate::optim::FusedOptimizer) with the same rule, so either of
    /// them can load the other's state, with any number of ranks.
    ///
    /// # Errors
    /// Returns an error of the process group.
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<HashMap<String, Tensor>>> {
        label::ZERO_STATE.during(|| self.consolidate(Some(to)))
    }

    /// Returns the whole state on rank `to`, or on all ranks.
    fn consolidate(&self, to: Option<usize>) -> Result<Option<Dict>> {
        let is_here = to.is_none_or(|to| self.process_group.rank() == to);
        // Under hybrid sharding, each copy of the model gathers its state on the rank with the same place.
        let group = self.reducer.groups().within();
        let to = to.map(|to| to % group.world_size());
        let mut dict = state::begin(R::NAME)?;
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for parameter in &self.parameters {
            dict.insert(key(&parameter.name, "step"), state::count(parameter.steps)?);
        }
        for (number, own) in self.shards.iter().enumerate() {
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
                self.spread_states(number, name, &part)?;
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
                        let Trained { name: parameter, placement, .. } = &self.parameters[*number];
                        let values = own.shard.cut.whole(&whole, place)?.reshape(&placement.shape)?;
                        dict.insert(key(parameter, name), values);
                    }
                }
            }
        }
        Ok(is_here.then_some(dict))
    }

    /// Writes the whole state to one file; it is never left half-written. Every rank must call it; rank 0 writes. As
    /// with [`save_distributed`](crate::checkpoint::save_distributed), an existing file is replaced only once all ranks
    /// have confirmed success, and writing may take longer than the group's time-out.
    ///
    /// # Errors
    /// Returns [`Error::Io`](crate::Error::Io) on rank 0 and [`Error::RankFailed`](crate::Error::RankFailed) on the others if writing fails, or an error of the
    /// process group.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        label::ZERO_SAVE.during(|| {
            let dict = self.consolidate_state_dict(0)?;
            let job = dict.map(|dict| WriteJob::new(path.as_ref(), &dict)).transpose();
            self.process_group.write_together(job).map(drop)
        })
    }

    /// Loads a file of [`save`](Self::save), or of a [`FusedOptimizer`](crate::optim::FusedOptimizer) with the same
    /// rule. Every rank must call it and reads the file.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not load it.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_together(read_safetensors(path.as_ref()).map(Saved::Whole))
    }

    /// Writes each rank's shard to its own file in `folder`, which must exist: `shard-00000-of-00002.safetensors` and
    /// so on. Every rank must call it. If ranks are on several machines, `folder` must be on a shared file system.
    ///
    /// The files are renamed once those of all ranks are on disk. If a rank dies at that moment, a mixture of old and
    /// new files remains, which [`load_shards`](Self::load_shards) detects and refuses. Save to another folder each
    /// time to keep the last complete set.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not write its file.
    pub fn save_shards(&self, folder: impl AsRef<Path>) -> Result<()> {
        let (rank, world_size) = (self.process_group.rank(), self.process_group.world_size());
        let saving = Tensor::new(&[i64::from_le_bytes(random_bytes()?)], self.process_group.device())?;
        label::ZERO_SAVE.during(|| self.process_group.broadcast(&saving, 0))?;
        let path = file(folder.as_ref(), rank, world_size);
        let dict = self.share().map(|Share { mut dict, .. }| {
            dict.insert(SAVING.to_string(), saving);
            dict
        });
        let job = dict.and_then(|dict| WriteJob::new(&path, &dict)).map(Some);
        label::ZERO_SAVE.during(|| self.process_group.write_together(job)).map(drop)
    }

    /// Loads the files of [`save_shards`](Self::save_shards) from a world of any size. Every rank must call it and reads
    /// all files, one after the other.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not load them: [`Error::InvalidArgument`](crate::Error::InvalidArgument) if files are from
    /// different saves or worlds, [`Error::Io`](crate::Error::Io) if one is missing.
    pub fn load_shards(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        self.load_together(read_shards(folder.as_ref()).map(Saved::Shards))
    }

    /// All ranks load it, or none.
    fn load_together(&mut self, read: Result<Saved>) -> Result<()> {
        let group = self.process_group.clone();
        let prepared = read.and_then(|saved| self.prepare(saved, group.rank(), group.world_size()));
        label::ZERO_LOAD.during(|| group.agree(prepared))?()
    }

    pub(super) fn options_of(&self, parameter: usize) -> &R {
        &self.options[self.parameters[parameter].group]
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
        let Some(parameter) = parameter.map(|index| &self.parameters[index]) else { return Ok(None) };
        state_dtype_of::<R>(&parameter.name, &parameter.var).map(Some)
    }
}

/// The whole state, equal to that of the [`FusedOptimizer`](crate::optim::FusedOptimizer) with the same rule, so either of
/// them can load the other's state, with any number of ranks.
impl<R: UpdateRule> StateDict for ZeroRedundancyOptimizer<R> {
    /// Returns the whole state on every rank; every rank must call it.
    /// [`consolidate_state_dict`](Self::consolidate_state_dict) needs memory for it on one rank only, and so does
    /// [`save`](Self::save).
    ///
    /// # Errors
    /// Returns an error of the process group.
    fn state_dict(&self) -> Result<Dict> {
        Ok(label::ZERO_STATE.during(|| self.consolidate(None))?.unwrap_or_default())
    }

    /// Loads a whole state. Every rank must pass the same.
    fn load_state_dict(&mut self, dict: &Dict) -> Result<()> {
        self.prepare(Saved::Whole(dict.clone()), 0, 1)?()
    }

    /// Has the learning rates and the numbers of steps as well.
    fn share(&self) -> Result<Share> {
        let mut share = Share::begin(R::NAME, true)?;
        share.dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for parameter in &self.parameters {
            share.dict.insert(key(&parameter.name, "step"), state::count(parameter.steps)?);
        }
        for piece in self.pieces() {
            let name = &self.parameters[piece.parameter].name;
            for (part, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                share.insert(&key(name, part), &piece.placement, state.clone())?;
            }
        }
        Ok(share)
    }

    fn can_prepare(&self) -> bool {
        true
    }

    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        let mut loader = Loader::of(&saved, R::NAME, rank)?;
        let learning_rates = loader.learning_rates("learning_rates", self.options.len())?;
        let held = self.pieces().filter(|piece| !piece.states.is_empty());
        let held: HashMap<_, _> = held.map(|piece| (piece.parameter, piece)).collect();
        let (mut steps, mut states) = (Vec::new(), HashMap::new());
        for (index, parameter) in self.parameters.iter().enumerate() {
            let Trained { name, var, placement: Placement { shape, .. }, .. } = parameter;
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
        loader.finish()?;
        check_learning_rates(&learning_rates, self.options.len())?;
        Ok(Box::new(move || {
            for (options, learning_rate) in self.options.iter_mut().zip(learning_rates) {
                options.set_learning_rate(learning_rate);
            }
            let owned = self.wholes.iter_mut().filter_map(|whole| whole.own.as_mut());
            let pieces = self.shards.iter_mut().flat_map(|own| &mut own.pieces).chain(owned);
            for piece in pieces.filter(|piece| !piece.states.is_empty()) {
                piece.states = states.remove(&piece.parameter).unwrap_or_default();
            }
            for (parameter, steps) in self.parameters.iter_mut().zip(steps) {
                parameter.steps = steps;
            }
            Ok(())
        }))
    }
}
