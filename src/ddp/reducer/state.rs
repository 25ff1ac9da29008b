//! The state of a reducer that outlives a backward pass: its buckets and what they hold.
use crate::ddp::bucket::{self, Bucket, BucketCaps, ParameterInfo};
use crate::ddp::reduction::Reduction;
use crate::ddp::usage::Usage;
use crate::{Error, Result};
use candle_core::Tensor;

#[derive(Default)]
pub(super) struct State {
    pub(super) caps: BucketCaps,
    /// Whether gradients that are not finite are an error.
    pub(super) nan_check: bool,
    pub(super) parameters: Vec<ParameterInfo>,
    pub(super) buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its index among that bucket's members.
    pub(super) slot_of: Vec<(usize, usize)>,
    /// Whether a backward pass has begun.
    pub(super) begun: bool,
    /// Whether the first synchronised backward pass is complete, and used what it should.
    pub(super) trained: bool,
    /// How buckets are reduced.
    pub(super) reduction: Reduction,
    /// Whether a parameter's slice holds a gradient from a backward pass under `no_sync`, not yet divided.
    pub(super) accumulated: Vec<bool>,
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

impl State {
    /// Creates the buckets for gradients that arrive in `order`.
    pub(super) fn rebuild_buckets(&mut self, order: &[usize], world_size: usize) -> Result<()> {
        // The old storage is freed first, unless gradients of the last backward pass still use it.
        self.buckets.clear();
        let plan = bucket::plan(&self.parameters, order, self.caps);
        let bucket = |(number, members)| Bucket::new(&self.parameters, number, members, world_size);
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
    pub(super) fn renew_buckets(&mut self, world_size: usize) -> Result<()> {
        let renewed = self.buckets.iter_mut().enumerate().try_for_each(|(number, bucket)| {
            *bucket = Bucket::new(&self.parameters, number, bucket.members.clone(), world_size)?;
            Ok(())
        });
        // Also if memory for some of them was missing.
        self.reduction.set_buckets(&self.buckets, &self.parameters)?;
        renewed
    }

    /// The contents of the buckets for each of the `present` parameters, in registration order.
    pub(super) fn gradients(&self, present: &[bool]) -> Result<Vec<Gradient>> {
        let converted = self.buckets.iter().map(|bucket| bucket.converted(&self.parameters));
        let converted = converted.collect::<Result<Vec<_>>>()?;
        let gradient = |(&(bucket, slot), present): (&(usize, usize), &bool)| match present {
            true => Gradient::Present(converted[bucket][slot].clone()),
            false => Gradient::Absent,
        };
        Ok(self.slot_of.iter().zip(present).map(gradient).collect())
    }

    /// Returns an error if a gradient in the bucket `number` of this rank is not finite.
    pub(super) fn check_finite(&self, number: usize, rank: usize) -> Result<()> {
        let Some((parameter, value)) = self.buckets[number].first_not_finite()? else { return Ok(()) };
        let reason = format!(
            "its gradient on rank {rank} has {value} in it (DdpOptions.nan_check): look at the inputs and the loss of that \
             rank, or lower the learning rate"
        );
        Err(Error::parameter(&self.parameters[parameter].name, reason))
    }

    /// Returns an error if no rank `used` a parameter that the options want to be used.
    pub(super) fn check_used(&self, used: &[bool]) -> Result<()> {
        if matches!(&self.reduction, Reduction::Hook(reduction) if reduction.is_local()) {
            return Ok(()); // Ranks do not know what the others used.
        }
        let unused = self.parameters.iter().zip(used).filter(|(own, used)| !**used && !own.may_be_unused);
        let unused: Vec<String> = unused.map(|(parameter, _)| parameter.name.clone()).collect();
        match unused.is_empty() {
            true => Ok(()),
            false => Err(Error::UnusedParameters { rank: None, unused, total: self.parameters.len() }),
        }
    }

    /// Whether any rank used a parameter that this one did not. `usage` is what the reduction has sent about that.
    pub(super) fn anybody_used(&self, usage: Option<&Usage>, index: usize) -> Result<bool> {
        match (&self.reduction, usage) {
            (Reduction::AllReduce, _) => {
                let (bucket, slot) = self.slot_of[index];
                self.buckets[bucket].anybody_used(slot)
            }
            (_, usage) => usage.map_or(Ok(false), |usage| usage.anybody_used(index)),
        }
    }
}
