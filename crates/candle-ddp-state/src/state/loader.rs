//! Reading a state that one rank has saved for all, or several ranks in parts.
use super::pieces::{PART_OF, Pieces, of_piece_key};
use super::{Dict, KIND, Saved};
use crate::error::describe;
use crate::placement::Placement;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, WithDType};
use std::collections::{HashMap, HashSet};

/// A state that is being loaded. It keeps track of the requested entries.
#[derive(Debug)]
pub struct Loader {
    /// The entries that every rank has, as each of them saved it, in their order.
    entries: HashMap<String, Vec<Tensor>>,
    /// The entries of which each rank has a part.
    pieces: Pieces,
    /// Whether these are the parts of all ranks. None for a whole state.
    are_all: Option<bool>,
    /// Whether nobody else has the tensors.
    is_owned: bool,
    /// Whether this rank warns of what differs between ranks.
    warns: bool,
    taken: HashSet<String>,
}

impl Loader {
    /// `kind` is the required kind of the state.
    pub fn new(state: &Dict, kind: &str) -> Result<Self> {
        Self::join([state], kind)
    }

    /// A state of this kind, whole or in parts, whose tensors nobody else has.
    pub fn of(saved: &Saved, kind: &str, rank: usize) -> Result<Self> {
        let loader = match saved {
            Saved::Whole(state) => Self::new(state, kind),
            Saved::Shards(shards) => Self::of_shards(shards, kind, rank),
        };
        Ok(Self { is_owned: true, ..loader? })
    }

    /// The shards of such a state that the ranks of a world have saved, in their order. Shards that this rank does not need may be empty.
    fn of_shards(shards: &[Dict], kind: &str, rank: usize) -> Result<Self> {
        let here: Vec<_> = shards.iter().filter(|shard| !shard.is_empty()).collect();
        if here.is_empty() {
            return Err(Error::invalid("shards", "there must be at least one that is not empty"));
        }
        let are_all = Some(here.len() == shards.len());
        Ok(Self { are_all, warns: rank == 0, ..Self::join(here, &format!("{PART_OF}{kind}"))? })
    }

    fn join<'a>(parts: impl IntoIterator<Item = &'a Dict>, kind: &str) -> Result<Self> {
        let (mut entries, mut pieces, mut count) = (HashMap::<_, Vec<_>>::new(), Pieces::default(), 0);
        for part in parts {
            count += 1;
            for (key, tensor) in part {
                match of_piece_key(key).filter(|_| kind.starts_with(PART_OF)) {
                    Some((whole, start)) => pieces.add(whole, start, tensor)?,
                    None => entries.entry(key.clone()).or_default().push(tensor.clone()),
                }
            }
        }
        entries.retain(|key, tensors| key != KIND || tensors.len() == count);
        let taken = HashSet::new();
        let mut loader = Self { entries, pieces, are_all: None, is_owned: false, warns: false, taken };
        match loader.all::<u8>(KIND)?.into_iter().find(|found| found != kind.as_bytes()) {
            Some(found) => {
                let found = String::from_utf8_lossy(&found);
                Err(Error::parameter(KIND, format!("it must be the state of {kind}, not of {found}")))
            }
            None => Ok(loader),
        }
    }

    /// Whether every rank has an entry `key`.
    pub fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// The keys of all entries but the kind.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.entries.keys().filter(|key| *key != KIND).chain(self.pieces.names())
    }

    /// The tensor `key`.
    pub fn tensor(&mut self, key: &str) -> Result<Tensor> {
        self.tensors(key).map(|tensors| tensors[0].clone())
    }

    /// The tensor `key` of each rank. There is at least one.
    fn tensors(&mut self, key: &str) -> Result<&[Tensor]> {
        match self.entries.get(key) {
            Some(tensors) => {
                self.taken.insert(key.to_string());
                Ok(tensors)
            }
            None => Err(Error::parameter(
                key,
                "it is missing from the state, which is of another model, or of one with fewer trained parameters: \
                 load a state that was saved for the same parameters",
            )),
        }
    }

    /// The values of the tensor `key`, which must be a list.
    pub fn values<T: WithDType>(&mut self, key: &str) -> Result<Vec<T>> {
        Ok(self.all(key)?.swap_remove(0))
    }

    /// The values of the tensor `key`, which must be a list, of each rank.
    fn all<T: WithDType>(&mut self, key: &str) -> Result<Vec<Vec<T>>> {
        let values = |tensor: &Tensor| {
            if tensor.dtype() != T::DTYPE || tensor.rank() != 1 {
                let is = describe(tensor.dtype(), tensor.shape());
                return Err(Error::parameter(key, format!("it must be a list of {}, not {is}", T::DTYPE.as_str())));
            }
            Ok(tensor.to_vec1()?)
        };
        self.tensors(key)?.iter().map(values).collect()
    }

    /// `count` values.
    pub fn list<T: WithDType>(&mut self, key: &str, count: usize) -> Result<Vec<T>> {
        let values = self.values(key)?;
        if values.len() != count {
            let reason =
                format!("the state must have {count} values here, not {}: it is from another object", values.len());
            return Err(Error::parameter(key, reason));
        }
        Ok(values)
    }

    /// One value that cannot be negative.
    pub fn count(&mut self, key: &str) -> Result<u64> {
        let value = self.list::<i64>(key, 1)?[0];
        u64::try_from(value).map_err(|_| Error::parameter(key, format!("it must not be negative, but is {value}")))
    }

    /// A rank's part of the entry `key`, as a list.
    pub fn part(&mut self, key: &str, placement: &Placement, dtype: DType) -> Result<Tensor> {
        let Placement { shape, range, .. } = placement;
        if let (Some(are_all), false) = (self.are_all, self.has(key)) {
            self.taken.insert(key.to_string());
            self.pieces.check(key, are_all.then(|| shape.elem_count()), dtype)?;
            return match (range.len(), self.is_owned) {
                (0, _) => Ok(Tensor::zeros(0, dtype, &Device::Cpu)?),
                (elements, true) => self.pieces.take(key, range.start, elements),
                (elements, false) => self.pieces.copy(key, range.start, elements),
            };
        }
        let tensor = self.tensor(key)?;
        if tensor.shape() != shape || tensor.dtype() != dtype {
            let (is, needed) = (describe(tensor.dtype(), tensor.shape()), describe(dtype, shape));
            let reason =
                format!("it must be {needed}, but the state has {is}: load the state that was saved with this model");
            return Err(Error::parameter(key, reason));
        }
        // Of the part alone, which may stay.
        Ok(tensor.flatten_all()?.narrow(0, range.start, range.len())?.copy()?)
    }

    /// A learning rate for each group of parameters of an optimizer. If ranks have saved different ones, the first rank's count.
    pub fn learning_rates(&mut self, key: &str, groups: usize) -> Result<Vec<f64>> {
        let mut all: Vec<Vec<f64>> = self.all(key)?;
        let learning_rates = all.swap_remove(0);
        if let Some(other) = all.iter().find(|other| self.warns && **other != learning_rates) {
            warn_aloud(format_args!(
                "ranks have saved different learning rates of an optimizer ({learning_rates:?} and {other:?}): all ranks continue \
                 with those of the first. Set them from numbers that are the same on all ranks"
            ));
        }
        if learning_rates.len() == groups {
            return Ok(learning_rates);
        }
        let reason = format!(
            "the state is from an optimizer with {} parameter group(s), and this one has {groups}: create it with the \
             same groups as the saved one. After freezing or thawing parameters, load_known \
             loads what both have (docs/fine_tuning.md, \"Freezing\")",
            learning_rates.len()
        );
        Err(Error::parameter(key, reason))
    }

    /// Refuses a state with entries that were not requested.
    pub fn finish(self) -> Result<()> {
        match self.keys().filter(|key| !self.taken.contains(*key)).min() {
            Some(key) => Err(Error::parameter(
                key,
                "the state contains it, but nothing here has that name: load the state that was saved with this model",
            )),
            None => Ok(()),
        }
    }
}
