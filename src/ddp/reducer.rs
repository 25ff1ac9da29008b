//! The state machine between candle's backward pass and the communicator. See `README.md` beside this file.
use super::bucket::{self, Bucket, BucketCaps, ParameterInfo};
use super::comm_hook::{CommHook, CommHookTraffic};
use super::reduction::Reduction;
use super::reduction::hook::{HookReduction, RunningHook};
use super::reduction::shard::{PendingGradients, Shard, ShardReduction, Staging};
use super::usage;
use crate::backend::Label;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::trace::{Row, Trace};
use crate::{Error, Result};
use candle_core::Tensor;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Collects gradients in buckets and sends off each bucket as soon as it is full and its turn has come.
pub(crate) struct Reducer {
    group: ProcessGroup,
    state: Mutex<State>,
    trace: OnceLock<Trace>,
}

#[derive(Default)]
struct State {
    caps: BucketCaps,
    parameters: Vec<ParameterInfo>,
    buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its place among that bucket's members.
    slot_of: Vec<(usize, usize)>,
    phase: Phase,
    /// Whether there was a backward pass.
    begun: bool,
    /// Whether the first synchronised backward pass is over.
    trained: bool,
    /// How buckets are sent.
    reduction: Reduction,
    /// The next bucket in line to be sent.
    next: usize,
    /// Whether a parameter's slice holds a gradient from a backward pass under `no_sync`, not yet divided.
    accumulated: Vec<bool>,
    rebuild: Rebuild,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Phase {
    /// No backward pass of DDP's is running: a hook that fires now belongs to somebody else's.
    #[default]
    Outside,
    /// Under `no_sync`: gradients add up in the buckets.
    Local,
    /// Buckets are sent.
    Synchronised,
}

/// The first synchronised backward pass shows in which order gradients really come.
#[derive(Default)]
enum Rebuild {
    /// The order so far.
    #[default]
    Recording,
    Recorded(Vec<usize>),
    /// Rank 0's order, to be used from the next backward pass on.
    Due(Vec<usize>),
    Done,
}

/// What became of one parameter's gradient.
pub(super) enum Gradient {
    /// It is there: a view of its bucket.
    Present(Tensor),
    /// No rank has used the parameter.
    Absent,
}

impl Reducer {
    pub(super) fn new(group: ProcessGroup) -> Self {
        Self { group, state: Mutex::default(), trace: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the reducer which parameters there are, in registration order; gradients are expected in the reverse of
    /// it until the first backward pass has shown better.
    pub(super) fn set_parameters(&self, parameters: Vec<ParameterInfo>, caps: BucketCaps) -> Result<()> {
        let mut state = self.lock();
        state.caps = caps;
        state.accumulated = vec![false; parameters.len()];
        state.parameters = parameters;
        let order: Vec<usize> = (0..state.parameters.len()).rev().collect();
        state.rebuild_buckets(&order, self.group.world_size())
    }

    /// Whether a communication hook may be registered now.
    pub(super) fn check_comm_hook(&self) -> Result<()> {
        let state = self.lock();
        let reason = match state.reduction {
            Reduction::Hook(_) => "there is one already, and it cannot be replaced",
            Reduction::Shard(_) => {
                "a ZeroRedundancyOptimizer has the gradients reduce-scattered: it and a hook exclude each other"
            }
            Reduction::AllReduce if state.begun => "it comes too late: register it before the first backward pass",
            Reduction::AllReduce => return Ok(()),
        };
        Err(Error::invalid("comm_hook", reason))
    }

    /// From now on, buckets are `hook`'s business.
    pub(super) fn set_comm_hook(&self, hook: impl CommHook) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        let reduction = HookReduction::new(hook);
        if reduction.is_local() {
            // An order that suits rank 0 need not suit the others, and telling it would be communication.
            state.rebuild = Rebuild::Done;
        }
        state.reduction = Reduction::Hook(reduction);
        state.reduction.set_buckets(&state.buckets, &state.parameters)
    }

    /// Gives the registered hook to `work`.
    pub(super) fn with_comm_hook<T>(&self, work: impl FnOnce(&mut dyn RunningHook) -> Result<T>) -> Result<T> {
        match &mut self.lock().reduction {
            Reduction::Hook(reduction) => work(reduction.hook()),
            Reduction::AllReduce | Reduction::Shard(_) => {
                Err(Error::invalid("comm_hook", "no communication hook is registered"))
            }
        }
    }

    pub(super) fn comm_hook_traffic(&self) -> Option<CommHookTraffic> {
        match &self.lock().reduction {
            Reduction::AllReduce | Reduction::Shard(_) => None,
            Reduction::Hook(reduction) => Some(reduction.traffic()),
        }
    }

    /// Whether [`shard`](Self::shard) is possible now.
    pub(crate) fn check_shard(&self) -> Result<()> {
        let state = self.lock();
        let reason = match state.reduction {
            Reduction::Hook(_) => {
                "a communication hook has its gradients: a ZeroRedundancyOptimizer and a hook exclude each other"
            }
            Reduction::Shard(_) => "another ZeroRedundancyOptimizer has its gradients",
            Reduction::AllReduce if state.accumulated.contains(&true) => {
                "gradients add up under no_sync: make the optimizer before, or after the next synchronised backward"
            }
            Reduction::AllReduce => return Ok(()),
        };
        Err(Error::invalid("ddp", reason))
    }

    /// From now on, a backward pass leaves each rank with the mean of its part of each bucket, and the buckets stay as
    /// they are.
    pub(crate) fn shard(&self) -> Result<(Vec<Shard>, Arc<Staging>)> {
        self.check_shard()?;
        let mut state = self.lock();
        if let Rebuild::Due(order) = std::mem::replace(&mut state.rebuild, Rebuild::Done) {
            state.rebuild_buckets(&order, self.group.world_size())?;
        }
        let reduction = ShardReduction::new(&state.buckets, &self.group)?;
        let shards = reduction.shards();
        state.reduction = Reduction::Shard(reduction);
        Ok(shards)
    }

    /// Gradients are all-reduced again.
    pub(crate) fn unshard(&self) {
        self.lock().reduction = Reduction::AllReduce;
    }

    /// What the shards hold.
    pub(crate) fn pending(&self) -> Result<PendingGradients> {
        self.with_shards(|reduction| reduction.pending().cloned())
    }

    /// Has the next user of the shards' gradients multiply them by `factor`.
    pub(crate) fn scale_pending(&self, factor: f64) -> Result<()> {
        self.with_shards(|reduction| reduction.pending().map(|pending| pending.scale *= factor))
    }

    /// The shards' gradients were used.
    pub(crate) fn clear_pending(&self) -> Result<()> {
        self.with_shards(|reduction| {
            reduction.clear_pending();
            Ok(())
        })
    }

    fn with_shards<T>(&self, work: impl FnOnce(&mut ShardReduction) -> Result<T>) -> Result<T> {
        match &mut self.lock().reduction {
            Reduction::Shard(reduction) => work(reduction),
            _ => Err(Error::invalid("ddp", "its gradients are not sharded")),
        }
    }

    /// From now on, what happens to the buckets is written down.
    pub(super) fn set_trace(&self, trace: Trace) {
        // It is set once, at construction.
        let _ = self.trace.set(trace);
    }

    pub(super) fn trace(&self) -> Option<&Trace> {
        self.trace.get()
    }

    /// The names of the parameters in each bucket, in the order in which they are sent.
    pub(super) fn bucket_names(&self) -> Vec<Vec<String>> {
        let state = self.lock();
        let name = |index: &usize| state.parameters[*index].name.clone();
        state.buckets.iter().map(|bucket| bucket.members.iter().map(name).collect()).collect()
    }

    /// Opens a backward pass.
    pub(super) fn prepare_for_backward(&self, synchronise: bool) -> Result<()> {
        let mut state = self.lock();
        if let Rebuild::Due(order) = &state.rebuild {
            let order = order.clone();
            state.rebuild_buckets(&order, self.group.world_size())?;
            state.rebuild = Rebuild::Done;
        }
        state.buckets.iter_mut().for_each(Bucket::reset);
        state.reduction.begin();
        state.begun = true;
        state.next = 0;
        state.phase = if synchronise { Phase::Synchronised } else { Phase::Local };
        if synchronise && matches!(state.rebuild, Rebuild::Recording) {
            state.rebuild = Rebuild::Recorded(Vec::new());
        }
        Ok(())
    }

    /// Takes a gradient from a hook.
    pub(super) fn autograd_hook(&self, index: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let mut state = self.lock();
        if state.phase == Phase::Outside {
            let parameter = state.parameters.get(index).map_or_else(String::new, |parameter| parameter.name.clone());
            let reached = format!("parameter {parameter}, whose gradient would not be averaged over the ranks");
            return Err(Error::BackwardOutside { wrapper: "DistributedDataParallel", reached }.into());
        }
        Ok(self.mark_parameter_ready(&mut state, index, gradient)?)
    }

    /// Takes the gradient of a parameter without a hook.
    pub(super) fn gradient(&self, index: usize, gradient: &Tensor) -> Result<()> {
        self.mark_parameter_ready(&mut self.lock(), index, gradient)
    }

    fn mark_parameter_ready(&self, state: &mut State, index: usize, gradient: &Tensor) -> Result<()> {
        let (bucket, slot) = state.slot_of[index];
        let parameter = &state.parameters[index];
        if gradient.shape() != &parameter.shape || gradient.dtype() != parameter.arrives_as {
            let expected = crate::error::describe(parameter.arrives_as, &parameter.shape);
            let got = crate::error::describe(gradient.dtype(), gradient.shape());
            return Err(Error::parameter(&parameter.name, format!("its gradient is {got} where {expected} belongs")));
        }
        let synchronised = state.phase == Phase::Synchronised;
        let scale = if synchronised { state.reduction.scale(self.group.world_size()) } else { 1.0 };
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

    /// Sends off every bucket whose turn has come. Strictly in order, so that all ranks agree.
    fn launch_full_buckets(&self, state: &mut State) -> Result<()> {
        while state.buckets.get(state.next).is_some_and(|bucket| bucket.missing == 0) {
            self.launch(state, None)?;
        }
        Ok(())
    }

    /// Sends off the next bucket in line. `used`: which members this rank used, where it missed any.
    fn launch(&self, state: &mut State, used: Option<&[bool]>) -> Result<()> {
        let number = state.next;
        if let Some(trace) = self.trace() {
            trace.instant(Row::Communication, format_args!("bucket {number} ready"), Instant::now());
        }
        let (reduction, bucket) = (&mut state.reduction, &mut state.buckets[number]);
        bucket.label.during(|| reduction.launch(number, bucket, used, &self.group, self.trace()))?;
        state.next += 1;
        Ok(())
    }

    /// Ends a backward pass that failed: what was collected is forgotten.
    pub(super) fn cancel(&self) {
        let mut state = self.lock();
        state.phase = Phase::Outside;
        state.accumulated.fill(false);
        state.buckets.iter_mut().for_each(Bucket::reset);
        if let Rebuild::Recorded(_) = state.rebuild {
            state.rebuild = Rebuild::Recording;
        }
    }

    /// Closes a backward pass: launches what is left, waits for everything, and returns each parameter's gradient in
    /// registration order.
    pub(super) fn finalize_backward(&self) -> Result<Vec<Gradient>> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.phase == Phase::Local {
            state.phase = Phase::Outside;
            state.buckets.iter_mut().try_for_each(Bucket::flush)?;
            let gradients = state.gradients()?;
            let accumulated = |(gradient, accumulated)| if accumulated { gradient } else { Gradient::Absent };
            return Ok(gradients.into_iter().zip(state.accumulated.iter().copied()).map(accumulated).collect());
        }
        let mut used = vec![true; state.parameters.len()];
        while state.next < state.buckets.len() {
            self.complete(state, &mut used)?;
            self.launch_full_buckets(state)?;
        }
        state.reduction.finish(&state.buckets, &used, &self.group, self.trace())?;
        state.phase = Phase::Outside;
        state.accumulated.fill(false);
        self.agree_on_order(state)?;
        for (index, used) in used.iter_mut().enumerate() {
            // Only a rank that did not contribute has to ask.
            *used = *used || state.anybody_used(index)?;
        }
        if !std::mem::replace(&mut state.trained, true) && self.group.rank() == 0 {
            state.warn_of_unused(&used);
        }
        if let Reduction::Shard(reduction) = &mut state.reduction {
            reduction.set_pending(used);
            return Ok(state.slot_of.iter().map(|_| Gradient::Absent).collect());
        }
        let present = |(gradient, used)| if used { gradient } else { Gradient::Absent };
        Ok(state.gradients()?.into_iter().zip(used).map(present).collect())
    }

    /// Fills up the next bucket, of which not all gradients have come, and sends it off.
    fn complete(&self, state: &mut State, used: &mut [bool]) -> Result<()> {
        let scale = state.reduction.scale(self.group.world_size());
        let bucket = &mut state.buckets[state.next];
        bucket.flush()?;
        for (slot, &index) in bucket.members.iter().enumerate() {
            if bucket.arrived[slot] {
                continue;
            }
            let gradient = &bucket.gradients[slot];
            if state.accumulated[index] {
                // Not used in this pass, but in one under `no_sync`, which did not divide.
                copy::scale(gradient, scale)?;
            } else {
                gradient.zero_set()?;
                used[index] = false;
            }
        }
        let members_used: Vec<bool> = bucket.members.iter().map(|index| used[*index]).collect();
        self.launch(state, Some(&members_used))
    }

    /// After the first synchronised backward pass, all ranks take over the order in which rank 0's gradients came.
    fn agree_on_order(&self, state: &mut State) -> Result<()> {
        let Rebuild::Recorded(arrived) = &mut state.rebuild else { return Ok(()) };
        let mut order = std::mem::take(arrived);
        let mut seen = vec![false; state.parameters.len()];
        order.iter().for_each(|index| seen[*index] = true);
        // Those that did not come keep the order in which they were expected.
        order.extend((0..state.parameters.len()).rev().filter(|index| !seen[*index]));
        let order: Vec<u32> = order.into_iter().map(|index| index as u32).collect();
        let tensor = Tensor::new(order, self.group.device())?;
        Label::DDP_ORDER.during(|| self.group.broadcast(&tensor, 0))?;
        let order = permutation(&tensor.to_vec1::<u32>()?, state.parameters.len()).ok_or_else(|| Error::RankFailed {
            rank: 0,
            reason: format!(
                "what it sent is no order of {} parameters: all ranks of a group must make the same calls in the same \
                 order",
                state.parameters.len()
            ),
        })?;
        let unchanged = order.iter().eq(state.buckets.iter().flat_map(|bucket| &bucket.members));
        state.rebuild = if unchanged { Rebuild::Done } else { Rebuild::Due(order) };
        Ok(())
    }
}

/// `order`, if each of `count` indices is in it once.
fn permutation(order: &[u32], count: usize) -> Option<Vec<usize>> {
    let mut missing = vec![true; count];
    let order = order.iter().map(|index| {
        let index = *index as usize;
        std::mem::take(missing.get_mut(index)?).then_some(index)
    });
    order.collect::<Option<Vec<usize>>>().filter(|order| order.len() == count)
}

impl State {
    /// Makes the buckets for gradients that come in `order`.
    fn rebuild_buckets(&mut self, order: &[usize], world_size: usize) -> Result<()> {
        // The old storage goes first, unless gradients of the last backward pass still hold on to it.
        self.buckets.clear();
        let plan = bucket::plan(&self.parameters, order, self.caps);
        let bucket = |members| Bucket::new(&self.parameters, members, world_size);
        self.buckets = plan.into_iter().map(bucket).collect::<Result<_>>()?;
        self.reduction.set_buckets(&self.buckets, &self.parameters)?;
        self.slot_of = vec![(0, 0); self.parameters.len()];
        for (number, bucket) in self.buckets.iter().enumerate() {
            for (slot, &index) in bucket.members.iter().enumerate() {
                self.slot_of[index] = (number, slot);
            }
        }
        Ok(())
    }

    /// What is in the buckets for each parameter, in registration order.
    fn gradients(&self) -> Result<Vec<Gradient>> {
        let converted = self.buckets.iter().map(|bucket| bucket.converted(&self.parameters));
        let converted = converted.collect::<Result<Vec<_>>>()?;
        let gradient = |&(bucket, slot): &(usize, usize)| Gradient::Present(Tensor::clone(&converted[bucket][slot]));
        Ok(self.slot_of.iter().map(gradient).collect())
    }

    /// Says once which parameters no rank used: hardly ever is that meant.
    fn warn_of_unused(&self, used: &[bool]) {
        if matches!(&self.reduction, Reduction::Hook(reduction) if reduction.is_local()) {
            return; // Nobody knows what the others used.
        }
        let names = self.parameters.iter().map(|parameter| parameter.name.as_str());
        if let Some(warning) = usage::unused(names, used) {
            log::warn!("{warning}");
        }
    }

    /// Whether any rank used a parameter that this one did not.
    fn anybody_used(&self, index: usize) -> Result<bool> {
        let (bucket, slot) = self.slot_of[index];
        self.reduction.anybody_used(index, &self.buckets[bucket], slot)
    }
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
