//! Optimizer state on disk: whole, in the format of this crate's other optimizers, or one shard per rank.
use super::ZeroRedundancyOptimizer;
use super::shards::{SAVING, file, read_shards};
use crate::backend::label;
use crate::optim::fused::state_dtype_of;
use crate::optim::optimizer::{Optimizer, check_learning_rates};
use crate::optim::rule::UpdateRule;
use crate::optim::shards::{Expected, Shards, key, kind};
use crate::random::random_bytes;
use crate::state::file::{WriteJob, read_safetensors};
use crate::state::{self, Dict, Loader, PutInPlace, Saved, StateDict, piece_key};
use crate::{Error, Result};
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
            let Some(dtype) = self.state_dtype(own.shard.members.first().map(|member| member.parameter))? else {
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
                    true => Some(Tensor::zeros(own.shard.length, dtype, part.device())?),
                    false => None,
                };
                match (to, &whole) {
                    (Some(to), whole) => group.gather(whole.as_ref(), &part, to)?,
                    (None, Some(whole)) => group.all_gather(whole, &part)?,
                    (None, None) => {}
                }
                let Some(whole) = whole else { continue };
                for member in &own.shard.members {
                    let parameter = &self.parameters[member.parameter];
                    if self.options[parameter.group].states().contains(&name) {
                        let values = whole.narrow(0, member.offset, member.elements)?.reshape(&parameter.shape)?;
                        dict.insert(key(&parameter.name, name), values);
                    }
                }
            }
        }
        Ok(is_here.then_some(dict))
    }

    fn prepare_whole(&self, dict: &Dict) -> Result<Prepared> {
        let mut loader = Loader::new(dict, R::NAME)?;
        let learning_rates = loader.learning_rates("learning_rates", self.options.len())?;
        let mut steps = HashMap::new();
        let mut whole = HashMap::new();
        for (index, options) in self.grouped() {
            let parameter = &self.parameters[index];
            steps.insert(index, loader.count(&key(&parameter.name, "step"))?);
            let dtype = state_dtype_of::<R>(&parameter.name, &parameter.var)?;
            for name in options.states() {
                let source = loader.like(&key(&parameter.name, name), &parameter.shape, dtype)?;
                whole.insert((index, *name), source.flatten_all()?);
            }
        }
        loader.finish()?;
        self.prepare(steps, learning_rates, |index, name, start, elements| match whole.get(&(index, name)) {
            Some(whole) => Ok(whole.narrow(0, start, elements)?.copy()?),
            None => Err(Error::parameter(name, "it is missing from the state")),
        })
    }

    /// Writes the whole state to one file; it is never left half-written. Every rank must call it; rank 0 writes. As
    /// with [`save_distributed`](crate::checkpoint::save_distributed), an existing file is replaced only once all ranks
    /// have confirmed success, and writing may take longer than the group's time-out.
    ///
    /// # Errors
    /// Returns [`Error::Io`] on rank 0 and [`Error::RankFailed`] on the others if writing fails, or an error of the
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
        let prepared = read_safetensors(path.as_ref()).and_then(|dict| self.prepare_whole(&dict));
        let prepared = label::ZERO_LOAD.during(|| self.process_group.agree(prepared))?;
        self.apply(prepared);
        Ok(())
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
        let dict = self.shard_dict(false).map(|mut dict| {
            dict.insert(SAVING.to_string(), saving);
            dict
        });
        let job = dict.and_then(|dict| WriteJob::new(&path, &dict)).map(Some);
        label::ZERO_SAVE.during(|| self.process_group.write_together(job)).map(drop)
    }

    /// `with_copies`: also the parts that another rank has as well, and saves.
    fn shard_dict(&self, with_copies: bool) -> Result<Dict> {
        let mut dict = state::begin(&kind::<R>())?;
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for parameter in &self.parameters {
            dict.insert(key(&parameter.name, "step"), state::count(parameter.steps)?);
        }
        let is_saved = with_copies || !self.reducer.groups().is_copy();
        for piece in self.pieces().filter(|_| is_saved) {
            for (name, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                let key = key(&self.parameters[piece.parameter].name, name);
                dict.insert(piece_key(&key, piece.start), state.clone());
            }
        }
        Ok(dict)
    }

    /// Loads the files of [`save_shards`](Self::save_shards) from a world of any size. Every rank must call it and reads
    /// all files, one after the other.
    ///
    /// # Errors
    /// Returns an error on every rank if one of them could not load them: [`Error::InvalidArgument`] if files are from
    /// different saves or worlds, [`Error::Io`] if one is missing.
    pub fn load_shards(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        let prepared = read_shards(folder.as_ref()).and_then(|shards| self.prepare_shards(&shards, Shards::take));
        let prepared = label::ZERO_LOAD.during(|| self.process_group.agree(prepared))?;
        self.apply(prepared);
        Ok(())
    }

    /// Prepares a new state from the results of [`shard_dict`](Self::shard_dict) on the ranks of a world, in their order.
    /// Ranks whose parts are not needed here may have an empty one. `part` is how elements come out of them.
    fn prepare_shards(
        &self,
        shards: &[Dict],
        part: impl Fn(&mut Shards, &str, &str, usize, usize) -> Result<Tensor>,
    ) -> Result<Prepared> {
        let expected = self.grouped().map(|(index, options)| {
            let parameter = &self.parameters[index];
            let dtype = state_dtype_of::<R>(&parameter.name, &parameter.var)?;
            Ok(Expected { name: &parameter.name, shape: &parameter.shape, dtype, states: options.states() })
        });
        let expected = expected.collect::<Result<Vec<_>>>()?;
        let mut shards = Shards::join::<R>(shards, self.process_group.rank(), self.options.len(), &expected)?;
        let steps = shards.steps.iter().copied().enumerate().collect();
        self.prepare(steps, shards.learning_rates.clone(), |index, name, start, elements| {
            part(&mut shards, &self.parameters[index].name, name, start, elements)
        })
    }

    /// Prepares a new state from the results of `part(parameter, state, start, elements)`.
    fn prepare(
        &self,
        steps: HashMap<usize, u64>,
        learning_rates: Vec<f64>,
        mut part: impl FnMut(usize, &'static str, usize, usize) -> Result<Tensor>,
    ) -> Result<Prepared> {
        check_learning_rates(&learning_rates, self.options.len())?;
        let mut states = Vec::new();
        for piece in self.pieces() {
            let names = self.options_of(piece.parameter).states().iter().zip(&piece.states);
            let of_piece = names.map(|(name, _)| {
                let state = part(piece.parameter, name, piece.start, piece.elements)?;
                Ok(state.to_device(piece.values.device())?)
            });
            states.push(of_piece.collect::<Result<Vec<_>>>()?);
        }
        Ok(Prepared { steps, learning_rates, states })
    }

    fn apply(&mut self, Prepared { steps, learning_rates, states }: Prepared) {
        for (options, learning_rate) in self.options.iter_mut().zip(learning_rates) {
            options.set_learning_rate(learning_rate);
        }
        let owned = self.wholes.iter_mut().filter_map(|whole| whole.own.as_mut());
        let pieces = self.shards.iter_mut().flat_map(|own| &mut own.pieces).chain(owned);
        for (piece, states) in pieces.zip(states) {
            piece.states = states;
        }
        for (index, steps) in steps {
            self.parameters[index].steps = steps;
        }
    }

    /// The parameters with their options.
    fn grouped(&self) -> impl Iterator<Item = (usize, &R)> {
        (0..self.parameters.len()).map(|index| (index, self.options_of(index)))
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
        let prepared = self.prepare_whole(dict)?;
        self.apply(prepared);
        Ok(())
    }

    /// Returns this rank's parts of the states, with the learning rates and the numbers of steps.
    fn sharded_state_dict(&self) -> Result<Option<Dict>> {
        self.shard_dict(false).map(Some)
    }

    fn state_here(&self) -> Result<Dict> {
        self.shard_dict(true)
    }

    fn load_sharded_state_dict(&mut self, shards: &[Dict], _: usize, _: usize) -> Result<()> {
        let copy = |shards: &mut Shards, parameter: &str, name: &str, start, elements| {
            shards.copy(parameter, name, start, elements)
        };
        let prepared = self.prepare_shards(shards, copy)?;
        self.apply(prepared);
        Ok(())
    }

    fn can_prepare(&self) -> bool {
        true
    }

    fn prepare(&mut self, saved: Saved, _: usize, _: usize) -> Result<PutInPlace<'_>> {
        let prepared = match saved {
            Saved::Whole(dict) => self.prepare_whole(&dict)?,
            Saved::Shards(shards) => self.prepare_shards(&shards, Shards::take)?,
        };
        Ok(Box::new(move || {
            self.apply(prepared);
            Ok(())
        }))
    }
}

/// A checked state that only has to be applied.
struct Prepared {
    steps: HashMap<usize, u64>,
    learning_rates: Vec<f64>,
    /// The state of each piece.
    states: Vec<Vec<Tensor>>,
}
