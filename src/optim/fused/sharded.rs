//! ZeRO-2: optimizer state and gradients of a model that are spread over the ranks.
use super::slot::{OwnShard, Piece, Slot};
use super::whole::{self, Whole};
use crate::backend::Work;
use crate::ddp::{BucketMemory, PendingGradients, Reducer, Shard, own_gradient};
use crate::goes_with::Feature;
use crate::optim::clip::{self, NormType};
use crate::optim::kernel::Fused;
use crate::optim::rule::{UpdateRule, max_grad_norm};
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::{Error, ReduceOp, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use std::sync::Arc;

/// An optimizer's part of a sharded model, whose parameters are the first slots.
pub(super) struct Sharded {
    pub(super) reducer: Arc<Reducer>,
    /// One for each bucket.
    pub(super) shards: Vec<OwnShard>,
    /// The parameters that are updated as a whole.
    pub(super) wholes: Vec<Whole>,
    memory: Arc<BucketMemory>,
}

impl Sharded {
    pub(super) fn new<R: UpdateRule>(
        reducer: Arc<Reducer>,
        (shards, memory): (Vec<Shard>, Arc<BucketMemory>),
        slots: &[Slot],
        options: &[R],
    ) -> Result<Self> {
        let (within, spread) = (reducer.groups().within(), reducer.groups().spread());
        let own = shards.into_iter().map(|shard| OwnShard::new(shard, (within.rank(), spread), slots, options));
        let shards = own.collect::<Result<Vec<_>>>()?;
        let wholes = whole::wholes(&shards, slots, options, (within, spread))?;
        Ok(Self { reducer, shards, wholes, memory })
    }

    pub(super) fn process_group(&self) -> &ProcessGroup {
        self.reducer.groups().main()
    }

    /// This rank's pieces in the order of buckets, followed by the parameters that it owns.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        let owned = self.wholes.iter().filter_map(|whole| whole.own.as_ref());
        self.shards.iter().flat_map(|own| &own.pieces).chain(owned)
    }

    pub(super) fn pieces_mut(&mut self) -> impl Iterator<Item = &mut Piece> {
        let owned = self.wholes.iter_mut().filter_map(|whole| whole.own.as_mut());
        self.shards.iter_mut().flat_map(|own| &mut own.pieces).chain(owned)
    }

    /// The gradients of the last pass. `grads` must hold none of these parameters: their means are in the shards.
    pub(super) fn pending(&self, slots: &[Slot], grads: &GradStore) -> Result<PendingGradients> {
        let count = self.shards.iter().map(|own| own.shard.parameters.len()).sum();
        if let Some(slot) = slots.iter().take(count).find(|slot| grads.get(&slot.var).is_some()) {
            return Err(own_gradient(&slot.name));
        }
        self.reducer.pending()
    }

    /// Ends the group if a step that the other ranks wait for has failed.
    pub(super) fn end_on_error(&self, result: &Result<()>) {
        if let Err(error) = result
            && !matches!(error, Error::InputsExhausted { .. })
            && self.process_group().world_size() > 1
        {
            self.process_group().abort(&format!("the step of a sharded optimizer failed: {error}"));
        }
    }

    /// Adds up the values of all ranks that have parts of the model.
    pub(super) fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        let values = Tensor::new(values, self.process_group().device())?;
        self.reducer.groups().within().all_reduce(&values, ReduceOp::Sum)?;
        Ok(values.to_vec1()?)
    }

    /// The norm of this rank's part of the gradients, unscaled.
    pub(super) fn norm_here(&self, pending: &PendingGradients, norm_type: NormType) -> Result<f64> {
        let mut gradients = Vec::new();
        for shard in &self.shards {
            for piece in &shard.pieces {
                if pending.present[piece.parameter] {
                    gradients.push(shard.gradient(piece)?);
                }
            }
        }
        clip::total(gradients.iter(), norm_type)
    }

    /// The norm of all gradients over all ranks, scaled as in the next step.
    pub(super) fn norm(&self, pending: &PendingGradients) -> Result<f64> {
        let squares = self.norm_here(pending, NormType::L2)?;
        Ok(self.sum(vec![squares])?[0].sqrt() * pending.scale)
    }

    /// Calls `update` for each bucket, and gathers the parameters of one while the next one is updated.
    pub(super) fn update_each(&self, slots: &[Slot], update: impl Fn(&OwnShard) -> Result<()>) -> Result<()> {
        let mut in_flight: Option<Gathering> = None;
        for shard in &self.shards {
            update(shard)?;
            if shard.shard.parameters.iter().any(|parameter| slots[*parameter].placement.is_sharded()) {
                continue; // the model gathers them
            }
            let gathering = Gathering::start(shard, slots, &self.memory, self.reducer.groups().within())?;
            if let Some(previous) = in_flight.replace(gathering) {
                previous.finish(slots, &self.memory)?;
            }
        }
        in_flight.map_or(Ok(()), |last| last.finish(slots, &self.memory))
    }
}

/// The parameters of a bucket while they are gathered.
struct Gathering<'a> {
    shard: &'a Shard,
    storage: Tensor,
    work: Work,
}

impl<'a> Gathering<'a> {
    /// Starts gathering the variables' current values. Every rank has its part of them.
    fn start(
        OwnShard { shard, pieces }: &'a OwnShard,
        slots: &[Slot],
        memory: &BucketMemory,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let (gradients, cut, first) = (&shard.own, &shard.cut, shard.parameters.first());
        // Gradients may have another dtype, to which the variables must not be rounded.
        let dtype = first.map_or(gradients.dtype(), |parameter| slots[*parameter].var.dtype());
        let storage = memory.take(cut.length(), dtype, gradients.device())?;
        let whole = storage.narrow(0, 0, cut.length())?;
        let own = whole.narrow(0, group.rank() * cut.part(), cut.part())?;
        let places = pieces.iter().map(|piece| own.narrow(0, piece.offset, piece.values.elem_count()));
        let places = places.collect::<candle_core::Result<Vec<_>>>()?;
        copy::copy_all(places.iter().zip(pieces.iter().map(|piece| &piece.values)))?;
        let work = group.all_gather_async(&whole, &own)?;
        Ok(Self { shard, storage, work })
    }

    fn finish(self, slots: &[Slot], memory: &BucketMemory) -> Result<()> {
        self.work.wait()?;
        let Shard { parameters, cut, .. } = self.shard;
        let values = (0..parameters.len()).map(|place| cut.whole(&self.storage, place)).collect::<Result<Vec<_>>>()?;
        copy::copy_all(parameters.iter().map(|parameter| &slots[*parameter].flat).zip(&values))?;
        memory.give_back(self.storage);
        Ok(())
    }
}

/// Whether updates depend on norms of gradients or parameters.
pub(super) fn needs_norms<R: UpdateRule>(rule: &R) -> bool {
    rule.fused().is_some_and(Fused::needs_sums) || max_grad_norm(rule).is_some()
}

/// Refuses norms under virtual ranks: ranks add them up from their parts, whose sizes depend on the number of ranks.
pub(super) fn check_norms(reducer: &Reducer) -> Result<()> {
    if reducer.virtual_ranks().is_none() {
        return Ok(());
    }
    Feature::Norms.goes_with(Feature::VirtualRanks)
}
