//! ZeRO-1's way of the buckets: each rank gets the mean of its part of each, and no more.
use super::bucket::Bucket;
use crate::backend::Work;
use crate::process_group::ProcessGroup;
use crate::trace::Trace;
use crate::{Error, ReduceOp, Result};
use candle_core::Tensor;

/// What a rank has of one bucket, which is split into as many equal parts as there are ranks.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// All parts, the last of which may reach a little beyond the gradients. Between two backward passes it is free for
    /// other use.
    pub(crate) whole: Tensor,
    /// After a backward pass, the mean over the ranks of this rank's part. Of the bucket's dtype.
    pub(crate) own: Tensor,
    /// The parameters in the bucket, with their places in it, in elements: one behind the other from 0 on.
    pub(crate) members: Vec<Member>,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// Its number in the order of registration.
    pub(crate) parameter: usize,
    pub(crate) offset: usize,
    pub(crate) elements: usize,
}

impl Shard {
    fn new(bucket: &Bucket, world_size: usize) -> Result<Self> {
        let whole = bucket.parts.clone();
        let own = Tensor::zeros(whole.elem_count() / world_size, whole.dtype(), whole.device())?;
        let mut offset = 0;
        let mut members = Vec::with_capacity(bucket.members.len());
        for (&parameter, gradient) in bucket.members.iter().zip(&bucket.gradients) {
            let elements = gradient.elem_count();
            members.push(Member { parameter, offset, elements });
            offset += elements;
        }
        Ok(Self { whole, own, members })
    }
}

/// Gradients that no optimizer has used yet.
#[derive(Clone, Debug)]
pub(crate) struct Fresh {
    /// For each parameter, in registration order, whether there is one.
    pub(crate) present: Vec<bool>,
    /// What they are to be multiplied by.
    pub(crate) scale: f64,
}

/// How a reducer's buckets are sent under ZeRO-1.
pub(super) struct ShardExchange {
    shards: Vec<Shard>,
    in_flight: Vec<Work>,
    /// One byte for each parameter, in registration order: whether any rank used it in the last backward pass.
    used: Option<Tensor>,
    fresh: Option<Fresh>,
}

impl ShardExchange {
    pub(super) fn new(buckets: &[Bucket], world_size: usize) -> Result<Self> {
        let shards = buckets.iter().map(|bucket| Shard::new(bucket, world_size)).collect::<Result<_>>()?;
        Ok(Self { shards, in_flight: Vec::new(), used: None, fresh: None })
    }

    pub(super) fn shards(&self) -> Vec<Shard> {
        self.shards.clone()
    }

    pub(super) fn begin(&mut self) {
        self.in_flight.clear();
        self.fresh = None;
    }

    pub(super) fn launch(&mut self, number: usize, group: &ProcessGroup) -> Result<()> {
        let Shard { whole, own, .. } = &self.shards[number];
        self.in_flight.push(group.reduce_scatter_async(own, whole, ReduceOp::Sum)?);
        Ok(())
    }

    pub(super) fn finish(&mut self, used: &[bool], group: &ProcessGroup, trace: Option<&Trace>) -> Result<()> {
        let bytes: Vec<u8> = used.iter().map(|used| u8::from(*used)).collect();
        let used = Tensor::from_vec(bytes, used.len(), group.device())?;
        let last = group.all_reduce_async(&used, ReduceOp::Max)?;
        for (number, work) in self.in_flight.drain(..).enumerate() {
            work.wait()?;
            super::exchange::show(trace, &work, format_args!("reduce-scatter of bucket {number}"));
        }
        last.wait()?;
        self.used = Some(used);
        Ok(())
    }

    /// Whether any rank used the parameter `index`.
    pub(super) fn anybody_used(&self, index: usize) -> Result<bool> {
        let Some(used) = &self.used else { return Ok(false) };
        Ok(used.narrow(0, index, 1)?.to_vec1::<u8>()?[0] > 0)
    }

    /// The shards hold the gradients of the `present` parameters.
    pub(super) fn set_fresh(&mut self, present: Vec<bool>) {
        self.fresh = Some(Fresh { present, scale: 1. });
    }

    pub(super) fn fresh(&mut self) -> Result<&mut Fresh> {
        let reason = "there are no new gradients: call ddp.backward(&loss), outside of no_sync, once before each step";
        self.fresh.as_mut().ok_or_else(|| Error::invalid("gradients", reason))
    }

    pub(super) fn forget(&mut self) {
        self.fresh = None;
    }
}
