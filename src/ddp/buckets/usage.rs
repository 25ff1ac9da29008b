//! Which parameters any rank used, and what else ranks tell each other, for strategies whose buckets carry no flags.
use crate::backend::{Purpose, Work};
use crate::ddp::buckets::bucket::Message;
use crate::process_group::ProcessGroup;
use crate::{ReduceOp, Result};
use candle_core::{DType, Device, Tensor};

static DDP_USED: Purpose = Purpose::of("the used flags of DistributedDataParallel's parameters");

/// An all-reduce of one byte per parameter, in registration order, one that says whether to stop, and one for numbers that are not
/// finite if anybody looks; in a weighted pass, of as many f64 and the counts.
pub(in crate::ddp) struct Usage {
    sent: Tensor,
    parameters: usize,
    looks: bool,
    work: Work,
}

impl Usage {
    /// Sends which parameters this rank used, and its message; every rank must call it.
    pub(in crate::ddp) fn send(used: &[bool], message: Message, group: &ProcessGroup) -> Result<Self> {
        Self::send_counts(used, message, message.count.as_slice(), group)
    }

    /// Like [`send`](Self::send), with a list of counts, each of which is added to the other ranks'. It is empty unless the pass
    /// is weighted.
    pub(in crate::ddp) fn send_counts(
        used: &[bool],
        message: Message,
        counts: &[f64],
        group: &ProcessGroup,
    ) -> Result<Self> {
        let told = [message.is_stop_asked].into_iter().chain(message.is_non_finite);
        let flags = used.iter().copied().chain(told).map(|flag| f64::from(u8::from(flag)));
        let values: Vec<f64> = flags.chain(counts.iter().copied()).collect();
        let (dtype, op) = if counts.is_empty() { (DType::U8, ReduceOp::Max) } else { (DType::F64, ReduceOp::Sum) };
        let length = values.len();
        let sent = Tensor::from_vec(values, length, &Device::Cpu)?.to_dtype(dtype)?.to_device(group.device())?;
        let work = DDP_USED.during(|| group.all_reduce_async(&sent, op))?;
        Ok(Self { sent, parameters: used.len(), looks: message.is_non_finite.is_some(), work })
    }

    pub(in crate::ddp) fn wait(&self) -> Result<()> {
        self.work.wait()
    }

    /// The size of what this rank has sent.
    pub(in crate::ddp) fn bytes(&self) -> u64 {
        (self.sent.elem_count() * self.sent.dtype().size_in_bytes()) as u64
    }

    /// Whether any rank used each parameter; valid after [`wait`](Self::wait).
    pub(in crate::ddp) fn used(&self) -> Result<Vec<bool>> {
        Ok(self.values(0, self.parameters)?.into_iter().map(|flag| flag > 0.).collect())
    }

    /// Above zero if any rank was asked to stop; valid after [`wait`](Self::wait).
    pub(in crate::ddp) fn stop_flag(&self) -> Result<Tensor> {
        Ok(self.sent.narrow(0, self.parameters, 1)?)
    }

    /// Whether any rank has found a number that is not finite; valid after [`wait`](Self::wait).
    pub(in crate::ddp) fn non_finite_flag(&self) -> Result<bool> {
        Ok(self.looks && self.values(self.parameters + 1, 1)?[0] > 0.)
    }

    /// The count of all ranks in a weighted pass; valid after [`wait`](Self::wait).
    pub(in crate::ddp) fn total_count(&self) -> Result<f64> {
        let first = self.parameters + 1 + usize::from(self.looks);
        Ok(self.values(first, self.sent.elem_count() - first)?.into_iter().sum())
    }

    fn values(&self, first: usize, count: usize) -> Result<Vec<f64>> {
        Ok(self.sent.narrow(0, first, count)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?)
    }
}
