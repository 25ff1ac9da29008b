//! The state of a reducer that outlives a backward pass: its buckets and what they hold.
use crate::ddp::buckets::bucket::{Bucket, Message};
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::plan::{self, BucketCaps, ParameterInfo};
use crate::ddp::buckets::usage::Usage;
use crate::ddp::reduction::Reduction;
use crate::ddp::watch::non_finite::{Finding, Findings, OnNonFinite};
use crate::tensor::finite::{any_non_finite, non_finite};
use crate::trace::Trace;
use crate::{Error, Result};
use candle_core::Tensor;

#[derive(Default)]
pub(super) struct State {
    pub(super) caps: BucketCaps,
    pub(super) policy: OnNonFinite,
    pub(super) parameters: Vec<ParameterInfo>,
    pub(super) buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its index among that bucket's members.
    pub(super) slot_of: Vec<(usize, usize)>,
    /// Whether a backward pass has begun.
    pub(super) begun: bool,
    /// Whether the first synchronised backward pass is complete and used all required parameters.
    pub(super) trained: bool,
    /// How buckets are reduced.
    pub(super) reduction: Reduction,
    /// Whether this rank has a gradient of the parameter from passes under `no_sync`: in its slice, not yet divided, or under sharding in
    /// the shards.
    pub(super) accumulated: Vec<bool>,
    /// The sum of the counts of those passes, if they were weighted.
    pub(super) accumulated_count: Option<f64>,
    /// The first gradient of those passes that was not finite, as far as this rank has looked before it was sent.
    pub(super) accumulated_finding: Option<Finding>,
    /// Under virtual ranks, how many micro-batches of the step this rank has computed. What they used has accumulated.
    pub(super) computed: usize,
    pub(super) rebuild: Rebuild,
}

/// The state of rebuilding the buckets in the order of the gradients in the first synchronised backward pass.
#[derive(Default)]
pub(super) enum Rebuild {
    /// No synchronised backward pass has shown the order yet.
    #[default]
    ToCome,
    /// Rank 0's order, to be used from the next backward pass on.
    Due(Vec<usize>),
    Done,
}

/// The result for one parameter's gradient.
pub(crate) enum Gradient {
    /// A view of its bucket.
    Present(Tensor),
    /// No rank has used the parameter.
    Absent,
}

impl Gradient {
    pub(super) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Present(tensor) => Some(tensor),
            Self::Absent => None,
        }
    }
}

impl State {
    /// Creates the buckets for gradients that arrive in `order`.
    pub(super) fn rebuild_buckets(&mut self, order: &[usize], groups: &Groups) -> Result<()> {
        // The old storage is freed first, unless gradients of the last backward pass still use it.
        self.buckets.clear();
        let plan = plan::plan(&self.parameters, order, self.caps);
        let bucket = |(number, members)| Bucket::new(&self.parameters, number, members, groups);
        self.buckets = plan.into_iter().enumerate().map(bucket).collect::<Result<_>>()?;
        self.reduction.set_buckets(&self.buckets, &self.parameters)?;
        self.slot_of = vec![(0, 0); self.parameters.len()];
        for (number, bucket) in self.buckets.iter().enumerate() {
            for (slot, &index) in bucket.members.iter().enumerate() {
                self.slot_of[index] = (number, slot);
            }
        }
        Ok(())
    }

    /// Gives the same buckets new memory, because the program still holds the gradients in the old one.
    pub(super) fn renew_buckets(&mut self, groups: &Groups) -> Result<()> {
        let renewed = self.buckets.iter_mut().enumerate().try_for_each(|(number, bucket)| {
            let mut renewed = Bucket::new(&self.parameters, number, bucket.members.clone(), groups)?;
            // The program holds nothing but the first sum.
            renewed.stack = std::mem::take(&mut bucket.stack);
            *bucket = renewed;
            Ok(())
        });
        // Also if memory for some of them was missing.
        self.reduction.set_buckets(&self.buckets, &self.parameters)?;
        renewed
    }

    /// Gives the bucket `number` memory, if it has none.
    pub(super) fn make_place(&mut self, number: usize, trace: Option<&Trace>) -> Result<()> {
        match &mut self.reduction {
            Reduction::Shard(shard) if self.buckets[number].is_vacant() => {
                shard.occupy(&mut self.buckets, number, trace)
            }
            _ => Ok(()),
        }
    }

    /// Frees the memory of buckets whose shards have their own.
    pub(super) fn free_buckets(&mut self) {
        if self.reduction.adds_up_parts() {
            // If one could not be freed, it would be used again.
            self.buckets.iter_mut().for_each(|bucket| drop(bucket.vacate()));
        }
    }

    /// The contents of the buckets times `factor` for each of the `present` parameters, in registration order.
    pub(super) fn gradients(&self, present: &[bool], factor: f64) -> Result<Vec<Gradient>> {
        let converted = self.buckets.iter().map(|bucket| bucket.converted(&self.parameters, factor));
        let converted = converted.collect::<Result<Vec<_>>>()?;
        let gradient = |(&(bucket, slot), present): (&(usize, usize), &bool)| match present {
            true => Gradient::Present(converted[bucket][slot].clone()),
            false => Gradient::Absent,
        };
        Ok(self.slot_of.iter().zip(present).map(gradient).collect())
    }

    /// Looks at this rank's gradients in the bucket `number`, which is about to be sent. A communication hook gets zeros instead of
    /// gradients that are not finite, which it might keep and add to those of later passes.
    pub(super) fn look_before(&self, number: usize, rank: usize, findings: &mut Findings) -> Result<()> {
        let (bucket, is_hook) = (&self.buckets[number], matches!(self.reduction, Reduction::Hook(_)));
        if !is_hook && (!findings.looks_before || findings.own.is_some()) {
            return Ok(());
        }
        let sums = self.virtual_ranks().map_or(1, |ranks| ranks.subtrees(rank).len());
        let found = (0..sums).find_map(|depth| bucket.first_not_finite(depth).transpose()).transpose()?;
        let Some((parameter, value)) = found else { return Ok(()) };
        findings.own.get_or_insert_with(|| (self.parameters[parameter].name.clone(), value));
        if is_hook {
            bucket.sum.flat.zero_set()?;
        }
        Ok(())
    }

    /// Looks at the averaged `gradients`, unless the ranks have told each other already.
    pub(super) fn look(&self, gradients: &[Gradient], findings: &mut Findings) -> Result<()> {
        let is_told = matches!(self.reduction, Reduction::Hook(_)) && !self.is_local();
        if is_told && !findings.is_agreed {
            return Ok(());
        }
        if !any_non_finite(&gradients.iter().filter_map(Gradient::tensor).collect::<Vec<_>>())? {
            return Ok(());
        }
        findings.is_agreed = true;
        for index in self.buckets.iter().flat_map(|bucket| &bucket.members) {
            if let Some(value) = gradients[*index].tensor().map_or(Ok(None), non_finite)? {
                findings.averaged = Some((self.parameters[*index].name.clone(), value));
                break;
            }
        }
        Ok(())
    }

    /// Returns an error if no rank `used` a parameter that the options do not allow to be unused.
    pub(super) fn check_used(&self, used: &[bool]) -> Result<()> {
        if self.is_local() {
            return Ok(()); // Ranks do not know what the others used.
        }
        let unused = self.parameters.iter().zip(used).filter(|(own, used)| !**used && !own.may_be_unused);
        let unused: Vec<String> = unused.map(|(parameter, _)| parameter.name.clone()).collect();
        match unused.is_empty() {
            true => Ok(()),
            false => Err(Error::UnusedParameters { rank: None, unused, total: self.parameters.len() }),
        }
    }

    /// Whether a gradient is on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.parameters.iter().any(|parameter| parameter.device.is_cuda())
    }

    /// Whether a communication hook leaves each rank alone.
    pub(super) fn is_local(&self) -> bool {
        matches!(&self.reduction, Reduction::Hook(reduction) if reduction.is_local())
    }

    /// This rank's `count` in a weighted pass, with what has accumulated.
    pub(super) fn own_count(&self, count: Option<f64>) -> Option<f64> {
        count.map(|count| count + self.accumulated_count.unwrap_or(0.))
    }

    /// Forgets what has accumulated under `no_sync`.
    pub(super) fn clear_accumulated(&mut self) {
        self.accumulated.fill(false);
        self.accumulated_count = None;
        self.accumulated_finding = None;
        self.computed = 0;
    }

    /// Returns an error if gradients have accumulated that a pass which is weighted, or not, cannot add to.
    pub(super) fn check_accumulated(&self, weighted: bool) -> Result<()> {
        if !self.accumulated.contains(&true) || self.accumulated_count.is_some() == weighted {
            return Ok(());
        }
        let (now, before) = match weighted {
            true => ("with", "without"),
            false => ("without", "with"),
        };
        let reason = format!(
            "a pass {now} a count cannot add to gradients that passes {before} a count have accumulated under no_sync: give a \
             count for all micro-batches of a step or for none, or call zero_grad() to drop the earlier gradients"
        );
        Err(Error::invalid("models", reason))
    }

    /// The count of all ranks in a weighted pass, in which `own` is this rank's.
    pub(super) fn total_count(&self, usage: Option<&Usage>, own: f64) -> Result<f64> {
        match (&self.reduction, usage) {
            (Reduction::AllReduce, _) => self.buckets.first().map_or(Ok(own), Bucket::total_count),
            (_, Some(usage)) => usage.total_count(),
            // A local hook sends nothing.
            (_, None) => Ok(own),
        }
    }

    /// Above zero if any rank was asked to stop; None if nothing was sent.
    pub(super) fn stop_flag(&self, usage: Option<&Usage>) -> Result<Option<Tensor>> {
        match (&self.reduction, usage) {
            (Reduction::AllReduce, _) => self.buckets.first().map(Bucket::stop_flag).transpose(),
            (_, usage) => usage.map(Usage::stop_flag).transpose(),
        }
    }

    /// Whether a rank has found a number that is not finite, of those that not all ranks can see.
    pub(super) fn non_finite_flag(&self, usage: Option<&Usage>, own: Message) -> Result<bool> {
        match (&self.reduction, usage) {
            (Reduction::AllReduce, _) => self.buckets.first().map_or(Ok(false), Bucket::non_finite_flag),
            (_, Some(usage)) => usage.non_finite_flag(),
            (_, None) => Ok(own.is_non_finite == Some(true)),
        }
    }

    /// Adds to the parameters that this rank `used` those that another one did. Only a rank that did not use all must read the flags, once
    /// per bucket. `usage` is the reduction's own exchange, if the buckets carry no flags.
    pub(super) fn add_used(&self, usage: Option<&Usage>, used: &mut [bool]) -> Result<()> {
        if !used.contains(&false) {
            return Ok(());
        }
        if matches!(self.reduction, Reduction::AllReduce) {
            for bucket in &self.buckets {
                if bucket.members.iter().any(|index| !used[*index]) {
                    let flags = bucket.used()?;
                    bucket.members.iter().zip(flags).for_each(|(index, flag)| used[*index] |= flag);
                }
            }
        } else if let Some(usage) = usage {
            used.iter_mut().zip(usage.used()?).for_each(|(used, flag)| *used |= flag);
        }
        Ok(())
    }
}
