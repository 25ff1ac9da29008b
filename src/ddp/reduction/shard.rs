//! Reduction under ZeRO: each rank gets only the mean of its own part of each bucket, whose memory is then free for another one.
use super::tree::TreeReduction;
use crate::backend::{Collective, Label, Work};
use crate::ddp::buckets::bucket::{Bucket, Message};
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::plan::ParameterInfo;
use crate::ddp::buckets::usage::Usage;
use crate::ddp::watch::non_finite::Finding;
use crate::kernels::Assignment;
use crate::panic::lock;
use crate::placement::Cut;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::finite::{any_non_finite, non_finite};
use crate::trace::{self, Trace};
use crate::{Error, ReduceOp, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A rank's view of one bucket, which is cut into as many equal parts as there are ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// This rank's part: after a backward pass, the mean over the ranks.
    pub(crate) own: Tensor,
    /// The parameters in the bucket, by their numbers in registration order.
    pub(crate) parameters: Vec<usize>,
    pub(crate) cut: Cut,
}

impl Shard {
    /// The shard of a bucket that has memory. It is a part of that memory if `keeps_bucket`.
    pub(in crate::ddp) fn new(bucket: &Bucket, group: &ProcessGroup, keeps_bucket: bool) -> Result<Self> {
        let (whole, cut) = (&bucket.sum.parts, bucket.cut.clone());
        let own = match keeps_bucket {
            true => whole.narrow(0, group.rank() * cut.part(), cut.part())?,
            false => Tensor::zeros(cut.part(), whole.dtype(), whole.device())?,
        };
        Ok(Self { own, parameters: bucket.members.clone(), cut })
    }

    /// This rank's part without what lies beyond the gradients.
    fn gradients(&self, rank: usize) -> Result<Tensor> {
        let part = self.cut.part();
        Ok(self.own.narrow(0, 0, self.cut.elements().saturating_sub(part * rank).min(part))?)
    }
}

/// Gradients that no optimizer has used yet.
#[derive(Clone, Debug)]
pub(crate) struct PendingGradients {
    /// For each parameter, in registration order, whether it has a gradient.
    pub(crate) present: Vec<bool>,
    /// The factor by which they are still to be multiplied.
    pub(crate) scale: f64,
}

/// Memory for whole buckets, which the buckets of a backward pass use in turn, and then the buckets of a step.
#[derive(Debug, Default)]
pub(crate) struct BucketMemory(Mutex<Vec<Tensor>>);

impl BucketMemory {
    /// Number of tensors kept for reuse.
    const KEPT: usize = 2;

    /// A flat tensor of at least so many elements.
    pub(crate) fn take(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut free = lock(&self.0);
        let fits = |storage: &Tensor| storage.dtype() == dtype && storage.elem_count() >= elements;
        // The smallest that is large enough; they are sorted by size, the largest first.
        if let Some(index) = free.iter().rposition(fits) {
            return Ok(free.remove(index));
        }
        // A larger one takes the place of one that is too small.
        free.pop();
        Ok(Tensor::zeros(elements, dtype, device)?)
    }

    pub(crate) fn give_back(&self, storage: Tensor) {
        let mut free = lock(&self.0);
        free.push(storage);
        free.sort_by_key(|storage| std::cmp::Reverse(storage.elem_count()));
        free.truncate(Self::KEPT);
    }
}

/// How long a rank waits for memory, where ranks might wait for each other.
const PATIENCE: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_micros(50);

/// Reduction of buckets under ZeRO.
pub(crate) struct ShardReduction {
    /// The ranks over which buckets are spread.
    within: ProcessGroup,
    /// The ranks that have the same parts of buckets, if there are several.
    across: Option<ProcessGroup>,
    shards: Vec<Shard>,
    memory: Arc<BucketMemory>,
    /// Under virtual ranks, gradients are added along its tree, and buckets keep their memory.
    tree: Option<TreeReduction>,
    /// The numbers of the buckets in flight.
    in_flight: VecDeque<(usize, Work)>,
    /// The sums of parts over the ranks `across`.
    adding_up: Vec<(usize, Work)>,
    /// Whether the pass ends a step. Otherwise its sums wait for the next pass's.
    is_last: bool,
    /// The divisor of the sums of earlier passes under `no_sync`, if the shards hold some.
    accumulated: Option<usize>,
    /// For messages, the purposes of the reduce-scatters under `no_sync`.
    labels: Vec<Label>,
    /// Whether waiting for a bucket has never been in vain.
    is_patient: bool,
    pending: Option<PendingGradients>,
    /// Earlier gradients, this rank's part of each bucket, to which the next pass adds its own.
    earlier: Option<(PendingGradients, Vec<Tensor>)>,
}

impl ShardReduction {
    pub(crate) fn new(groups: &Groups, tree: Option<TreeReduction>) -> Self {
        Self {
            within: groups.within().clone(),
            across: groups.across().cloned(),
            shards: Vec::new(),
            memory: Arc::default(),
            tree,
            in_flight: VecDeque::new(),
            adding_up: Vec::new(),
            is_last: true,
            accumulated: None,
            labels: Vec::new(),
            is_patient: true,
            pending: None,
            earlier: None,
        }
    }

    pub(crate) fn tree(&self) -> Option<&TreeReduction> {
        self.tree.as_ref()
    }

    pub(crate) fn tree_mut(&mut self) -> Option<&mut TreeReduction> {
        self.tree.as_mut()
    }

    /// Cuts new buckets, which have memory.
    pub(in crate::ddp) fn set_buckets(&mut self, buckets: &[Bucket]) -> Result<()> {
        let shard = |bucket| Shard::new(bucket, &self.within, self.tree.is_some());
        self.shards = buckets.iter().map(shard).collect::<Result<_>>()?;
        if self.tree.is_none() {
            let text = |bucket: &Bucket| bucket.label.text().unwrap_or_default();
            self.labels = buckets.iter().map(|bucket| Label::register(text(bucket) + " under no_sync")).collect();
        }
        Ok(())
    }

    /// The purpose of the collectives that reduce the bucket `number`.
    pub(in crate::ddp) fn label(&self, number: usize, bucket: &Bucket) -> Label {
        self.labels.get(number).filter(|_| !self.is_last).copied().unwrap_or(bucket.label)
    }

    pub(crate) fn shards(&self) -> (Vec<Shard>, Arc<BucketMemory>) {
        (self.shards.clone(), Arc::clone(&self.memory))
    }

    /// Whether an optimizer has the shards.
    pub(crate) fn has_optimizer(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// Begins a pass, which ends a step if it `is_last`.
    pub(crate) fn begin(&mut self, adds_up: bool, is_last: bool, divisor: usize) -> Result<()> {
        self.is_last = is_last;
        if let Some(earlier) = self.accumulated.filter(|earlier| *earlier != divisor) {
            // In a join, whose inputs have ended on some ranks.
            let factor = earlier as f64 / divisor as f64;
            self.shards.iter().try_for_each(|shard| copy::scale(&shard.own, factor))?;
        }
        let pending = self.pending.take();
        if !adds_up {
            self.earlier = None;
        } else if let Some(pending) = pending {
            // The pass is about to overwrite them.
            let parts = self.shards.iter().map(|shard| shard.own.copy()).collect::<candle_core::Result<_>>()?;
            self.earlier = Some((pending, parts));
        } else if self.earlier.is_none() {
            let reason = "the optimizer of a sharded model keeps the gradients, and has already used or dropped the earlier ones: begin with \
                          GradStore::default() after each step";
            return Err(Error::invalid("into", reason));
        }
        Ok(())
    }

    /// Call when a pass has succeeded.
    pub(crate) fn end(&mut self) {
        // After a pass without synchronisation, they wait for the next one.
        self.earlier.take_if(|_| self.pending.is_some());
    }

    /// Discards the gradients of a pass that has failed. Those to which they would have been added are as they were.
    pub(crate) fn discard(&mut self) {
        self.in_flight.clear();
        self.adding_up.clear();
        self.accumulated = None;
        self.tree.iter_mut().for_each(TreeReduction::discard);
        self.pending = self.earlier.take().and_then(|(earlier, parts)| {
            let mut parts = self.shards.iter().zip(&parts);
            parts.try_for_each(|(shard, part)| copy::copy(&shard.own, part)).ok().map(|()| earlier)
        });
    }

    pub(crate) fn launch(&mut self, number: usize, bucket: &Bucket, group: &ProcessGroup) -> Result<()> {
        if let Some(tree) = &mut self.tree {
            return tree.launch(number, bucket, group);
        }
        let (own, parts) = (&self.shards[number].own, &bucket.sum.parts);
        if self.accumulated.is_some() {
            // The sum over the ranks is then that over the passes, too.
            let here = parts.narrow(0, self.within.rank() * own.elem_count(), own.elem_count())?;
            copy::assign(&[Assignment { destination: &here, source: own, factor: 1., accumulate: true }])?;
        }
        let work = self.within.reduce_scatter_async(own, parts, ReduceOp::Sum)?;
        if let Some(across) = self.across.as_ref().filter(|across| self.is_last && across.starts_behind()) {
            // When this rank sees the end of its reduce-scatter depends on time, and ranks must not launch calls in an order that does.
            let sum = Collective::AllReduce { tensor: own.clone(), op: ReduceOp::Sum };
            self.adding_up.push((number, across.start_after(sum, &work)?));
        }
        self.in_flight.push_back((number, work));
        Ok(())
    }

    /// Gives the bucket `number` memory for its gradients, while one other bucket is in flight. It waits for those before, unless
    /// that could be forever: a rank that lacks gradients sends its buckets after the backward pass, in which it may wait for this
    /// rank's part in a collective of the graph.
    pub(crate) fn occupy(&mut self, buckets: &mut [Bucket], number: usize, trace: Option<&Trace>) -> Result<()> {
        while self.is_due() {
            self.receive(buckets, trace)?;
        }
        let bucket = &mut buckets[number];
        let storage = self.memory.take(bucket.length(), bucket.tensor.dtype(), bucket.tensor.device())?;
        bucket.occupy(storage)
    }

    /// Whether to receive the bucket that was sent first.
    fn is_due(&mut self) -> bool {
        let Some((number, work)) = self.in_flight.front() else { return false };
        if work.is_completed() {
            return true;
        }
        if self.in_flight.len() < 2 || !ProcessGroup::has_companions() {
            return self.in_flight.len() > 1;
        }
        // Another rank that does not use one of its parameters completes this bucket at its end, and before that it may wait for this rank
        // in a companion group.
        if self.is_patient && self.shards[*number].own.device().is_cpu() {
            let start = Instant::now();
            while !work.is_completed() && start.elapsed() < PATIENCE {
                std::thread::sleep(POLL);
            }
            self.is_patient = work.is_completed();
            return self.is_patient;
        }
        false
    }

    /// Waits for the bucket that was sent first, whose memory is then free.
    fn receive(&mut self, buckets: &mut [Bucket], trace: Option<&Trace>) -> Result<()> {
        let Some((number, work)) = self.in_flight.pop_front() else { return Ok(()) };
        work.wait()?;
        if let Some(trace) = trace {
            trace::collective(trace, &work, format_args!("reduce-scatter of bucket {number}"));
        }
        if let Some(storage) = buckets[number].vacate()? {
            self.memory.give_back(storage);
        }
        if let Some(across) = self.across.as_ref().filter(|across| self.is_last && !across.starts_behind()) {
            // All ranks receive the buckets in the same order.
            let own = &self.shards[number].own;
            let work = buckets[number].label.during(|| across.all_reduce_async(own, ReduceOp::Sum))?;
            self.adding_up.push((number, work));
        }
        Ok(())
    }

    /// Waits for all buckets that were sent.
    fn receive_all(&mut self, buckets: &mut [Bucket], trace: Option<&Trace>) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.receive(buckets, trace)?;
        }
        Ok(())
    }

    /// Ends a pass under `no_sync`: the shards hold the sums of this and earlier passes, divided by `divisor`.
    pub(crate) fn keep(&mut self, buckets: &mut [Bucket], divisor: usize, trace: Option<&Trace>) -> Result<()> {
        self.receive_all(buckets, trace)?;
        self.accumulated = Some(divisor);
        Ok(())
    }

    /// Returns which parameters any rank used.
    pub(crate) fn finish(
        &mut self,
        buckets: &mut [Bucket],
        used: &[bool],
        message: Message,
        groups: &Groups,
        trace: Option<&Trace>,
    ) -> Result<Usage> {
        let early = message.is_non_finite.is_none().then(|| self.send_usage(used, message, groups)).transpose()?;
        if let Some(tree) = &mut self.tree {
            match self.across {
                None => tree.add_up(buckets, groups, trace, |_, _| Ok(()))?,
                // The rank's part is larger than the one that it adds up.
                Some(_) => tree.gather(buckets, groups, trace)?,
            }
        }
        self.receive_all(buckets, trace)?;
        self.accumulated = None;
        for (number, work) in self.adding_up.drain(..) {
            work.wait()?;
            if let Some(trace) = trace {
                trace::collective(trace, &work, format_args!("all-reduce of the part of bucket {number}"));
            }
        }
        if let Some((earlier, parts)) = &mut self.earlier {
            let scale = std::mem::replace(&mut earlier.scale, 1.);
            parts.iter().try_for_each(|part| copy::scale(part, scale))?;
            let add = |(shard, part)| {
                let Shard { own: destination, .. }: &Shard = shard;
                Assignment { destination, source: part, factor: 1., accumulate: true }
            };
            copy::assign(&self.shards.iter().zip(parts.iter()).map(add).collect::<Vec<_>>())?;
        }
        let usage = match (early, message.is_non_finite) {
            (Some(usage), _) => usage,
            // Each rank sees its own part of the gradients.
            (None, own) => {
                let parts = self.shards.iter().map(|shard| shard.gradients(self.within.rank()));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                let is_non_finite = Some(own == Some(true) || any_non_finite(&parts.iter().collect::<Vec<_>>())?);
                self.send_usage(used, Message { is_non_finite, ..message }, groups)?
            }
        };
        usage.wait()?;
        Ok(usage)
    }

    fn send_usage(&mut self, used: &[bool], message: Message, groups: &Groups) -> Result<Usage> {
        match &mut self.tree {
            Some(tree) => tree.send_usage(used, message, groups),
            None => Usage::send(used, message, groups.main()),
        }
    }

    /// The first parameter whose gradient is not finite in this rank's part.
    pub(crate) fn first_not_finite(&self, parameters: &[ParameterInfo]) -> Result<Option<Finding>> {
        for Shard { own, parameters: numbers, cut } in &self.shards {
            for (place, parameter) in numbers.iter().enumerate() {
                if let Some(value) = non_finite(&cut.piece(own, place, self.within.rank())?)? {
                    return Ok(Some((parameters[*parameter].name.clone(), value)));
                }
            }
        }
        Ok(None)
    }

    /// Records that the shards hold the gradients of the `present` parameters, to be multiplied by `scale`.
    pub(crate) fn set_pending(&mut self, mut present: Vec<bool>, scale: f64) {
        if let Some((earlier, _)) = &self.earlier {
            present.iter_mut().zip(&earlier.present).for_each(|(now, earlier)| *now |= earlier);
        }
        self.pending = Some(PendingGradients { present, scale });
    }

    /// Drops the gradients, so that the optimizer uses none.
    pub(crate) fn leave_out(&mut self, parameters: usize) {
        self.earlier = None;
        self.pending = Some(PendingGradients { present: vec![false; parameters], scale: 1. });
    }

    pub(crate) fn pending(&mut self) -> Result<&mut PendingGradients> {
        let reason = "there are no new gradients: call ddp.backward(&loss), outside of no_sync, once before each step";
        self.pending.as_mut().ok_or_else(|| Error::invalid("gradients", reason))
    }

    pub(crate) fn clear_pending(&mut self) {
        self.pending = None;
    }
}
