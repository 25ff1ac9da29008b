//! Which parameters any rank used, for strategies whose buckets carry no used flags.
use crate::backend::{Label, Work};
use crate::process_group::ProcessGroup;
use crate::{ReduceOp, Result};
use candle_core::Tensor;

/// One byte for each parameter, in registration order, being all-reduced.
pub(super) struct Usage {
    bytes: Tensor,
    work: Work,
}

impl Usage {
    /// Sends which parameters this rank used; every rank must call it.
    pub(super) fn send(used: &[bool], group: &ProcessGroup) -> Result<Self> {
        let bytes: Vec<u8> = used.iter().map(|used| u8::from(*used)).collect();
        let bytes = Tensor::from_vec(bytes, used.len(), group.device())?;
        let work = Label::DDP_USED.during(|| group.all_reduce_async(&bytes, ReduceOp::Max))?;
        Ok(Self { bytes, work })
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.work.wait()
    }

    /// Whether any rank used the parameter `index`; valid after [`wait`](Self::wait).
    pub(super) fn anybody_used(&self, index: usize) -> Result<bool> {
        Ok(self.bytes.narrow(0, index, 1)?.to_vec1::<u8>()?[0] > 0)
    }
}
