//! Reduction of buckets by a communication hook.
use crate::Result;
use crate::ddp::buckets::bucket::{Bucket, Message};
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::plan::ParameterInfo;
use crate::ddp::buckets::usage::Usage;
use crate::ddp::comm_hook::{CommHook, GradBucket, HookWork};
use crate::process_group::ProcessGroup;
use crate::tensor::finite::any_non_finite;
use crate::trace::{self, Trace};
use candle_core::Tensor;
use std::collections::HashMap;

/// A registered communication hook.
pub(crate) struct HookReduction {
    hook: Box<dyn RunningHook>,
    buckets: Vec<GradBucket>,
    /// The bytes sent for the used flags.
    used_bytes: u64,
}

impl HookReduction {
    pub(crate) fn new<H: CommHook>(hook: H) -> Self {
        let hook = Running { hook, in_flight: Vec::new(), gradient_bytes: 0 };
        Self { hook: Box::new(hook), buckets: Vec::new(), used_bytes: 0 }
    }

    pub(crate) fn set_buckets(&mut self, buckets: &[Bucket], parameters: &[ParameterInfo]) -> Result<()> {
        let view = |(index, bucket): (usize, &Bucket)| -> Result<GradBucket> {
            Ok(GradBucket {
                index,
                is_last: index + 1 == buckets.len(),
                buffer: bucket.sum.flat.clone(),
                gradients: bucket.sum.gradients.clone().into(),
                names: bucket.members.iter().map(|member| parameters[*member].name.clone()).collect(),
            })
        };
        self.buckets = buckets.iter().enumerate().map(view).collect::<Result<_>>()?;
        Ok(())
    }

    /// Returns which parameters any rank used; None if nothing is sent.
    pub(crate) fn finish(
        &mut self,
        used: &[bool],
        message: Message,
        groups: &Groups,
        trace: Option<&Trace>,
    ) -> Result<Option<Usage>> {
        if self.hook.is_local() {
            self.hook.finish(&self.buckets, groups, trace)?;
            return Ok(None);
        }
        // The used flags of all buckets travel together, separately from the hook, which may replace a bucket's
        // contents.
        let usage = match message.is_non_finite {
            None => {
                let usage = Usage::send(used, message, groups.main())?;
                self.hook.finish(&self.buckets, groups, trace)?;
                usage
            }
            // A hook's result may differ from rank to rank, so they tell each other once it is there.
            Some(own) => {
                self.hook.finish(&self.buckets, groups, trace)?;
                let buffers: Vec<&Tensor> = self.buckets.iter().map(GradBucket::buffer).collect();
                let is_non_finite = Some(own || any_non_finite(&buffers)?);
                Usage::send(used, Message { is_non_finite, ..message }, groups.main())?
            }
        };
        self.used_bytes += usage.bytes();
        usage.wait()?;
        Ok(Some(usage))
    }

    pub(crate) fn discard(&mut self) {
        self.hook.discard();
    }

    pub(crate) fn launch(&mut self, number: usize, group: &ProcessGroup) -> Result<()> {
        self.hook.launch(&self.buckets[number], group)
    }

    pub(crate) fn is_local(&self) -> bool {
        self.hook.is_local()
    }

    pub(crate) fn hook(&mut self) -> &mut dyn RunningHook {
        &mut *self.hook
    }

    pub(crate) fn traffic(&self) -> (u64, Option<u64>) {
        let (gradient_bytes, sent) = self.hook.traffic();
        (gradient_bytes, sent.map(|sent| sent + self.used_bytes))
    }
}

/// A hook of any type, with its work in flight.
pub(crate) trait RunningHook: Send {
    fn discard(&mut self);
    fn launch(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<()>;
    fn finish(&mut self, buckets: &[GradBucket], groups: &Groups, trace: Option<&Trace>) -> Result<()>;
    fn is_local(&self) -> bool;
    fn traffic(&self) -> (u64, Option<u64>);
    fn state_dict(&self) -> Result<HashMap<String, Tensor>>;
    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()>;
}

struct Running<H> {
    hook: H,
    /// One entry for each bucket that was launched, in order.
    in_flight: Vec<HookWork<H>>,
    gradient_bytes: u64,
}

impl<H: CommHook> RunningHook for Running<H> {
    fn discard(&mut self) {
        self.in_flight.clear();
    }

    fn launch(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<()> {
        self.gradient_bytes += bucket.bytes() as u64;
        let work = self.hook.run(bucket, group)?;
        self.in_flight.push(work);
        Ok(())
    }

    /// Processes the buckets in rounds, so that all ranks start the next stages in the same order.
    fn finish(&mut self, buckets: &[GradBucket], groups: &Groups, trace: Option<&Trace>) -> Result<()> {
        let mut in_flight = std::mem::take(&mut self.in_flight);
        let mut stage = 1;
        while in_flight.iter().any(|work| !work.is_done()) {
            for (bucket, in_flight) in buckets.iter().zip(&mut in_flight) {
                let HookWork { works, then } = std::mem::replace(in_flight, HookWork::done());
                for work in &works {
                    work.wait()?;
                    if let Some(trace) = trace {
                        trace::collective(trace, work, format_args!("hook, stage {stage} of bucket {}", bucket.index));
                    }
                }
                if let Some(then) = then {
                    *in_flight = then(&mut self.hook, bucket, groups.of(bucket.buffer().device()))?;
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
