//! The variables of a model as a state.
use super::convert::converted;
use super::load::Prepared;
use super::{LoadOptions, tensors};
use crate::error::describe;
use crate::panic::lock;
use crate::placement::{Placement, Spread};
use crate::state::{self, Dict, Loader, PutInPlace, Saved, Share, StateDict};
use crate::{Error, Result};
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The kind of the state that the ranks of a sharded model have parts of.
const MODEL: &str = "a model";
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
        self.prepare(Saved::Whole(state.clone()), 0, 1)?()
    }

    fn share(&self) -> Result<Share> {
        let vars = lock(self.data());
        if vars.values().all(|var| !Placement::of(var).is_sharded()) {
            drop(vars);
            return Ok(Share::new(Spread::Replicate, self.state_dict()?));
        }
        let mut share = Share::begin(MODEL, true)?;
        if vars.contains_key(state::KIND) {
            return Err(Error::parameter(
                state::KIND,
                "the parts of a sharded model have an entry of this name: rename it",
            ));
        }
        for (name, var) in vars.iter() {
            let placement = Placement::of(var);
            if placement.is_sharded() {
                let shape: Vec<i64> = placement.shape.dims().iter().map(|size| *size as i64).collect();
                share.dict.insert(format!("{name}{SHAPE}"), state::list(&shape)?);
            }
            share.insert(name, &placement, var.as_detached_tensor())?;
        }
        Ok(share)
    }

    /// On a GPU, a copy there may fail, for which there would have to be memory first.
    fn can_prepare(&self) -> bool {
        lock(self.data()).values().all(|var| var.device().is_cpu())
    }

    fn prepare(&mut self, saved: Saved, rank: usize, _: usize) -> Result<PutInPlace<'_>> {
        let prepared = match saved {
            Saved::Whole(state) => Prepared::of_tensors(self, state, &LoadOptions::default())?,
            shards @ Saved::Shards(_) => prepared(self, Loader::of(&shards, MODEL, rank)?)?,
        };
        Ok(Box::new(move || prepared.apply().map(drop)))
    }
}

/// The values of the variables by the parts of a model.
fn prepared(varmap: &VarMap, mut loader: Loader) -> Result<Prepared> {
    let vars: BTreeMap<String, Var> = lock(varmap.data()).clone().into_iter().collect();
    let known: BTreeSet<String> = loader.keys().map(|key| key.strip_suffix(SHAPE).unwrap_or(key).to_string()).collect();
    let missing: Vec<String> = vars.keys().filter(|name| !known.contains(*name)).cloned().collect();
    let unexpected: Vec<String> = known.into_iter().filter(|name| !vars.contains_key(name)).collect();
    if !missing.is_empty() || !unexpected.is_empty() {
        let path = PathBuf::from("the parts of a model");
        return Err(Error::CheckpointMismatch { path, missing, unexpected, different: Vec::new() });
    }
    let value = |(name, var): (String, Var)| here(&mut loader, &name, &var).map(|value| (name, var, value));
    vars.into_iter().map(value).collect::<Result<Vec<_>>>().map(Prepared::from)
}

/// The value of a variable, or of this rank's piece.
fn here(loader: &mut Loader, name: &str, var: &Var) -> Result<Tensor> {
    let placement = Placement::of(var);
    let whole = loader.has(name).then(|| loader.tensor(name)).transpose()?;
    let saved = match &whole {
        Some(whole) => whole.shape().clone(),
        None => {
            let key = format!("{name}{SHAPE}");
            let dims = loader
                .values::<i64>(&key)?
                .into_iter()
                .map(usize::try_from)
                .collect::<std::result::Result<Vec<_>, _>>();
            dims.map_err(|_| Error::parameter(key, "it must have no negative sizes"))?.into()
        }
    };
    if saved != placement.shape {
        let (has, needs) = (describe(var.dtype(), &saved), describe(var.dtype(), &placement.shape));
        return Err(Error::parameter(name, format!("the checkpoint has {has}, and the model {needs}")));
    }
    let range = &placement.range;
    let value = match whole {
        Some(whole) => converted(&whole.flatten_all()?.narrow(0, range.start, range.len())?, var.dtype())?,
        None => loader.part(name, &placement, var.dtype())?,
    };
    Ok(value.reshape(var.shape())?)
}
