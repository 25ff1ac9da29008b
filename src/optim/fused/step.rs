//! The step.
use super::FusedOptimizer;
use super::sharded::Sharded;
use super::slot::{OwnShard, Piece, number, takes_pieces};
use crate::ddp::gradients::steps::Steps;
use crate::ddp::gradients::verdict::Verdict;
use crate::ddp::{PendingGradients, check_averaged, gradients::scaled};
use crate::optim::clip::{self, NormType};
use crate::optim::kernel::{Fused, Moment, Sums};
use crate::optim::rule::{self, UpdateRule, limit};
use crate::optim::update::{self, Part, misfit};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{Shape, Tensor};
use std::sync::Arc;

impl<R: UpdateRule> FusedOptimizer<R> {
    /// After a bad `verdict`, which must be of the GPU, this is no step. Does not wait for it.
    pub(super) fn apply(&mut self, grads: &GradStore, verdict: Option<&Arc<Verdict>>) -> Result<()> {
        scaled::check_unscaled(grads, "step")?;
        check_averaged(grads, self.named())?;
        // Check everything before changing anything.
        let pending = self.sharded.as_ref().map(|sharded| sharded.pending(&self.slots, grads)).transpose()?;
        let gradients = self.pieces.iter().map(|piece| self.gradient(piece, grads)).collect::<Result<Vec<_>>>()?;
        let limited = self.options.iter().any(|options| rule::max_grad_norm(options).is_some());
        let norm = if limited { self.norm(grads, &gradients, pending.as_ref())? } else { 0. };
        let limits: Vec<f64> = self.options.iter().map(|options| limit(options, norm)).collect();
        if let (Some(sharded), Some(pending)) = (&self.sharded, &pending) {
            let scales: Vec<f64> = limits.iter().map(|limit| pending.scale * limit).collect();
            self.update_sharded(sharded, &pending.present, &scales)?;
        }
        let mut parts = Vec::new();
        for (piece, gradient) in self.pieces.iter().zip(&gradients) {
            let Some(gradient) = gradient.clone() else { continue };
            let limit = limits[self.slots[piece.parameter].group];
            parts.push(self.part(piece, (&piece.values, &piece.placement.shape), gradient, limit));
        }
        update::update_whole(&parts, verdict.and_then(|verdict| verdict.numbers()))?;
        let present = self.pieces.iter().zip(&gradients).filter(|(_, gradient)| gradient.is_some());
        let stepped: Vec<usize> = present.map(|(piece, _)| piece.parameter).collect();
        stepped.iter().for_each(|parameter| self.slots[*parameter].steps += 1);
        self.late.extend(verdict.map(|verdict| (Arc::clone(verdict), stepped)));
        for (slot, present) in self.slots.iter_mut().zip(pending.iter().flat_map(|pending| &pending.present)) {
            slot.steps += u64::from(*present);
        }
        for model in Steps::of(grads) {
            let made = self.slots.iter().map(|slot| {
                let options = &self.options[slot.group];
                (options, &slot.var, number(options, slot.steps))
            });
            model.made(made, self.may_judge());
        }
        self.sharded.as_ref().map_or(Ok(()), |sharded| sharded.reducer.clear_pending())
    }

    /// The gradient of a parameter that this rank updates by itself, in the form that the kernels need.
    fn gradient(&self, piece: &Piece, grads: &GradStore) -> Result<Option<Tensor>> {
        let (var, name) = (&self.slots[piece.parameter].var, &self.slots[piece.parameter].name);
        let Some(gradient) = grads.get(var) else { return Ok(None) };
        if gradient.shape() != var.shape() || !gradient.device().same_device(var.device()) {
            return Err(Error::parameter(name, format!("its gradient {}", misfit(gradient, var))));
        }
        let takes = |fused: Fused| fused.rule().takes(var.dtype(), gradient.dtype());
        let gradient = match var.device().is_cuda() && self.options_of(piece.parameter).fused().is_some_and(takes) {
            true => gradient.detach(),
            false => gradient.detach().to_dtype(var.dtype())?,
        };
        Ok(Some(gradient.contiguous()?.flatten_all()?))
    }

    /// The norm that a rule may limit: of a sharded model's gradients, or of those in the store.
    fn norm(&self, grads: &GradStore, own: &[Option<Tensor>], pending: Option<&PendingGradients>) -> Result<f64> {
        if let (Some(sharded), Some(pending)) = (&self.sharded, pending) {
            return sharded.norm(pending);
        }
        let present = self.pieces.iter().zip(own);
        let present = present.filter_map(|(piece, own)| Some((&self.slots[piece.parameter].var, own.as_ref()?)));
        let measured = clip::without_ignored(grads, present.collect(), |(var, _)| var);
        clip::norm(measured.into_iter().map(|(_, gradient)| gradient), NormType::L2)
    }

    /// Updates what this rank has of a sharded model, and brings the new values to all ranks.
    fn update_sharded(&self, sharded: &Sharded, present: &[bool], scales: &[f64]) -> Result<()> {
        let needs_sums = self.options.iter().filter_map(R::fused).any(Fused::needs_sums);
        let sums = match needs_sums {
            true => self.sums(sharded, present, scales)?,
            false => vec![Sums::default(); present.len()],
        };
        self.update_wholes(sharded, present, scales)?;
        sharded.update_each(&self.slots, |shard| {
            let (numbers, parts) = self.parts(shard, present, scales)?;
            let sums: Vec<Sums> = numbers.into_iter().map(|number| sums[number]).collect();
            update::update(&parts, &sums)
        })
    }

    /// The updates of the pieces in a shard, and the numbers of the parameters they belong to.
    fn parts<'a>(
        &'a self,
        shard: &'a OwnShard,
        present: &[bool],
        scales: &[f64],
    ) -> Result<(Vec<usize>, Vec<Part<'a, R>>)> {
        let (mut numbers, mut parts) = (Vec::new(), Vec::new());
        for piece in &shard.pieces {
            if present[piece.parameter] && takes_pieces(self.options_of(piece.parameter)) {
                numbers.push(piece.parameter);
                let gradient = shard.gradient(piece)?.to_dtype(piece.values.dtype())?;
                let scale = scales[self.slots[piece.parameter].group];
                parts.push(self.part(piece, (&piece.values, piece.values.shape()), gradient, scale));
            }
        }
        Ok((numbers, parts))
    }

    /// The update of the values of a piece, all in this shape for a rule without kernels.
    pub(super) fn part<'a>(
        &'a self,
        piece: &'a Piece,
        (parameter, shape): (&'a Tensor, &'a Shape),
        gradient: Tensor,
        gradient_scale: f64,
    ) -> Part<'a, R> {
        let slot = &self.slots[piece.parameter];
        let moment = Moment { step: slot.steps + 1, gradient_scale };
        Part {
            rule: &self.options[slot.group],
            name: &slot.name,
            moment,
            parameter,
            shape,
            gradient,
            states: &piece.states,
        }
    }

    /// For each parameter, the sums that its update needs, over the parts of all ranks.
    fn sums(&self, sharded: &Sharded, present: &[bool], scales: &[f64]) -> Result<Vec<Sums>> {
        let mut sums = vec![Sums::default(); present.len()];
        for shard in &sharded.shards {
            let (numbers, parts) = self.parts(shard, present, scales)?;
            for (number, [a, b]) in numbers.into_iter().zip(update::prepare(&parts)?) {
                let sums = &mut sums[number];
                (sums[0], sums[1]) = (sums[0] + a, sums[1] + b);
            }
        }
        let all = sharded.sum(sums.concat())?;
        Ok(all.chunks_exact(2).map(|sums| [sums[0], sums[1]]).collect())
    }
}
