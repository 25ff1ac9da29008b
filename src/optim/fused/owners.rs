//! The exchange between the owners of whole parameters and the other ranks.
use super::FusedOptimizer;
use super::sharded::Sharded;
use super::slot::Piece;
use super::whole::{Moved, Way, Whole, exchange};
use crate::Result;
use crate::optim::kernel::Sums;
use crate::optim::rule::UpdateRule;
use crate::optim::update;
use candle_core::Tensor;

impl<R: UpdateRule> FusedOptimizer<R> {
    /// Lets the owners update their parameters, if these are `pending`, and brings the new values to the ranks that have pieces.
    pub(super) fn update_wholes(&self, sharded: &Sharded, pending: &[bool], scales: &[f64]) -> Result<()> {
        let present = || sharded.wholes.iter().filter(|whole| pending[whole.parameter]);
        let is_sharded = |whole: &Whole| self.slots[whole.parameter].placement.is_sharded();
        let zeros = |own: &Option<Piece>, like: &Tensor| {
            let zeros = |own: &Piece| Tensor::zeros(own.placement.range.len(), like.dtype(), like.device());
            own.as_ref().map(zeros).transpose()
        };
        let gradient = |whole| {
            let Whole { shard, own, .. }: &Whole = whole;
            let part = piece(sharded, whole).map(|piece| sharded.shards[*shard].gradient(piece)).transpose()?;
            Ok(Moved { whole, tensor: zeros(own, &sharded.shards[*shard].shard.own)?, part })
        };
        let value = |whole| {
            let Whole { parameter, own, .. }: &Whole = whole;
            let part = piece(sharded, whole).map(|piece| piece.values.clone());
            Ok(match own {
                // Its piece is a view of the same variable.
                Some(own) if !is_sharded(whole) => Moved { whole, tensor: Some(own.values.clone()), part: None },
                own => Moved { whole, tensor: zeros(own, &self.slots[*parameter].flat)?, part },
            })
        };
        let mut moved = present().map(gradient).collect::<Result<Vec<_>>>()?;
        let values = present().map(value).collect::<Result<Vec<_>>>()?;
        let count = moved.len();
        moved.extend(values.iter().filter(|value| is_sharded(value.whole)).cloned());
        exchange(&moved, Way::ToOwners, sharded.reducer.groups().within())?;
        let mut parts = Vec::new();
        for (Moved { whole, tensor, .. }, value) in moved.into_iter().take(count).zip(&values) {
            let (Some(own), Some(gradient), Some(value)) = (&whole.own, tensor, &value.tensor) else { continue };
            let gradient = gradient.to_dtype(value.dtype())?;
            let scale = scales[self.slots[own.parameter].group];
            parts.push(self.part(own, (value, &own.placement.shape), gradient, scale));
        }
        update::update(&parts, &vec![Sums::default(); parts.len()])?;
        drop(parts);
        exchange(&values, Way::FromOwners, sharded.reducer.groups().within())
    }

    /// Copies the states `name` of parameters in the shard `number`, if they have owners, to their places in each rank's `part` of
    /// the bucket.
    pub(super) fn spread_states(&self, sharded: &Sharded, number: usize, name: &str, part: &Tensor) -> Result<()> {
        let has = |whole: &&Whole| whole.shard == number && self.options_of(whole.parameter).states().contains(&name);
        let state = |whole| {
            let Whole { parameter, own, .. }: &Whole = whole;
            let tensor = own.as_ref().and_then(|own| self.state(*parameter, name, &own.states).cloned());
            let part = piece(sharded, whole)
                .map(|piece| part.narrow(0, piece.offset, piece.values.elem_count()))
                .transpose()?;
            Ok(Moved { whole, tensor, part })
        };
        let states = sharded.wholes.iter().filter(has).map(state).collect::<Result<Vec<_>>>()?;
        exchange(&states, Way::FromOwners, sharded.reducer.groups().within())
    }
}

/// This rank's piece of a parameter that has an owner.
fn piece<'a>(sharded: &'a Sharded, whole: &Whole) -> Option<&'a Piece> {
    sharded.shards[whole.shard].pieces.iter().find(|piece| piece.parameter == whole.parameter)
}
