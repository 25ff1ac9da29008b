//! The state machine between candle's backward pass and the communicator. See `src/ddp/README.md`.
pub(super) mod hook_state;
mod memory;
mod micro_batch;
pub(super) mod order;
mod parts;
mod state;
mod strategy;

pub(crate) use state::Gradient;

use crate::ddp::buckets::bucket::{Bucket, Message};
use crate::ddp::buckets::count;
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::plan::{BucketCaps, ParameterInfo};
use crate::ddp::buckets::sums::Write;
use crate::ddp::pass::graph::Identity;
use crate::ddp::reduction::Reduction;
use crate::ddp::watch::non_finite::{Finding, Findings, OnNonFinite};
use crate::panic::lock;
use crate::process_group::Active;
use crate::tensor::copy;
use crate::tensor::finite::judge;
use crate::trace::{Row, Trace, nvtx_mark};
use crate::virtual_ranks::Leaf;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use state::{Rebuild, State};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// Collects gradients in buckets and sends each bucket once it is full and all earlier ones have been sent.
pub(crate) struct Reducer {
    identity: Arc<Identity>,
    groups: Groups,
    state: Mutex<State>,
    /// The backward pass that is running. It is locked before the state.
    part: Mutex<Option<Part>>,
    trace: OnceLock<Arc<Trace>>,
}

/// A reducer's part of the running backward pass.
pub(crate) struct Part {
    pub(crate) synchronises: bool,
    /// The search for gradients that are not finite.
    pub(crate) findings: Findings,
    pub(crate) adds_up: bool,
    /// Under virtual ranks, the place of this pass's micro-batch in the tree.
    pub(crate) leaf: Option<Leaf>,
    /// This rank's count, if the pass is weighted.
    pub(crate) count: Option<f64>,
    /// The count of all ranks with what has accumulated, known once all buckets are reduced.
    pub(crate) total: Option<f64>,
    /// Whether the program still holds the gradients of the last pass.
    pub(crate) is_held: bool,
    /// The ranks that have their own gradients.
    pub(crate) active: Active,
    /// The reducer whose buckets are sent after this one's.
    pub(crate) successor: Option<Arc<Reducer>>,
    /// Whether the buckets of all models before this one have been sent, and full ones need not wait for the end of the pass.
    pub(crate) is_open: bool,
    /// The next bucket to be sent.
    pub(crate) next: usize,
    /// The parameters whose gradients have arrived, in that order.
    pub(crate) arrived: Vec<usize>,
    /// Which parameters this rank used, known once candle's backward pass is over; at the end, which any rank used.
    pub(crate) used: Vec<bool>,
}

impl Reducer {
    pub(in crate::ddp) fn new(groups: Groups) -> Self {
        Self {
            identity: Arc::default(),
            groups,
            state: Mutex::default(),
            part: Mutex::default(),
            trace: OnceLock::new(),
        }
    }

    pub(crate) fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    fn world_size(&self) -> usize {
        self.groups.main().world_size()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Sets the parameters, in registration order, and how their gradients are reduced. Gradients are expected in the reverse order until the first backward
    /// pass has shown the actual one.
    pub(in crate::ddp) fn set_parameters(
        &self,
        parameters: Vec<ParameterInfo>,
        caps: BucketCaps,
        policy: OnNonFinite,
        reduction: Reduction,
    ) -> Result<()> {
        let mut state = self.lock();
        (state.caps, state.policy, state.reduction) = (caps, policy, reduction);
        state.accumulated = vec![false; parameters.len()];
        state.parameters = parameters;
        let order: Vec<usize> = (0..state.parameters.len()).rev().collect();
        if matches!(state.reduction, Reduction::Shard(_)) {
            // The optimizer's state is cut as the buckets are.
            state.rebuild = Rebuild::Done;
        }
        state.rebuild_buckets(&order, &self.groups)?;
        state.free_buckets();
        Ok(())
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

    /// Begins a backward pass, in which this model has the given part.
    pub(crate) fn begin(&self, part: Part) -> Result<()> {
        let mut running = lock(&self.part);
        if running.is_some() {
            let reason = "another backward pass of this model is running, in an operation of the graph or on another thread: \
                          run one after the other";
            return Err(Error::invalid("models", reason));
        }
        *running = Some(part);
        Ok(())
    }

    /// Call when the pass has begun in all models: makes the buckets ready for gradients.
    pub(crate) fn prepare_for_backward(&self) -> Result<()> {
        self.with_part(|part| {
            let mut state = self.lock();
            state.check_accumulated(part.count.is_some())?;
            state.begun = true;
            if self.trace().is_some() {
                self.groups.main().measure_spans()?;
            }
            if let Rebuild::Due(order) = &state.rebuild {
                let order = order.clone();
                state.rebuild_buckets(&order, &self.groups)?;
                state.rebuild = Rebuild::Done;
            } else if part.is_held
                && !matches!(state.reduction, Reduction::Shard(_))
                && !state.accumulated.contains(&true)
                && state.computed == 0
            {
                state.renew_buckets(&self.groups)?;
            }
            if let Some(leaf) = part.leaf {
                state.buckets.iter_mut().try_for_each(|bucket| bucket.make_room(leaf))?;
            }
            part.findings.own = state.accumulated_finding.take();
            state.reduction.begin(part.adds_up, part.synchronises, part.active.divisor())
        })
    }

    /// Ends a backward pass that has succeeded. The buckets keep what they hold.
    pub(crate) fn end(&self) {
        self.close().reduction.end();
    }

    /// Ends the backward pass, if one is running, and discards its gradients and those that have accumulated.
    pub(crate) fn discard(&self) {
        let mut state = self.close();
        state.clear_accumulated();
        state.reduction.discard();
        state.free_buckets();
    }

    /// Discards all gradients that no step has used.
    pub(crate) fn zero_grad(&self) {
        self.discard();
        // Without shards, there are none.
        let _ = self.clear_pending();
    }

    fn close(&self) -> MutexGuard<'_, State> {
        *lock(&self.part) = None;
        let mut state = self.lock();
        state.buckets.iter_mut().for_each(Bucket::reset);
        state
    }

    /// Whether a pass that is weighted, or not, may add to what has accumulated under `no_sync`.
    pub(crate) fn check_accumulated(&self, weighted: bool) -> Result<()> {
        self.lock().check_accumulated(weighted)
    }

    /// Runs `work` on this model's part in the backward pass.
    fn with_part<T>(&self, work: impl FnOnce(&mut Part) -> Result<T>) -> Result<T> {
        let reason = "its backward pass ended before all gradients had arrived: do not call zero_grad during a \
                      backward pass";
        work(lock(&self.part).as_mut().ok_or_else(|| Error::invalid("models", reason))?)
    }

    /// Call when all models before this one have sent their buckets: this one's may now be sent as they fill up.
    pub(crate) fn open(&self) -> Result<()> {
        self.advance(|part, state| {
            // In its first pass, a GPU loads kernels, for which the driver may wait for calls that wait for another rank.
            part.is_open = state.trained || self.world_size() == 1 || !state.is_on_gpu();
            self.launch_full_buckets(part, state)
        })
    }

    /// Takes a gradient from a hook.
    pub(crate) fn autograd_hook(&self, index: usize, gradient: &Tensor) -> candle_core::Result<()> {
        self.identity.has_gradient(&Tensor::zeros((), DType::U8, &Device::Cpu)?);
        if lock(&self.part).is_some() {
            return Ok(self.gradient(index, gradient)?);
        }
        if self.identity.is_frozen() {
            return Ok(());
        }
        let parameter = self.lock().parameters.get(index).map_or_else(String::new, |parameter| parameter.name.clone());
        let reached = format!("parameter {parameter}, whose gradient would not be averaged over the ranks");
        Err(Error::BackwardOutside { wrapper: "DistributedDataParallel", reached }.into())
    }

    /// Takes the gradient of a parameter.
    pub(crate) fn gradient(&self, index: usize, gradient: &Tensor) -> Result<()> {
        self.advance(|part, state| self.mark_parameter_ready(part, state, index, gradient))
    }

    /// Runs `work`, and lets the next model send its buckets once all of this one's have been sent.
    fn advance(&self, work: impl FnOnce(&mut Part, &mut State) -> Result<()>) -> Result<()> {
        let successor = self.with_part(|part| {
            let mut state = self.lock();
            work(part, &mut state)?;
            Ok(if part.next == state.buckets.len() { part.successor.take() } else { None })
        })?;
        successor.map_or(Ok(()), |next| next.open())
    }

    fn mark_parameter_ready(&self, part: &mut Part, state: &mut State, index: usize, gradient: &Tensor) -> Result<()> {
        let (bucket, slot) = state.slot_of[index];
        let parameter = &state.parameters[index];
        if gradient.shape() != &parameter.shape || gradient.dtype() != parameter.arrives_as {
            let expected = crate::error::describe(parameter.arrives_as, &parameter.shape);
            let got = crate::error::describe(gradient.dtype(), gradient.shape());
            return Err(Error::parameter(&parameter.name, format!("its gradient must be {expected}, not {got}")));
        }
        if state.buckets[bucket].arrived[slot] {
            let reason = "its gradient came twice in one backward pass, because an operation runs its own backward \
                          pass through this parameter: to recompute activations, use candle_ddp::nn::checkpoint";
            return Err(Error::parameter(&parameter.name, reason));
        }
        state.make_place(bucket, self.trace())?;
        let in_parts = state.reduction.adds_up_parts();
        let sends = state.reduction.sends(part.synchronises);
        let write = match part.leaf {
            Some(leaf) => state.buckets[bucket].write(leaf),
            None => {
                let factor = if sends { state.reduction.scale(part.active.divisor()) } else { 1.0 };
                Write { depth: 0, factor, accumulate: state.accumulated[index] && !in_parts }
            }
        };
        state.buckets[bucket].put(slot, gradient, write)?;
        if !sends {
            state.accumulated[index] = true;
            return Ok(());
        }
        part.arrived.push(index);
        self.launch_full_buckets(part, state)
    }

    /// Sends every full bucket whose turn has come, strictly in order, so that all ranks send in the same order.
    fn launch_full_buckets(&self, part: &mut Part, state: &mut State) -> Result<()> {
        while part.is_open && state.buckets.get(part.next).is_some_and(|bucket| bucket.missing == 0) {
            self.launch(part, state, None)?;
        }
        Ok(())
    }

    /// Sends the next bucket in line. `used` says which members this rank used, if it missed any.
    fn launch(&self, part: &mut Part, state: &mut State, used: Option<&[bool]>) -> Result<()> {
        let number = part.next;
        nvtx_mark(format_args!("bucket {number} ready"));
        if let Some(trace) = self.trace() {
            trace.instant(Row::Communication, format_args!("bucket {number} ready"), Instant::now());
        }
        if let Some(leaf) = part.leaf {
            state.buckets[number].merge(leaf)?;
        }
        if part.findings.looks {
            state.look_before(number, self.groups.main().rank(), &mut part.findings)?;
        }
        let message = self.message(part, state);
        let (reduction, bucket) = (&mut state.reduction, &mut state.buckets[number]);
        let group = self.groups.of(bucket.tensor.device());
        reduction.label(number, bucket).during(|| reduction.launch(number, bucket, used, message, group))?;
        part.next += 1;
        Ok(())
    }

    /// Call after candle's backward pass, when all models before this one have sent their buckets: sends the rest of
    /// this one's, then lets the next model send its own.
    pub(crate) fn launch_remaining(&self) -> Result<()> {
        self.advance(|part, state| {
            if !state.reduction.sends(part.synchronises) {
                return Ok(());
            }
            part.used = vec![true; state.parameters.len()];
            part.is_open = true;
            self.launch_full_buckets(part, state)?;
            while part.next < state.buckets.len() {
                self.complete(part, state)?;
                self.launch_full_buckets(part, state)?;
            }
            Ok(())
        })
    }

    /// Call when all buckets of the pass have been sent: waits for them and returns each parameter's gradient in
    /// registration order.
    pub(crate) fn finalize_backward(&self) -> Result<Vec<Gradient>> {
        self.with_part(|part| {
            let mut state = self.lock();
            if let (Some(tree), Some(count)) = (state.reduction.tree_mut(), part.count) {
                tree.add_count(count);
            }
            if let Some(leaf) = part.leaf
                && !part.synchronises
            {
                state.accumulated_count = state.own_count(part.count);
                return state.keep(leaf);
            }
            if !part.synchronises && state.reduction.adds_up_parts() {
                return state.keep_parts(part, self.trace());
            }
            if !part.synchronises {
                state.buckets.iter_mut().try_for_each(Bucket::flush)?;
                state.accumulated_count = state.own_count(part.count);
                return state.gradients(&state.accumulated, 1.);
            }
            let message = self.message(part, &state);
            let State { reduction, buckets, .. } = &mut *state;
            let usage = reduction.finish(buckets, &part.used, message, &self.groups, self.trace())?;
            state.clear_accumulated();
            if let Some(flag) = state.stop_flag(usage.as_ref())? {
                self.groups.main().carry_stop(flag);
            }
            let is_late = part.findings.may_be_late && matches!(state.reduction, Reduction::AllReduce);
            let is_flagged = part.findings.looks && !is_late && state.non_finite_flag(usage.as_ref(), message)?;
            part.total = message.count.map(|own| state.total_count(usage.as_ref(), own)).transpose()?;
            let factor = self.factor(part, &state);
            self.agree_on_order(part, &mut state)?;
            state.add_used(usage.as_ref(), &mut part.used)?;
            part.findings.is_agreed = is_flagged;
            let State { reduction, parameters, .. } = &mut *state;
            if let Reduction::Shard(reduction) = reduction {
                reduction.set_pending(part.used.clone(), factor);
                if is_flagged {
                    part.findings.averaged = reduction.first_not_finite(parameters)?;
                }
                return Ok(part.used.iter().map(|_| Gradient::Absent).collect());
            }
            let gradients = state.gradients(&part.used, factor)?;
            if is_late {
                part.findings.verdict = judge(&gradients.iter().filter_map(Gradient::tensor).collect::<Vec<_>>())?;
            }
            if part.findings.looks && part.findings.verdict.is_none() {
                state.look(&gradients, &mut part.findings)?;
            }
            Ok(gradients)
        })
    }

    /// This rank's message to the others.
    fn message(&self, part: &Part, state: &State) -> Message {
        let Findings { loss, own, .. } = &part.findings;
        // What a hook gets instead of its gradients is finite.
        let is_here = loss.is_some() || (own.is_some() && matches!(state.reduction, Reduction::Hook(_)));
        Message {
            is_stop_asked: self.groups.main().is_stop_asked(),
            is_non_finite: state.policy.is_on().then_some(is_here),
            count: state.own_count(part.count),
        }
    }

    /// The findings of the pass, once all buckets are reduced.
    pub(crate) fn findings(&self) -> Result<Findings> {
        self.with_part(|part| Ok(part.findings.clone()))
    }

    /// Some rank has a gradient of an ignored variable that is not finite, and this one has `own`.
    pub(crate) fn found_ignored(&self, own: Option<Finding>) -> Result<()> {
        self.with_part(|Part { findings, .. }| {
            (findings.is_agreed, findings.own) = (true, findings.own.take().or(own));
            Ok(())
        })
    }

    /// Drops what the pass has left to the optimizer of a sharded model, which then changes nothing.
    pub(crate) fn leave_out(&self) {
        let mut state = self.lock();
        let State { reduction, parameters, .. } = &mut *state;
        if let Reduction::Shard(reduction) = reduction {
            reduction.leave_out(parameters.len());
        }
    }

    /// The factor that makes the reduced gradients the mean over everything that was counted; 1 if nothing was.
    fn factor(&self, part: &Part, state: &State) -> f64 {
        match part.total {
            Some(total) if count::is_usable(total) => {
                state.reduction.divisor(part.active.divisor(), self.world_size()) as f64 / total
            }
            _ => 1.,
        }
    }

    /// Call after a synchronised backward pass. It is an error on all ranks if nothing was counted, and in the first pass
    /// a parameter that no rank used, unless the options allow it.
    pub(crate) fn check_result(&self) -> Result<()> {
        self.with_part(|part| {
            let mut state = self.lock();
            if let Some(total) = part.total.filter(|total| !count::is_usable(*total) && !state.is_local()) {
                return Err(Error::NothingCounted { total });
            }
            if !state.trained {
                state.check_used(&part.used)?;
                state.trained = true;
            }
            Ok(())
        })
    }

    /// Completes the next bucket, for which some gradients are missing, and sends it.
    fn complete(&self, part: &mut Part, state: &mut State) -> Result<()> {
        let scale = state.reduction.scale(part.active.divisor());
        let in_parts = state.reduction.adds_up_parts();
        state.make_place(part.next, self.trace())?;
        let bucket = &mut state.buckets[part.next];
        bucket.flush()?;
        for (slot, &index) in bucket.members.iter().enumerate() {
            if bucket.arrived[slot] {
                continue;
            }
            let gradient = &bucket.sum.gradients[slot];
            match (part.leaf, state.accumulated[index] && !in_parts) {
                (Some(leaf), _) => bucket.put_zeros(slot, leaf)?,
                // Not used in this pass, but accumulated under `no_sync`, where gradients are not divided.
                (None, true) => copy::scale(gradient, scale)?,
                (None, false) => gradient.zero_set()?,
            }
            part.used[index] = state.accumulated[index];
        }
        let members_used: Vec<bool> = bucket.members.iter().map(|index| part.used[*index]).collect();
        self.launch(part, state, Some(&members_used))
    }
}
