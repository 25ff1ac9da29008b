//! The order in which parameters' gradients arrive, for buckets that are full early.
use super::state::{Rebuild, State};
use super::{Part, Reducer};
use crate::ddp::buckets::plan::DDP_ORDER;
use crate::{Error, Result};
use candle_core::Tensor;

impl Reducer {
    /// After the first synchronised backward pass, all ranks adopt the order in which the gradients of rank 0, or of the
    /// first rank that had inputs, arrived.
    pub(super) fn agree_on_order(&self, part: &mut Part, state: &mut State) -> Result<()> {
        if !matches!(state.rebuild, Rebuild::ToCome) {
            return Ok(());
        }
        let mut order = std::mem::take(&mut part.arrived);
        let mut seen = vec![false; state.parameters.len()];
        order.iter().for_each(|index| seen[*index] = true);
        // Parameters without a gradient keep the order in which they were expected.
        order.extend((0..state.parameters.len()).rev().filter(|index| !seen[*index]));
        let order: Vec<u32> = order.into_iter().map(|index| index as u32).collect();
        let tensor = Tensor::new(order, self.groups.main().device())?;
        DDP_ORDER.during(|| self.groups.main().broadcast(&tensor, part.active.root()))?;
        let order = permutation(&tensor.to_vec1::<u32>()?, state.parameters.len()).ok_or_else(|| Error::RankFailed {
            rank: part.active.root(),
            reason: format!(
                "it did not send an order of {} parameters: all ranks of a group must make the same calls in the same \
                 order",
                state.parameters.len()
            ),
        })?;
        let unchanged = order.iter().eq(state.buckets.iter().flat_map(|bucket| &bucket.members));
        state.rebuild = if unchanged { Rebuild::Done } else { Rebuild::Due(order) };
        Ok(())
    }
}

/// Returns `order` if it contains each of `count` indices once.
pub(crate) fn permutation(order: &[u32], count: usize) -> Option<Vec<usize>> {
    let mut missing = vec![true; count];
    let order = order.iter().map(|index| {
        let index = *index as usize;
        std::mem::take(missing.get_mut(index)?).then_some(index)
    });
    order.collect::<Option<Vec<usize>>>().filter(|order| order.len() == count)
}

#[cfg(test)]
mod tests {
    use super::permutation;

    #[test]
    fn only_an_order_of_all_parameters_is_one() {
        assert_eq!(permutation(&[2, 0, 1], 3), Some(vec![2, 0, 1]));
        assert_eq!(permutation(&[], 0), Some(vec![]));
        for order in [&[0, 1][..], &[0, 1, 1], &[0, 1, 3], &[0, 1, u32::MAX], &[0, 1, 2, 0]] {
            assert_eq!(permutation(order, 3), None, "{order:?}");
        }
    }
}
