//! The order in which the models of one backward pass send their buckets.
use super::core::Core;
use super::graph::Graph;
use super::reducer::permutation;
use super::verify;
use crate::backend::Label;
use crate::{Error, Result};
use candle_core::Tensor;
use std::sync::PoisonError;

/// The positions in `models` in the order in which their buckets are sent. First comes the model whose gradients are
/// complete first in the backward pass of rank `root`, which has a `graph`, since all others wait for it. Ranks agree on
/// the order when they first give these models, before anything else is sent, and keep it. Models of different groups stay
/// in the given order.
pub(super) fn agree(graph: Option<&Graph>, models: &[&Core], root: usize) -> Result<Vec<usize>> {
    let given: Vec<usize> = (0..models.len()).collect();
    let synchronised: Vec<usize> = given.iter().copied().filter(|index| models[*index].synchronises()).collect();
    let [first, _, ..] = synchronised[..] else { return Ok(given) };
    let group = models[first].group();
    if synchronised.iter().any(|index| !models[*index].group().is_same(group)) {
        return Ok(given);
    }
    let numbers: Vec<u64> = synchronised.iter().map(|index| models[*index].number).collect();
    let mut orders = models[first].orders.lock().unwrap_or_else(PoisonError::into_inner);
    let agreed = match orders.iter().position(|(of, _)| *of == numbers) {
        Some(known) => &orders[known].1,
        None => {
            verify::same_models(group, &numbers)?;
            let mut order: Vec<u32> = (0..synchronised.len() as u32).collect();
            // Models that are not in the graph, or whose gradients arrive only after the backward pass, come last.
            let end = |place: &u32| {
                let model = models[synchronised[*place as usize]];
                let completes = graph.and_then(|graph| graph.completes(model.reducer.identity()));
                completes.filter(|_| model.has_replicas()).unwrap_or(usize::MAX)
            };
            order.sort_by_key(end);
            let of_root = Tensor::new(order, group.device())?;
            Label::DDP_ORDER.during(|| group.broadcast(&of_root, root))?;
            let order = permutation(&of_root.to_vec1::<u32>()?, synchronised.len()).ok_or_else(|| Error::RankFailed {
                rank: root,
                reason: "what it sent is not an order of models: all ranks of a group must make the same calls in the same \
                         order"
                    .to_string(),
            })?;
            orders.push((numbers, order));
            let (_, order) = &orders[orders.len() - 1];
            order
        }
    };
    // Models under `no_sync` send nothing.
    let others = given.into_iter().filter(|index| !synchronised.contains(index));
    Ok(agreed.iter().map(|place| synchronised[*place]).chain(others).collect())
}
