//! What becomes of the full buckets: how they are sent, and how all ranks learn who used which parameter.
use super::bucket::{self, Bucket, ParameterInfo};
use super::comm_hook::{CommHook, CommHookTraffic, GradBucket, HookWork};
use super::shard::ShardExchange;
use super::usage::Usage;
use crate::backend::Work;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::trace::{Row, Trace};
use crate::{ReduceOp, Result};
use candle_core::Tensor;
use std::collections::HashMap;

/// The way of a reducer's buckets. All ranks have the same.
#[derive(Default)]
pub(super) enum Exchange {
    /// Each bucket is all-reduced in place, and its tail with it.
    #[default]
    AllReduce,
    /// A communication hook gets the gradients of each bucket; the tails of all travel beside it.
    Hook(HookExchange),
    /// Each rank gets its part of each bucket (ZeRO-1).
    Shard(ShardExchange),
}

impl Exchange {
    /// What gradients are multiplied by on their way into a bucket.
    pub(super) fn scale(&self, world_size: usize) -> f64 {
        match self {
            Self::AllReduce | Self::Shard(_) => 1.0 / world_size as f64,
            Self::Hook(_) => 1.0,
        }
    }

    /// The buckets were laid out anew.
    pub(super) fn set_buckets(&mut self, buckets: &[Bucket], parameters: &[ParameterInfo]) -> Result<()> {
        match self {
            // The layout is final when shards are made.
            Self::AllReduce | Self::Shard(_) => Ok(()),
            Self::Hook(exchange) => exchange.set_buckets(buckets, parameters),
        }
    }

    /// A new backward pass: forgets what a failed one may have left.
    pub(super) fn begin(&mut self) {
        match self {
            Self::AllReduce => {}
            Self::Hook(exchange) => exchange.hook.begin(),
            Self::Shard(exchange) => exchange.begin(),
        }
    }

    /// Sends off the full bucket `number`. `used`: which members this rank used, where it missed any.
    pub(super) fn launch(
        &mut self,
        number: usize,
        bucket: &mut Bucket,
        used: Option<&[bool]>,
        group: &ProcessGroup,
        trace: Option<&Trace>,
    ) -> Result<()> {
        match self {
            Self::AllReduce => {
                match used {
                    None => copy::copy(&bucket.tail, &bucket.tail_all_used)?,
                    Some(used) => {
                        let (scale, device) = (1.0 / group.world_size() as f64, bucket.tensor.device());
                        copy::copy(&bucket.tail, &bucket::tail(used, scale, bucket.tensor.dtype(), device)?)?;
                    }
                }
                bucket.work = Some(group.all_reduce_async(&bucket.tensor, ReduceOp::Sum)?);
                Ok(())
            }
            Self::Hook(exchange) => exchange.hook.launch(&exchange.buckets[number], group),
            Self::Shard(exchange) => exchange.launch(number, group, trace),
        }
    }

    /// Waits until all buckets hold their results. `used`: which parameters this rank used, in registration order.
    pub(super) fn finish(
        &mut self,
        buckets: &[Bucket],
        used: &[bool],
        group: &ProcessGroup,
        trace: Option<&Trace>,
    ) -> Result<()> {
        match self {
            Self::AllReduce => {
                for (number, bucket) in buckets.iter().enumerate() {
                    let Some(work) = &bucket.work else { continue };
                    work.wait()?;
                    let bytes = bucket.tensor.elem_count() * bucket.tensor.dtype().size_in_bytes();
                    show(trace, work, format_args!("all-reduce of bucket {number}, {bytes} bytes"));
                }
                Ok(())
            }
            Self::Hook(exchange) => exchange.finish(used, group, trace),
            Self::Shard(exchange) => exchange.finish(used, group, trace),
        }
    }

    /// Whether any rank used the parameter `index`, which is the member `slot` of `bucket`. This rank did not.
    pub(super) fn anybody_used(&self, index: usize, bucket: &Bucket, slot: usize) -> Result<bool> {
        match self {
            Self::AllReduce => {
                let used = bucket.tail.narrow(0, slot, 1)?.to_dtype(candle_core::DType::F32)?;
                Ok(used.to_vec1::<f32>()?[0] > 0.0)
            }
            Self::Hook(HookExchange { usage, .. }) => {
                usage.as_ref().map_or(Ok(false), |usage| usage.anybody_used(index))
            }
            Self::Shard(exchange) => exchange.anybody_used(index),
        }
    }
}

/// Writes a collective that was waited for into the trace. On a GPU it may have its end before it.
pub(super) fn show(trace: Option<&Trace>, work: &Work, name: std::fmt::Arguments) {
    if let Some(trace) = trace
        && work.synchronize().is_ok()
        && let Some((start, end)) = work.span()
    {
        trace.span(Row::Communication, name, start, end);
    }
}

/// A registered communication hook.
pub(super) struct HookExchange {
    hook: Box<dyn RunningHook>,
    buckets: Vec<GradBucket>,
    /// Of the last backward pass. None if nothing is sent.
    usage: Option<Usage>,
    /// The bytes that were sent for that.
    used_bytes: u64,
}

impl HookExchange {
    pub(super) fn new<H: CommHook>(hook: H) -> Self {
        let hook = Running { hook, in_flight: Vec::new(), gradient_bytes: 0 };
        Self { hook: Box::new(hook), buckets: Vec::new(), usage: None, used_bytes: 0 }
    }

    fn set_buckets(&mut self, buckets: &[Bucket], parameters: &[ParameterInfo]) -> Result<()> {
        let view = |(index, bucket): (usize, &Bucket)| -> Result<GradBucket> {
            let elements = bucket.tensor.elem_count() - bucket.members.len();
            Ok(GradBucket {
                index,
                is_last: index + 1 == buckets.len(),
                buffer: bucket.tensor.narrow(0, 0, elements)?,
                gradients: bucket.gradients.clone().into(),
                names: bucket.members.iter().map(|member| parameters[*member].name.clone()).collect(),
            })
        };
        self.buckets = buckets.iter().enumerate().map(view).collect::<Result<_>>()?;
        Ok(())
    }

    fn finish(&mut self, used: &[bool], group: &ProcessGroup, trace: Option<&Trace>) -> Result<()> {
        if self.hook.is_local() {
            return self.hook.finish(&self.buckets, group, trace);
        }
        // The tails of all buckets at once, for the hook may have made anything of the buckets.
        self.used_bytes += used.len() as u64;
        let usage = Usage::send(used, group)?;
        self.hook.finish(&self.buckets, group, trace)?;
        usage.wait()?;
        self.usage = Some(usage);
        Ok(())
    }

    pub(super) fn is_local(&self) -> bool {
        self.hook.is_local()
    }

    pub(super) fn hook(&mut self) -> &mut dyn RunningHook {
        &mut *self.hook
    }

    pub(super) fn traffic(&self) -> CommHookTraffic {
        let (gradient_bytes, sent) = self.hook.traffic();
        CommHookTraffic { gradient_bytes, bytes_sent: sent.map(|sent| sent + self.used_bytes) }
    }
}

/// A hook with what it has in flight, of whatever type it is.
pub(super) trait RunningHook: Send {
    fn begin(&mut self);
    fn launch(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<()>;
    fn finish(&mut self, buckets: &[GradBucket], group: &ProcessGroup, trace: Option<&Trace>) -> Result<()>;
    fn is_local(&self) -> bool;
    fn traffic(&self) -> (u64, Option<u64>);
    fn state_dict(&self) -> Result<HashMap<String, Tensor>>;
    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()>;
}

struct Running<H> {
    hook: H,
    /// For each bucket that was launched, in order.
    in_flight: Vec<HookWork<H>>,
    gradient_bytes: u64,
}

impl<H: CommHook> RunningHook for Running<H> {
    fn begin(&mut self) {
        self.in_flight.clear();
    }

    fn launch(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<()> {
        self.gradient_bytes += bucket.bytes() as u64;
        let work = self.hook.run(bucket, group)?;
        self.in_flight.push(work);
        Ok(())
    }

    /// Round by round through the buckets, so that all ranks start the next stages in the same order.
    fn finish(&mut self, buckets: &[GradBucket], group: &ProcessGroup, trace: Option<&Trace>) -> Result<()> {
        let mut stage = 1;
        while self.in_flight.iter().any(|work| !work.is_done()) {
            for (bucket, in_flight) in buckets.iter().zip(&mut self.in_flight) {
                let HookWork { works, then } = std::mem::replace(in_flight, HookWork::done());
                for work in &works {
                    work.wait()?;
                    show(trace, work, format_args!("hook, stage {stage} of bucket {}", bucket.index));
                }
                if let Some(then) = then {
                    *in_flight = then(&mut self.hook, bucket, group)?;
                }
            }
            stage += 1;
        }
        Ok(())
    }

    fn is_local(&self) -> bool {
        self.hook.is_local()
    }

    fn traffic(&self) -> (u64, Option<u64>) {
        (self.gradient_bytes, self.hook.bytes_sent())
    }

    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        self.hook.state_dict()
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.hook.load_state_dict(state)
    }
}
