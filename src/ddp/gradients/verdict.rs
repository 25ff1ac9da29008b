//! Whether gradients are finite on all ranks, as their GPUs know it before the host does.
use super::scaled::UNSCALE;
use crate::kernels::{self, Incoming};
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::{ReduceOp, Result};
use candle_core::Tensor;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A verdict that is on its way to the host, or known.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// A pair on the GPU, whose second number is finite if all gradients are.
    numbers: Option<Tensor>,
    incoming: Mutex<Option<Incoming>>,
    is_bad: OnceLock<bool>,
    /// Whether an optimizer follows it.
    is_followed: AtomicBool,
}

impl Verdict {
    pub(crate) fn known(is_bad: bool) -> Arc<Self> {
        let is_bad = OnceLock::from(is_bad);
        Arc::new(Self { numbers: None, incoming: Mutex::default(), is_bad, is_followed: AtomicBool::default() })
    }

    /// The verdict that a GPU has made. Does not wait.
    pub(crate) fn of(numbers: Tensor) -> Result<Arc<Self>> {
        let incoming = Mutex::new(Some(kernels::send(&numbers)?));
        let (is_bad, is_followed) = Default::default();
        Ok(Arc::new(Self { numbers: Some(numbers), incoming, is_bad, is_followed }))
    }

    /// The verdict of all ranks, from this rank's pair. Does not wait.
    pub(crate) fn of_all_ranks(group: &ProcessGroup, numbers: Tensor) -> Result<Arc<Self>> {
        if group.world_size() == 1 {
            return Self::of(numbers);
        }
        // As `scaled::share_verdict`. Zero times an infinity is NaN.
        let overflow = numbers.narrow(0, 1, 1)?.affine(0., 0.)?;
        let pair = Tensor::cat(&[&overflow.ones_like()?, &overflow], 0)?;
        UNSCALE.during(|| group.all_reduce(&pair, ReduceOp::Sum))?;
        Self::of(pair)
    }

    pub(crate) fn follow(&self) {
        self.is_followed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_followed(&self) -> bool {
        self.is_followed.load(Ordering::Relaxed)
    }

    /// The pair on the GPU, of a verdict that was made there.
    pub(crate) fn numbers(&self) -> Option<&Tensor> {
        self.numbers.as_ref()
    }

    /// Waits for the verdict, but not for what was launched after it. After an error it is bad.
    pub(crate) fn is_bad(&self) -> Result<bool> {
        let mut incoming = lock(&self.incoming);
        if let Some(incoming) = incoming.take() {
            let received = incoming.receive();
            self.is_bad.get_or_init(|| received.as_ref().map_or(true, |numbers| !numbers[1].is_finite()));
            received?;
        }
        Ok(self.is_bad.get().copied().unwrap_or(true))
    }
}
