//! The shards of an optimizer's state that the ranks of a [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer) have saved,
//! put together.
use super::rule::UpdateRule;
use crate::state::{self, Dict, Loader, PART_OF, Pieces, of_piece_key};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
use std::collections::HashSet;

/// The entry of a parameter's state.
pub(super) fn key(parameter: &str, part: &str) -> String {
    format!("state.{parameter}.{part}")
}

/// The kind of a shard.
pub(super) fn kind<R: UpdateRule>() -> String {
    format!("{PART_OF}{}", R::NAME)
}

/// A parameter of the optimizer that loads shards.
pub(super) struct Expected<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a Shape,
    /// The dtype of its states.
    pub(super) dtype: DType,
    pub(super) states: &'static [&'static str],
}

/// The contents of the shards.
pub(super) struct Shards {
    pub(super) learning_rates: Vec<f64>,
    /// The step of each parameter, in the order in which they were asked for.
    pub(super) steps: Vec<u64>,
    parts: Pieces,
}

impl Shards {
    /// Puts together what the ranks of a world have saved, in their order, and checks that it is the state of exactly these
    /// parameters in `groups` groups. Shards that this rank does not need may be empty. Rank 0 says if learning rates differ.
    pub(super) fn join<R: UpdateRule>(
        shards: &[Dict],
        rank: usize,
        groups: usize,
        expected: &[Expected<'_>],
    ) -> Result<Self> {
        let mut parts = Pieces::default();
        let (mut first, mut is_told) = (None, rank > 0);
        for shard in shards.iter().filter(|shard| !shard.is_empty()) {
            let mut loader = Loader::new(shard, &kind::<R>())?;
            let learning_rates = loader.learning_rates("learning_rates", groups)?;
            let steps = expected.iter().map(|parameter| loader.count(&key(parameter.name, "step")));
            let steps = steps.collect::<Result<Vec<_>>>()?;
            let (of_first, _) = first.get_or_insert_with(|| (learning_rates.clone(), steps));
            if *of_first != learning_rates && !std::mem::replace(&mut is_told, true) {
                warn_aloud(format_args!(
                    "ranks have saved different learning rates of a ZeroRedundancyOptimizer ({of_first:?} and \
                     {learning_rates:?}): all ranks continue with those of the first. Set them from numbers that are the same \
                     on all ranks"
                ));
            }
            for key in shard.keys().filter(|key| key.starts_with("state.")) {
                if let Some((whole, start)) = of_piece_key(key) {
                    parts.add(whole, start, loader.tensor(key)?)?;
                }
            }
            loader.finish()?;
        }
        let Some((learning_rates, steps)) = first else {
            return Err(Error::invalid("shards", "there must be at least one that is not empty"));
        };
        check_all(&parts, expected, shards.iter().all(|shard| !shard.is_empty()))?;
        Ok(Self { learning_rates, steps, parts })
    }

    /// A copy of the elements of a state from `start` on.
    pub(super) fn copy(&self, parameter: &str, state: &str, start: usize, elements: usize) -> Result<Tensor> {
        self.parts.copy(&key(parameter, state), start, elements)
    }

    /// Like [`copy`](Self::copy), and a part itself if possible: nobody else may have the tensors.
    pub(super) fn take(&mut self, parameter: &str, state: &str, start: usize, elements: usize) -> Result<Tensor> {
        self.parts.take(&key(parameter, state), start, elements)
    }

    /// The whole state, in the format of a [`FusedOptimizer`](super::FusedOptimizer) with the same rule.
    pub(super) fn whole<R: UpdateRule>(&self, expected: &[Expected<'_>]) -> Result<Dict> {
        let mut dict = state::begin(R::NAME)?;
        dict.insert("learning_rates".to_string(), state::list(&self.learning_rates)?);
        for (parameter, steps) in expected.iter().zip(&self.steps) {
            dict.insert(key(parameter.name, "step"), state::count(*steps)?);
            for name in parameter.states {
                let state = self.copy(parameter.name, name, 0, parameter.shape.elem_count())?;
                dict.insert(key(parameter.name, name), state.reshape(parameter.shape)?);
            }
        }
        Ok(dict)
    }
}

/// Checks that every state is present (as a whole if `is_whole`) with the right dtype, and that there are no others.
fn check_all(parts: &Pieces, expected: &[Expected<'_>], is_whole: bool) -> Result<()> {
    let mut known = HashSet::new();
    for parameter in expected {
        for name in parameter.states {
            let key = key(parameter.name, name);
            parts.check(&key, is_whole.then(|| parameter.shape.elem_count()), parameter.dtype)?;
            known.insert(key);
        }
    }
    match parts.names().filter(|key| !known.contains(*key)).min() {
        Some(key) => Err(Error::parameter(
            key,
            "the shards contain it, but no parameter here has that name: they belong to another model",
        )),
        None => Ok(()),
    }
}
