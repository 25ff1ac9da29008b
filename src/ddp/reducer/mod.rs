//! The state machine between candle's backward pass and the communicator. See `src/ddp/README.md`.
mod state;
mod strategy;

pub(crate) use state::Gradient;

use crate::backend::Label;
use crate::ddp::bucket::{Bucket, BucketCaps, ParameterInfo};
use crate::ddp::graph::Identity;
use crate::ddp::groups::Groups;
use crate::ddp::reduction::Reduction;
use crate::process_group::{Active, ProcessGroup};
use crate::tensor::copy;
use crate::trace::{Row, Trace};
use crate::{Error, Result};
use candle_core::Tensor;
use state::{Phase, Rebuild, State};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Collects gradients in buckets and sends each bucket once it is full and all earlier ones have been sent.
pub(crate) struct Reducer {
    identity: Arc<Identity>,
    groups: Groups,
    state: Mutex<State>,
    /// The reducer whose buckets are sent after this one's in the same backward pass.
    successor: Mutex<Option<Arc<Self>>>,
    trace: OnceLock<Arc<Trace>>,
}

impl Reducer {
    pub(crate) fn new(group: ProcessGroup) -> Self {
        let (identity, groups) = (Arc::default(), Groups::new(group));
        Self { identity, groups, state: Mutex::default(), successor: Mutex::default(), trace: OnceLock::new() }
    }

    pub(crate) fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    fn successor(&self) -> MutexGuard<'_, Option<Arc<Self>>> {
        self.successor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn world_size(&self) -> usize {
        self.groups.main().world_size()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the parameters, in registration order. Gradients are expected in the reverse order until the first backward
    /// pass has shown the actual one.
    pub(crate) fn set_parameters(
        &self,
        parameters: Vec<ParameterInfo>,
        caps: BucketCaps,
        nan_check: bool,
    ) -> Result<()> {
        let mut state = self.lock();
        (state.caps, state.nan_check) = (caps, nan_check);
        state.accumulated = vec![false; parameters.len()];
        state.parameters = parameters;
        let order: Vec<usize> = (0..state.parameters.len()).rev().collect();
        state.rebuild_buckets(&order, self.world_size())
    }

    /// Records what happens to the buckets from now on.
    pub(crate) fn set_trace(&self, trace: Arc<Trace>) {
        // Called once, at construction.
        let _ = self.trace.set(trace);
    }

    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.trace.get().map(|trace| &**trace)
    }

    /// The names of the parameters in each bucket, in the order in which buckets are sent.
    pub(crate) fn bucket_names(&self) -> Vec<Vec<String>> {
        let state = self.lock();
        let name = |index: &usize| state.parameters[*index].name.clone();
        state.buckets.iter().map(|bucket| bucket.members.iter().map(name).collect()).collect()
    }

    /// Begins a backward pass, after which the buckets of `successor` are sent. `is_held`: the program still holds the
    /// gradients of the last pass. `adds_up`: the gradients of this pass will be added to those. `active`: the ranks that
    /// have gradients of their own.
    pub(crate) fn prepare_for_backward(
        &self,
        synchronise: bool,
        successor: Option<Arc<Self>>,
        is_held: bool,
        adds_up: bool,
        active: &Active,
    ) -> Result<()> {
        let mut state = self.lock();
        (state.divisor, state.root) = (active.divisor(), active.root());
        if let Rebuild::Due(order) = &state.rebuild {
            let order = order.clone();
            state.rebuild_buckets(&order, self.world_size())?;
            state.rebuild = Rebuild::Done;
        } else if is_held && !matches!(state.reduction, Reduction::Shard(_)) && !state.accumulated.contains(&true) {
            state.renew_buckets(self.world_size())?;
        }
        state.buckets.iter_mut().for_each(Bucket::reset);
        state.reduction.begin(adds_up)?;
        state.begun = true;
        state.next = 0;
        state.is_open = false;
        *self.successor() = successor;
        state.phase = if synchronise { Phase::Synchronised } else { Phase::Local };
        if synchronise && matches!(state.rebuild, Rebuild::Recording) {
            state.rebuild = Rebuild::Recorded(Vec::new());
        }
        Ok(())
    }

    /// Call when all models before this one have sent their buckets: this one's may now be sent as they fill up.
    pub(crate) fn open(&self) -> Result<()> {
        self.advance(|state| {
            state.is_open = true;
            self.launch_full_buckets(state)
        })
    }

    /// Takes a gradient from a hook.
    pub(crate) fn autograd_hook(&self, index: usize, gradient: &Tensor) -> candle_core::Result<()> {
        {
            let state = self.lock();
            if state.phase == Phase::Outside {
                if self.identity.is_frozen() {
                    return Ok(());
                }
                let parameter =
                    state.parameters.get(index).map_or_else(String::new, |parameter| parameter.name.clone());
                let reached = format!("parameter {parameter}, whose gradient would not be averaged over the ranks");
                return Err(Error::BackwardOutside { wrapper: "DistributedDataParallel", reached }.into());
            }
        }
        Ok(self.gradient(index, gradient)?)
    }

    /// Takes the gradient of a parameter.
    pub(crate) fn gradient(&self, index: usize, gradient: &Tensor) -> Result<()> {
        self.advance(|state| self.mark_parameter_ready(state, index, gradient))
    }

    /// Runs `work`, and lets the next model send its buckets once all of this one's have been sent.
    fn advance(&self, work: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        let successor = {
            let mut state = self.lock();
            work(&mut state)?;
            let is_through = state.phase == Phase::Synchronised && state.next == state.buckets.len();
            if is_through { self.successor().take() } else { None }
        };
        successor.map_or(Ok(()), |next| next.open())
    }

    fn mark_parameter_ready(&self, state: &mut State, index: usize, gradient: &Tensor) -> Result<()> {
        let (bucket, slot) = state.slot_of[index];
        let parameter = &state.parameters[index];
        if gradient.shape() != &parameter.shape || gradient.dtype() != parameter.arrives_as {
            let expected = crate::error::describe(parameter.arrives_as, &parameter.shape);
            let got = crate::error::describe(gradient.dtype(), gradient.shape());
            return Err(Error::parameter(&parameter.name, format!("its gradient is {got} where {expected} belongs")));
        }
        if state.buckets[bucket].has_arrived(slot) {
            let reason = "its gradient came twice in one backward pass: an operation runs a backward pass of its own \
                          through this parameter. To compute activations again, use candle_ddp::nn::checkpoint";
            return Err(Error::parameter(&parameter.name, reason));
        }
        let synchronised = state.phase == Phase::Synchronised;
        let scale = if synchronised { state.reduction.scale(state.divisor) } else { 1.0 };
        state.buckets[bucket].put(slot, gradient, scale, state.accumulated[index])?;
        match state.phase {
            Phase::Synchronised => {
                if let Rebuild::Recorded(order) = &mut state.rebuild {
                    order.push(index);
                }
                self.launch_full_buckets(state)
            }
            Phase::Local | Phase::Outside => {
                state.accumulated[index] = true;
                Ok(())
            }
        }
    }

    /// Sends every full bucket whose turn has come, strictly in order, so that all ranks agree.
    fn launch_full_buckets(&self, state: &mut State) -> Result<()> {
        while state.is_open && state.buckets.get(state.next).is_some_and(|bucket| bucket.missing == 0) {
            self.launch(state, None)?;
        }
        Ok(())
    }

    /// Sends the next bucket in line. `used` says which members this rank used, if it missed any.
    fn launch(&self, state: &mut State, used: Option<&[bool]>) -> Result<()> {
        let number = state.next;
        if let Some(trace) = self.trace() {
            trace.instant(Row::Communication, format_args!("bucket {number} ready"), Instant::now());
        }
        if state.nan_check {
            state.check_finite(number, self.groups.main().rank())?;
        }
        let (reduction, bucket) = (&mut state.reduction, &mut state.buckets[number]);
        let group = self.groups.of(bucket.tensor.device());
        bucket.label.during(|| reduction.launch(number, bucket, used, group, self.trace()))?;
        state.next += 1;
        Ok(())
    }

    /// Discards all gradients: of a backward pass that has failed, and those that no step has used.
    pub(crate) fn discard(&self) {
        let mut state = self.lock();
        state.phase = Phase::Outside;
        *self.successor() = None;
        state.accumulated.fill(false);
        state.buckets.iter_mut().for_each(Bucket::reset);
        state.reduction.discard();
        if let Rebuild::Recorded(_) = state.rebuild {
            state.rebuild = Rebuild::Recording;
        }
    }

    /// Call after candle's backward pass, when all models before this one have sent their buckets: sends the rest of
    /// this one's, then lets the next model send its own.
    pub(crate) fn launch_remaining(&self) -> Result<()> {
        self.advance(|state| {
            if state.phase != Phase::Synchronised {
                return Ok(());
            }
            state.used = vec![true; state.parameters.len()];
            while state.next < state.buckets.len() {
                self.complete(state)?;
                self.launch_full_buckets(state)?;
            }
            Ok(())
        })
    }

    /// Ends a backward pass whose buckets have all been sent: waits for them and returns each parameter's gradient in
    /// registration order.
    pub(crate) fn finalize_backward(&self) -> Result<Vec<Gradient>> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.phase == Phase::Local {
            state.phase = Phase::Outside;
            state.buckets.iter_mut().try_for_each(Bucket::flush)?;
            let accumulated = |(gradient, accumulated)| if accumulated { gradient } else { Gradient::Absent };
            let gradients = state.gradients()?.into_iter().zip(state.accumulated.iter().copied());
            return Ok(gradients.map(accumulated).collect());
        }
        let mut used = std::mem::take(&mut state.used);
        state.reduction.finish(&state.buckets, &used, &self.groups, self.trace())?;
        state.phase = Phase::Outside;
        state.accumulated.fill(false);
        self.agree_on_order(state)?;
        for (index, used) in used.iter_mut().enumerate() {
            // Only a rank that did not contribute must read the flags.
            *used = *used || state.anybody_used(index)?;
        }
        if !state.trained {
            state.used.clone_from(&used);
        }
        if let Reduction::Shard(reduction) = &mut state.reduction {
            reduction.set_pending(used);
            return Ok(state.slot_of.iter().map(|_| Gradient::Absent).collect());
        }
        let present = |(gradient, used)| if used { gradient } else { Gradient::Absent };
        Ok(state.gradients()?.into_iter().zip(used).map(present).collect())
    }

    /// Call after a synchronised backward pass: in the first one, a parameter that no rank used is an error on all ranks,
    /// unless the options allow it.
    pub(crate) fn check_used(&self) -> Result<()> {
        let mut state = self.lock();
        if !state.trained {
            state.check_used()?;
            state.trained = true;
        }
        Ok(())
    }

    /// Completes the next bucket, for which some gradients are missing, and sends it.
    fn complete(&self, state: &mut State) -> Result<()> {
        let used = &mut state.used;
        let scale = state.reduction.scale(state.divisor);
        let bucket = &mut state.buckets[state.next];
        bucket.flush()?;
        for (slot, &index) in bucket.members.iter().enumerate() {
            if bucket.arrived[slot] {
                continue;
            }
            let gradient = &bucket.gradients[slot];
            if state.accumulated[index] {
                // Not used in this pass, but accumulated under `no_sync`, where gradients are not divided.
                copy::scale(gradient, scale)?;
            } else {
                gradient.zero_set()?;
                used[index] = false;
            }
        }
        let members_used: Vec<bool> = bucket.members.iter().map(|index| used[*index]).collect();
        self.launch(state, Some(&members_used))
    }

    /// After the first synchronised backward pass, all ranks adopt the order in which the gradients of rank 0, or of the
    /// first rank that had inputs, arrived.
    fn agree_on_order(&self, state: &mut State) -> Result<()> {
        let Rebuild::Recorded(arrived) = &mut state.rebuild else { return Ok(()) };
        let mut order = std::mem::take(arrived);
        let mut seen = vec![false; state.parameters.len()];
        order.iter().for_each(|index| seen[*index] = true);
        // Parameters without a gradient keep the order in which they were expected.
        order.extend((0..state.parameters.len()).rev().filter(|index| !seen[*index]));
        let order: Vec<u32> = order.into_iter().map(|index| index as u32).collect();
        let tensor = Tensor::new(order, self.groups.main().device())?;
        Label::DDP_ORDER.during(|| self.groups.main().broadcast(&tensor, state.root))?;
        let order = permutation(&tensor.to_vec1::<u32>()?, state.parameters.len()).ok_or_else(|| Error::RankFailed {
            rank: state.root,
            reason: format!(
                "what it sent is not an order of {} parameters: all ranks of a group must make the same calls in the \
                 same order",
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
