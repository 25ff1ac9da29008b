//! The variables of a model as a state.
use super::convert::converted;
use super::load::Prepared;
use super::{LoadOptions, load_tensors, tensors};
use crate::error::describe;
use crate::panic::lock;
use crate::state::{self, Dict, Loader, Pieces, PutInPlace, Saved, StateDict, of_piece_key, piece_key};
use crate::variables::piece_of;
use crate::{Error, Result};
use candle_core::{Shape, Tensor, Var};
use candle_nn::VarMap;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// The kind of the state of one rank of a sharded model.
const PART: &str = "part of a model";
/// Follows a variable's name in the entry with its whole shape. The pieces have the element at which they begin there.
const SHAPE: &str = "@shape";

/// The variables, under their own names. A state loads as [`load`](super::load) does: names and shapes must be the same, and
/// floating-point values are converted.
///
/// The variables of a sharded model are saved in parts, one from each rank. Both kinds of states load into both kinds of
/// models, with any number of ranks.
impl StateDict for VarMap {
    /// # Errors
    /// [`Error::Parameter`] for a sharded model.
    fn state_dict(&self) -> Result<Dict> {
        tensors(self)
    }

    fn load_state_dict(&mut self, state: &Dict) -> Result<()> {
        load_tensors(self, state.clone(), LoadOptions::default()).map(drop)
    }

    fn sharded_state_dict(&self) -> Result<Option<Dict>> {
        pieces(self, false)
    }

    fn state_here(&self) -> Result<Dict> {
        pieces(self, true)?.map_or_else(|| self.state_dict(), Ok)
    }

    fn load_sharded_state_dict(&mut self, shards: &[Dict], _: usize, _: usize) -> Result<()> {
        prepared(self, shards)?.apply().map(drop)
    }

    /// On a GPU, a copy there may fail, for which there would have to be memory first.
    fn can_prepare(&self) -> bool {
        lock(self.data()).values().all(|var| var.device().is_cpu())
    }

    fn prepare(&mut self, saved: Saved, _: usize, _: usize) -> Result<PutInPlace<'_>> {
        let prepared = match saved {
            Saved::Whole(state) => Prepared::of_tensors(self, state, &LoadOptions::default())?,
            Saved::Shards(shards) => prepared(self, &shards)?,
        };
        Ok(Box::new(move || prepared.apply().map(drop)))
    }
}

/// The values of the variables by the parts of a model.
fn prepared(varmap: &VarMap, shards: &[Dict]) -> Result<Prepared> {
    let vars: BTreeMap<String, Var> = lock(varmap.data()).clone().into_iter().collect();
    let parts = Parts::of(shards)?;
    let known = |name: &String| parts.shapes.contains_key(name) || parts.whole.contains_key(name);
    let missing: Vec<String> = vars.keys().filter(|name| !known(name)).cloned().collect();
    let names = parts.shapes.keys().chain(parts.whole.keys());
    let mut unexpected: Vec<String> = names.filter(|name| !vars.contains_key(*name)).cloned().collect();
    unexpected.sort();
    if !missing.is_empty() || !unexpected.is_empty() {
        let path = PathBuf::from("the parts of a model");
        return Err(Error::CheckpointMismatch { path, missing, unexpected, different: Vec::new() });
    }
    let value = |(name, var): (String, Var)| parts.value(&name, &var).map(|value| (name, var, value));
    vars.into_iter().map(value).collect::<Result<Vec<_>>>().map(Prepared::from)
}

/// This rank's pieces, if `varmap` has any. `with_copies`: also those that another rank has as well, and saves.
fn pieces(varmap: &VarMap, with_copies: bool) -> Result<Option<Dict>> {
    let vars = lock(varmap.data());
    if vars.values().all(|var| piece_of(var).is_none()) {
        return Ok(None);
    }
    let mut dict = state::begin(PART)?;
    if vars.contains_key(state::KIND) {
        return Err(Error::parameter(
            state::KIND,
            "the parts of a sharded model have an entry of this name: rename it",
        ));
    }
    for (name, var) in vars.iter() {
        let Some(piece) = piece_of(var) else {
            dict.insert(name.clone(), var.as_tensor().clone());
            continue;
        };
        let shape: Vec<i64> = piece.shape.dims().iter().map(|size| *size as i64).collect();
        dict.insert(format!("{name}{SHAPE}"), state::list(&shape)?);
        if !piece.range.is_empty() && (with_copies || !piece.is_copy) {
            dict.insert(piece_key(name, piece.range.start), var.as_detached_tensor().flatten_all()?);
        }
    }
    Ok(Some(dict))
}

/// The parts of a model that its ranks have saved.
#[derive(Default)]
struct Parts {
    /// The variables that every rank had.
    whole: HashMap<String, Tensor>,
    shapes: HashMap<String, Shape>,
    pieces: Pieces,
    /// Whether the parts of all ranks are here.
    are_all: bool,
}

impl Parts {
    fn of(shards: &[Dict]) -> Result<Self> {
        let mut parts = Self { are_all: shards.iter().all(|shard| !shard.is_empty()), ..Self::default() };
        for shard in shards.iter().filter(|shard| !shard.is_empty()) {
            let mut loader = Loader::new(shard, PART)?;
            for key in shard.keys() {
                if let Some(name) = key.strip_suffix(SHAPE) {
                    let shape: Vec<i64> = loader.values(key)?;
                    let shape =
                        shape.iter().map(|size| usize::try_from(*size)).collect::<std::result::Result<Vec<_>, _>>();
                    let shape = shape.map_err(|_| Error::parameter(key, "it must have no negative sizes"))?;
                    parts.shapes.insert(name.to_string(), Shape::from(shape));
                } else if let Some((name, start)) = of_piece_key(key) {
                    parts.pieces.add(name, start, loader.tensor(key)?)?;
                } else if key != state::KIND {
                    parts.whole.entry(key.clone()).or_insert(loader.tensor(key)?.clone());
                }
            }
            loader.finish()?;
        }
        Ok(parts)
    }

    /// The value of a variable, or of this rank's piece.
    fn value(&self, name: &str, var: &Var) -> Result<Tensor> {
        let piece = piece_of(var);
        let (shape, range) = match &piece {
            Some(piece) => (&piece.shape, piece.range.clone()),
            None => (var.shape(), 0..var.elem_count()),
        };
        let whole = self.whole.get(name);
        let saved = whole.map(Tensor::shape).or(self.shapes.get(name)).unwrap_or(shape);
        if saved != shape {
            let (has, needs) = (describe(var.dtype(), saved), describe(var.dtype(), shape));
            return Err(Error::parameter(name, format!("the checkpoint has {has}, and the model {needs}")));
        }
        let value = match whole {
            Some(whole) => converted(&whole.flatten_all()?.narrow(0, range.start, range.len())?, var.dtype())?,
            None => {
                self.pieces.check(name, self.are_all.then(|| shape.elem_count()), var.dtype())?;
                if range.is_empty() {
                    return Ok(var.zeros_like()?);
                }
                self.pieces.get(name, range.start, range.len())?
            }
        };
        Ok(value.reshape(var.shape())?)
    }
}
