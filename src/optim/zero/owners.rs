//! What owners of whole parameters exchange with the other ranks.
use super::ZeroRedundancyOptimizer;
use super::layout::Piece;
use super::whole::{Moved, Way, Whole, exchange};
use crate::Result;
use crate::optim::kernel::Sums;
use crate::optim::rule::UpdateRule;
use crate::optim::update;
use candle_core::Tensor;

impl<R: UpdateRule> ZeroRedundancyOptimizer<R> {
    /// Lets the owners update their parameters, if these are `pending`, and brings the new values to the ranks that have pieces.
    pub(super) fn update_wholes(&self, pending: &[bool], scales: &[f64]) -> Result<()> {
        let present = || self.wholes.iter().filter(|whole| pending[whole.parameter]);
        let is_sharded = |whole: &Whole| self.parameters[whole.parameter].placement.is_sharded();
        let zeros = |own: &Option<Piece>, like: &Tensor| {
            let zeros = |own: &Piece| Tensor::zeros(own.placement.range.len(), like.dtype(), like.device());
            own.as_ref().map(zeros).transpose()
        };
        let gradient = |whole| {
            let Whole { shard, own, .. }: &Whole = whole;
            let part = self.piece(whole).map(|piece| self.shards[*shard].gradient(piece)).transpose()?;
            Ok(Moved { whole, tensor: zeros(own, &self.shards[*shard].shard.own)?, part })
        };
        let value = |whole| {
            let Whole { parameter, own, .. }: &Whole = whole;
            let part = self.piece(whole).map(|piece| piece.values.clone());
            Ok(match own {
                // Its piece is a view of the same variable.
                Some(own) if !is_sharded(whole) => Moved { whole, tensor: Some(own.values.clone()), part: None },
                own => Moved { whole, tensor: zeros(own, &self.parameters[*parameter].flat)?, part },
            })
        };
        let mut moved = present().map(gradient).collect::<Result<Vec<_>>>()?;
        let values = present().map(value).collect::<Result<Vec<_>>>()?;
        let count = moved.len();
        moved.extend(values.iter().filter(|value| is_sharded(value.whole)).cloned());
        exchange(&moved, Way::ToOwners, self.reducer.groups().within())?;
        let mut parts = Vec::new();
        for (Moved { whole, tensor, .. }, value) in moved.into_iter().take(count).zip(&values) {
            let (Some(own), Some(gradient), Some(value)) = (&whole.own, tensor, &value.tensor) else { continue };
            let shape = &self.parameters[whole.parameter].placement.shape;
            parts.push(self.part(own, value, gradient, Some(shape), scales)?);
        }
        update::update(&parts, &vec![Sums::default(); parts.len()])?;
        drop(parts);
        exchange(&values, Way::FromOwners, self.reducer.groups().within())
    }

    /// Copies the states `name` of parameters in the shard `number`, if they have owners, to their places in each rank's `part` of
    /// the bucket.
    pub(super) fn spread_states(&self, number: usize, name: &str, part: &Tensor) -> Result<()> {
        let has = |whole: &&Whole| whole.shard == number && self.options_of(whole.parameter).states().contains(&name);
        let state = |whole| {
            let Whole { parameter, own, .. }: &Whole = whole;
            let tensor = own.as_ref().and_then(|own| self.state(*parameter, name, &own.states).cloned());
            let part =
                self.piece(whole).map(|piece| part.narrow(0, piece.offset, piece.values.elem_count())).transpose()?;
            Ok(Moved { whole, tensor, part })
        };
        let states = self.wholes.iter().filter(has).map(state).collect::<Result<Vec<_>>>()?;
        exchange(&states, Way::FromOwners, self.reducer.groups().within())
    }

    /// This rank's piece of a parameter that has an owner.
    fn piece(&self, whole: &Whole) -> Option<&Piece> {
        self.shards[whole.shard].pieces.iter().find(|piece| piece.parameter == whole.parameter)
    }
}
