//! Whether gradients are finite on all ranks, as their GPUs know it before the host does.
use crate::ddp::gradients::scaled::UNSCALE;
use crate::kernels::{self, Incoming};
use crate::process_group::ProcessGroup;
use crate::{ReduceOp, Result};
use candle_core::Tensor;
use std::cell::{Cell, RefCell};

/// A verdict that is on its way to the host.
pub(crate) struct Verdict {
    /// A pair, whose second number is finite if all gradients are.
    numbers: Tensor,
    incoming: RefCell<Option<Incoming>>,
    is_bad: Cell<bool>,
}

impl Verdict {
    /// The verdict of all ranks, from this rank's pair. Does not wait.
    pub(super) fn of_all_ranks(group: &ProcessGroup, numbers: Tensor) -> Result<Self> {
        let numbers = match group.world_size() {
            1 => numbers,
            _ => {
                // As `scaled::share_verdict`. Zero times an infinity is NaN.
                let overflow = numbers.narrow(0, 1, 1)?.affine(0., 0.)?;
                let pair = Tensor::cat(&[&overflow.ones_like()?, &overflow], 0)?;
                UNSCALE.during(|| group.all_reduce(&pair, ReduceOp::Sum))?;
                pair
            }
        };
        let incoming = RefCell::new(Some(kernels::send(&numbers)?));
        Ok(Self { numbers, incoming, is_bad: Cell::new(false) })
    }

    pub(crate) fn numbers(&self) -> &Tensor {
        &self.numbers
    }

    /// Waits for the verdict, but not for what was launched after it.
    pub(crate) fn is_bad(&self) -> Result<bool> {
        if let Some(incoming) = self.incoming.take() {
            self.is_bad.set(!incoming.receive()?[1].is_finite());
        }
        Ok(self.is_bad.get())
    }
}
