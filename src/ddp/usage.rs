//! Which parameters any rank used, and what else ranks tell each other, for strategies whose buckets carry no flags.
use super::bucket::Message;
use crate::backend::{Label, Work};
use crate::process_group::ProcessGroup;
use crate::{ReduceOp, Result};
use candle_core::{DType, Device, Tensor};

/// An all-reduce of one byte per parameter, in registration order, and one that says whether to stop; in a weighted
/// pass, of as many f64 and the count.
pub(super) struct Usage {
    sent: Tensor,
    parameters: usize,
    work: Work,
}

impl Usage {
    /// Sends which parameters this rank used, and its message; every rank must call it.
    pub(super) fn send(used: &[bool], message: Message, group: &ProcessGroup) -> Result<Self> {
        let Message { is_stop_asked, count } = message;
        let flags = used.iter().copied().chain([is_stop_asked]).map(|flag| f64::from(u8::from(flag)));
        let values: Vec<f64> = flags.chain(count).collect();
        let (dtype, op) = if count.is_some() { (DType::F64, ReduceOp::Sum) } else { (DType::U8, ReduceOp::Max) };
        let length = values.len();
        let sent = Tensor::from_vec(values, length, &Device::Cpu)?.to_dtype(dtype)?.to_device(group.device())?;
        let work = Label::DDP_USED.during(|| group.all_reduce_async(&sent, op))?;
        Ok(Self { sent, parameters: used.len(), work })
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.work.wait()
    }

    /// The size of what this rank has sent.
    pub(super) fn bytes(&self) -> u64 {
        (self.sent.elem_count() * self.sent.dtype().size_in_bytes()) as u64
    }

    /// Whether any rank used the parameter `index`; valid after [`wait`](Self::wait).
    pub(super) fn anybody_used(&self, index: usize) -> Result<bool> {
        Ok(self.value(index)? > 0.)
    }

    /// Above zero if any rank was asked to stop; valid after [`wait`](Self::wait).
    pub(super) fn stop_flag(&self) -> Result<Tensor> {
        Ok(self.sent.narrow(0, self.parameters, 1)?)
    }

    /// The count of all ranks in a weighted pass; valid after [`wait`](Self::wait).
    pub(super) fn total_count(&self) -> Result<f64> {
        self.value(self.parameters + 1)
    }

    fn value(&self, index: usize) -> Result<f64> {
        Ok(self.sent.narrow(0, index, 1)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>()?[0])
    }
}
