//! The order in which the models of one backward pass send their buckets.
use crate::ddp::buckets::plan::DDP_ORDER;
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::graph::Graph;
use crate::ddp::reducer::order::permutation;
use crate::ddp::watch::verify;
use crate::panic::lock;
use crate::{Error, Result};
use candle_core::Tensor;

/// A model in a backward pass.
#[derive(Clone, Copy)]
pub(in crate::ddp) struct Member<'a> {
    pub(in crate::ddp) core: &'a DistributedModel,
    /// Whether its gradients are averaged. Otherwise they accumulate, under `no_sync`.
    pub(in crate::ddp) synchronises: bool,
    /// Whether its gradients are added to the last pass's.
    pub(in crate::ddp) adds_up: bool,
}

impl Member<'_> {
    /// Whether it sends its buckets.
    pub(in crate::ddp) fn sends(&self) -> bool {
        self.core.reducer.sends(self.synchronises)
    }
}

/// `models` in the order in which their buckets are sent. The model whose gradients complete first in the
/// backward pass of rank `root`, which has a graph, goes first, because the others wait for it. Ranks agree on the order when
/// they first give these models, before anything else is sent, and keep it. Models of different groups stay in the given
/// order.
pub(in crate::ddp) fn agree<'a>(models: &[Member<'a>], graph: Option<&Graph>, root: usize) -> Result<Vec<Member<'a>>> {
    let (sending, others): (Vec<Member>, Vec<Member>) = models.iter().partition(|model| model.sends());
    let [Member { core: first, .. }, _, ..] = sending[..] else { return Ok(models.to_vec()) };
    let group = first.group();
    if sending.iter().any(|model| !model.core.group().is_same(group)) {
        return Ok(models.to_vec());
    }
    let numbers: Vec<u64> = sending.iter().map(|model| model.core.number).collect();
    let mut orders = lock(&first.orders);
    let agreed = match orders.iter().position(|(of, _)| *of == numbers) {
        Some(known) => &orders[known].1,
        None => {
            verify::same_models(group, &numbers)?;
            let mut order: Vec<u32> = (0..sending.len() as u32).collect();
            // Models that are not in the graph, or whose gradients arrive only after the backward pass, come last.
            let end = |place: &u32| {
                let model = sending[*place as usize].core;
                let completes = graph.and_then(|graph| graph.completes(model.reducer.identity()));
                completes.filter(|_| model.has_replicas()).unwrap_or(usize::MAX)
            };
            order.sort_by_key(end);
            let of_root = Tensor::new(order, group.device())?;
            DDP_ORDER.during(|| group.broadcast(&of_root, root))?;
            let order = permutation(&of_root.to_vec1::<u32>()?, sending.len()).ok_or_else(|| Error::RankFailed {
                rank: root,
                reason: "it did not send an order of models: all ranks of a group must make the same calls in the same order"
                    .to_string(),
            })?;
            orders.push((numbers, order));
            let (_, order) = &orders[orders.len() - 1];
            order
        }
    };
    Ok(agreed.iter().map(|place| sending[*place]).chain(others).collect())
}
