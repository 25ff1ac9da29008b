//! What a reducer knows: its buckets, and how far the backward pass has come.
use crate::Result;
use crate::ddp::bucket::{self, Bucket, BucketCaps, ParameterInfo};
use crate::ddp::reduction::Reduction;
use crate::ddp::usage;
use candle_core::Tensor;

#[derive(Default)]
pub(super) struct State {
    pub(super) caps: BucketCaps,
    pub(super) parameters: Vec<ParameterInfo>,
    pub(super) buckets: Vec<Bucket>,
    /// For each parameter, its bucket and its place among that bucket's members.
    pub(super) slot_of: Vec<(usize, usize)>,
    pub(super) phase: Phase,
    /// Whether there was a backward pass.
    pub(super) begun: bool,
    /// Whether the first synchronised backward pass is over.
    pub(super) trained: bool,
    /// How buckets are sent.
    pub(super) reduction: Reduction,
    /// The next bucket in line to be sent.
    pub(super) next: usize,
    /// Whether the buckets of all models before this one have been sent.
    pub(super) is_open: bool,
    /// Whether a parameter's slice holds a gradient from a backward pass under `no_sync`, not yet divided.
    pub(super) accumulated: Vec<bool>,
    /// Which parameters this rank used, once candle's backward pass is over.
    pub(super) used: Vec<bool>,
    pub(super) rebuild: Rebuild,
}

#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum Phase {
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
pub(super) enum Rebuild {
    /// The order so far.
    #[default]
    Recording,
    Recorded(Vec<usize>),
    /// Rank 0's order, to be used from the next backward pass on.
    Due(Vec<usize>),
    Done,
}

/// What became of one parameter's gradient.
pub(crate) enum Gradient {
    /// It is there: a view of its bucket.
    Present(Tensor),
    /// No rank has used the parameter.
    Absent,
}

impl State {
    /// Makes the buckets for gradients that come in `order`.
    pub(super) fn rebuild_buckets(&mut self, order: &[usize], world_size: usize) -> Result<()> {
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

    /// The same buckets in new memory: somebody holds the gradients in the old.
    pub(super) fn renew_buckets(&mut self, world_size: usize) -> Result<()> {
        for bucket in &mut self.buckets {
            *bucket = Bucket::new(&self.parameters, bucket.members.clone(), world_size)?;
        }
        self.reduction.set_buckets(&self.buckets, &self.parameters)
    }

    /// What is in the buckets for each parameter, in registration order.
    pub(super) fn gradients(&self) -> Result<Vec<Gradient>> {
        let converted = self.buckets.iter().map(|bucket| bucket.converted(&self.parameters));
        let converted = converted.collect::<Result<Vec<_>>>()?;
        let gradient = |&(bucket, slot): &(usize, usize)| Gradient::Present(Tensor::clone(&converted[bucket][slot]));
        Ok(self.slot_of.iter().map(gradient).collect())
    }

    /// Says once which parameters no rank used: hardly ever is that meant.
    pub(super) fn warn_of_unused(&self, used: &[bool]) {
        if matches!(&self.reduction, Reduction::Hook(reduction) if reduction.is_local()) {
            return; // Nobody knows what the others used.
        }
        let names = self.parameters.iter().map(|parameter| parameter.name.as_str());
        if let Some(warning) = usage::unused(names, used) {
            log::warn!("{warning}");
        }
    }

    /// Whether any rank used a parameter that this one did not.
    pub(super) fn anybody_used(&self, index: usize) -> Result<bool> {
        let (bucket, slot) = self.slot_of[index];
        self.reduction.anybody_used(index, &self.buckets[bucket], slot)
    }
}
