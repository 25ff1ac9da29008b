//! States on disk: as a whole, as this crate's other optimizers write them, or each rank's part in a file of its own.
use super::ZeroRedundancyOptimizer;
use crate::backend::Label;
use crate::optim::fused::state_dtype_of;
use crate::optim::optimizer::{Optimizer, check_learning_rates};
use crate::optim::rule::UpdateRule;
use crate::random::random_bytes;
use crate::state::file::{WriteJob, read_safetensors};
use crate::state::{self, Dict, Loader, StateDict};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The number that all files of one saving have in common.
const SAVING: &str = "saving";

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// The whole state on rank `to`, `None` on the others: PyTorch's `consolidate_state_dict(to)`. Every rank calls it.
    ///
    /// It is the state dict of the [`FusedOptimizer`](crate::optim::FusedOptimizer) with the same rule, so that states can
    /// be carried over in both directions, and to any number of ranks.
    ///
    /// # Errors
    /// Errors of the process group.
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<Dict>> {
        Label::ZERO_STATE.during(|| self.consolidate(Some(to)))
    }

    /// The whole state on rank `to`, or on all.
    fn consolidate(&self, to: Option<usize>) -> Result<Option<Dict>> {
        let is_here = to.is_none_or(|to| self.process_group.rank() == to);
        let mut dict = state::begin(R::NAME)?;
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for parameter in &self.parameters {
            dict.insert(key(&parameter.name, "step"), state::count(parameter.steps)?);
        }
        for own in &self.shards {
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
                let whole = match is_here {
                    true => Some(Tensor::zeros(own.shard.whole.shape(), dtype, part.device())?),
                    false => None,
                };
                match (to, &whole) {
                    (Some(to), whole) => self.process_group.gather(whole.as_ref(), &part, to)?,
                    (None, Some(whole)) => self.process_group.all_gather(whole, &part)?,
                    (None, None) => {}
                }
                let Some(whole) = whole else { continue };
                for member in &own.shard.members {
                    let parameter = &self.parameters[member.parameter];
                    if self.options[parameter.group].states().contains(&name) {
                        let values = whole.narrow(0, member.offset, member.elements)?.reshape(parameter.var.shape())?;
                        dict.insert(key(&parameter.name, name), values);
                    }
                }
            }
        }
        Ok(is_here.then_some(dict))
    }

    fn prepare_whole(&self, dict: &Dict) -> Result<Prepared> {
        let mut loader = Loader::new(dict, R::NAME)?;
        let learning_rates = loader.list::<f64>("learning_rates", self.options.len())?;
        let mut steps = HashMap::new();
        let mut whole = HashMap::new();
        for (index, options) in self.grouped() {
            let parameter = &self.parameters[index];
            steps.insert(index, loader.count(&key(&parameter.name, "step"))?);
            let dtype = state_dtype_of::<R>(&parameter.name, &parameter.var)?;
            for name in options.states() {
                let source = loader.like(&key(&parameter.name, name), parameter.var.shape(), dtype)?;
                whole.insert((index, *name), source.flatten_all()?);
            }
        }
        loader.finish()?;
        self.prepare(steps, learning_rates, |index, name, start, elements| match whole.get(&(index, name)) {
            Some(whole) => Ok(whole.narrow(0, start, elements)?.copy()?),
            None => Err(Error::parameter(name, "it is missing from the state")),
        })
    }

    /// Writes the whole state to one file, which is there as a whole or not at all. Every rank calls it, rank 0 writes. As
    /// with [`save_distributed`](crate::checkpoint::save_distributed), what was there before is replaced only once all
    /// ranks have confirmed that everything went well, and writing may take longer than the group's time-out.
    ///
    /// # Errors
    /// On every rank: [`Error::Io`] on rank 0, [`Error::RankFailed`] on the others, and those of the process group.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        Label::ZERO_SAVE.during(|| {
            let dict = self.consolidate_state_dict(0)?;
            self.process_group.write_together(dict.map(|dict| WriteJob::new(path.as_ref(), &dict)).transpose())
        })
    }

    /// Reads what [`save`](Self::save), or a [`FusedOptimizer`](crate::optim::FusedOptimizer) of the same rule, wrote. Every
    /// rank calls it, and reads the file.
    ///
    /// # Errors
    /// On every rank, when one of them could not load it.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let prepared = read_safetensors(path.as_ref()).and_then(|dict| self.prepare_whole(&dict));
        let prepared = Label::ZERO_LOAD.during(|| self.process_group.agree(prepared))?;
        self.apply(prepared);
        Ok(())
    }

    /// Writes each rank's part to a file of its own in `folder`, which must exist: `shard-00000-of-00002.safetensors` and so
    /// on. Every rank calls it. For ranks on several machines, `folder` is on a file system that they share.
    ///
    /// The files take their names once those of all ranks are on the disk. If a rank dies in that moment, it leaves a
    /// mixture of old and new files; [`load_shards`](Self::load_shards) recognises and refuses it. Save to another folder
    /// each time, so that the last complete one stays.
    ///
    /// # Errors
    /// On every rank, when one of them could not write its file.
    pub fn save_shards(&self, folder: impl AsRef<Path>) -> Result<()> {
        let (rank, world_size) = (self.process_group.rank(), self.process_group.world_size());
        let saving = Tensor::new(&[i64::from_le_bytes(random_bytes()?)], self.process_group.device())?;
        Label::ZERO_SAVE.during(|| self.process_group.broadcast(&saving, 0))?;
        let path = file(folder.as_ref(), rank, world_size);
        let job = self.shard_dict(&saving).and_then(|dict| WriteJob::new(&path, &dict)).map(Some);
        Label::ZERO_SAVE.during(|| self.process_group.write_together(job))
    }

    fn shard_dict(&self, saving: &Tensor) -> Result<Dict> {
        let mut dict = state::begin(&kind::<R>())?;
        dict.insert(SAVING.to_string(), saving.clone());
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates())?);
        for parameter in &self.parameters {
            dict.insert(key(&parameter.name, "step"), state::count(parameter.steps)?);
        }
        for piece in self.shards.iter().flat_map(|own| &own.pieces) {
            for (name, state) in self.options_of(piece.parameter).states().iter().zip(&piece.states) {
                let key = key(&self.parameters[piece.parameter].name, name);
                dict.insert(format!("{key}@{}", piece.start), state.clone());
            }
        }
        Ok(dict)
    }

    /// Reads what [`save_shards`](Self::save_shards) wrote in a world of any size. Every rank calls it, and reads all files,
    /// one after the other.
    ///
    /// # Errors
    /// On every rank, when one of them could not load them: [`Error::InvalidArgument`] when files are of different
    /// savings or worlds, [`Error::Io`] when one is missing.
    pub fn load_shards(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        let prepared = self.prepare_shards(folder.as_ref());
        let prepared = Label::ZERO_LOAD.during(|| self.process_group.agree(prepared))?;
        self.apply(prepared);
        Ok(())
    }

    fn prepare_shards(&self, folder: &Path) -> Result<Prepared> {
        let mut parts = Parts::default();
        let mut first: Option<(i64, Vec<f64>, HashMap<usize, u64>)> = None;
        for path in files(folder)? {
            let dict = read_safetensors(&path)?;
            let mut loader = Loader::new(&dict, &kind::<R>())?;
            let saving = loader.list::<i64>(SAVING, 1)?[0];
            let learning_rates = loader.list::<f64>("learning_rates", self.options.len())?;
            let mut steps = HashMap::new();
            for (index, _) in self.grouped() {
                steps.insert(index, loader.count(&key(&self.parameters[index].name, "step"))?);
            }
            match &first {
                Some((other, ..)) if *other != saving => {
                    let reason = "its files are of different savings, of which at least one was interrupted";
                    return Err(Error::invalid("folder", format!("{}: {reason}", folder.display())));
                }
                Some(_) => {}
                None => first = Some((saving, learning_rates, steps)),
            }
            for key in dict.keys().filter(|key| key.starts_with("state.")) {
                if let Some((whole, start)) = key.rsplit_once('@')
                    && let Ok(start) = start.parse::<usize>()
                {
                    parts.add(whole, start, loader.tensor(key)?)?;
                }
            }
            loader.finish()?;
        }
        let Some((_, learning_rates, steps)) = first else {
            return Err(Error::invalid("folder", format!("there are no shards in {}", folder.display())));
        };
        self.check_parts(&parts)?;
        self.prepare(steps, learning_rates, |index, name, start, elements| {
            parts.take(&key(&self.parameters[index].name, name), start, elements)
        })
    }

    /// Every state is there as a whole, of the right dtype, and there is none too many.
    fn check_parts(&self, parts: &Parts) -> Result<()> {
        let mut known = std::collections::HashSet::new();
        for (index, options) in self.grouped() {
            let parameter = &self.parameters[index];
            let dtype = state_dtype_of::<R>(&parameter.name, &parameter.var)?;
            for name in options.states() {
                let key = key(&parameter.name, name);
                parts.check(&key, parameter.flat.elem_count(), dtype)?;
                known.insert(key);
            }
        }
        match parts.0.keys().filter(|key| !known.contains(*key)).min() {
            Some(key) => {
                Err(Error::parameter(key, "the shards have it, and nothing here has that name: it is of another model"))
            }
            None => Ok(()),
        }
    }

    /// A new state, with what `part(parameter, state, start, elements)` finds.
    fn prepare(
        &self,
        steps: HashMap<usize, u64>,
        learning_rates: Vec<f64>,
        part: impl Fn(usize, &'static str, usize, usize) -> Result<Tensor>,
    ) -> Result<Prepared> {
        check_learning_rates(&learning_rates, self.options.len())?;
        let mut states = Vec::new();
        for piece in self.shards.iter().flat_map(|own| &own.pieces) {
            let of_piece = self.options_of(piece.parameter).states().iter().map(|name| {
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
        for (piece, states) in self.shards.iter_mut().flat_map(|own| &mut own.pieces).zip(states) {
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

    fn options_of(&self, parameter: usize) -> &R {
        &self.options[self.parameters[parameter].group]
    }

    /// The names of all states that there are in any group, in the same order on all ranks.
    fn state_names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.options.iter().flat_map(|options| options.states()).copied().collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn state<'a>(&self, parameter: usize, name: &str, states: &'a [Tensor]) -> Option<&'a Tensor> {
        let position = self.options_of(parameter).states().iter().position(|state| *state == name)?;
        states.get(position)
    }

    /// Of the states in the bucket in which `parameter` lies.
    fn state_dtype(&self, parameter: Option<usize>) -> Result<Option<DType>> {
        let Some(parameter) = parameter.map(|index| &self.parameters[index]) else { return Ok(None) };
        state_dtype_of::<R>(&parameter.name, &parameter.var).map(Some)
    }
}

/// The whole state, as that of the [`FusedOptimizer`](crate::optim::FusedOptimizer) with the same rule, so that states can be
/// carried over in both directions, and to any number of ranks.
impl<R: UpdateRule> StateDict for ZeroRedundancyOptimizer<R> {
    /// The whole state on every rank: every rank calls it. [`consolidate_state_dict`](Self::consolidate_state_dict) needs
    /// memory for it on one rank only, and [`save`](Self::save) uses that.
    ///
    /// # Errors
    /// Errors of the process group.
    fn state_dict(&self) -> Result<Dict> {
        Ok(Label::ZERO_STATE.during(|| self.consolidate(None))?.unwrap_or_default())
    }

    /// Takes over a whole state. Every rank gives the same.
    fn load_state_dict(&mut self, dict: &Dict) -> Result<()> {
        let prepared = self.prepare_whole(dict)?;
        self.apply(prepared);
        Ok(())
    }
}

/// A state that fits, and only has to be taken over.
struct Prepared {
    steps: HashMap<usize, u64>,
    learning_rates: Vec<f64>,
    /// Of each piece, in the order of buckets.
    states: Vec<Vec<Tensor>>,
}

/// Parts of states, by the names of the whole ones; each with the place where it begins.
#[derive(Default)]
struct Parts(HashMap<String, Vec<(usize, Tensor)>>);

impl Parts {
    fn add(&mut self, whole: &str, start: usize, part: &Tensor) -> Result<()> {
        self.0.entry(whole.to_string()).or_default().push((start, part.flatten_all()?));
        Ok(())
    }

    fn check(&self, key: &str, elements: usize, dtype: DType) -> Result<()> {
        let parts = self.0.get(key).map_or(&[][..], Vec::as_slice);
        let next = |end, (start, part): &(usize, Tensor)| (*start == end).then(|| end + part.elem_count());
        let end = parts.iter().try_fold(0, next);
        if end != Some(elements) {
            let reason = format!("its parts in the shards do not make the {elements} elements that it has here");
            return Err(Error::parameter(key, reason));
        }
        match parts.iter().find(|(_, part)| part.dtype() != dtype) {
            Some((_, part)) => {
                let (is, needed) = (part.dtype().as_str(), dtype.as_str());
                Err(Error::parameter(key, format!("the shards hold {is}, and {needed} is needed")))
            }
            None => Ok(()),
        }
    }

    /// The elements of a whole state from `start` on.
    fn take(&self, key: &str, start: usize, elements: usize) -> Result<Tensor> {
        let mut found = Vec::new();
        for (offset, part) in self.0.get(key).into_iter().flatten() {
            let (from, to) = (start.max(*offset), (start + elements).min(offset + part.elem_count()));
            if from < to {
                found.push(part.narrow(0, from - offset, to - from)?);
            }
        }
        // Storage of its own: the kernels change it in place.
        Ok(Tensor::cat(&found, 0)?.copy()?)
    }
}

fn key(parameter: &str, part: &str) -> String {
    format!("state.{parameter}.{part}")
}

fn kind<R: UpdateRule>() -> String {
    format!("part of {}", R::NAME)
}

fn file(folder: &Path, rank: usize, world_size: usize) -> PathBuf {
    folder.join(format!("shard-{rank:05}-of-{world_size:05}.safetensors"))
}

/// The files of one saving, in the order of ranks, in which their parts of a parameter follow each other.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |source| Error::io(format!("reading {}", folder.display()), source);
    let mut sizes = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let size = name.to_str().and_then(|name| {
            let (_, size) = name.strip_prefix("shard-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
            size.parse::<usize>().ok()
        });
        sizes.extend(size);
    }
    let invalid = |reason: String| Error::invalid("folder", format!("{} {reason}", folder.display()));
    match sizes.iter().copied().collect::<Vec<_>>()[..] {
        [] => Err(invalid("holds no shard-….safetensors".to_string())),
        [size] => (0..size)
            .map(|rank| {
                let path = file(folder, rank, size);
                if path.is_file() { Ok(path) } else { Err(invalid(format!("lacks {}", path.display()))) }
            })
            .collect(),
        _ => Err(invalid(format!("holds shards of worlds of {sizes:?} ranks: leave those of one"))),
    }
}
