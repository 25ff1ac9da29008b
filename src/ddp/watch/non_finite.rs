//! Steps whose gradients are not finite.
use crate::backend::Purpose;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::Tensor;

pub(in crate::ddp) static DDP_NON_FINITE: Purpose = Purpose::of("which gradient was not finite");

/// The treatment of a step whose averaged gradients contain a NaN or an infinity: an option of [`DdpOptions`](crate::DdpOptions).
///
/// All ranks decide the same in the same step, without a collective: each looks at the averaged gradients, which all have. Where
/// ranks have parts of them, or the results of a [communication hook](crate::comm_hook), a flag travels with the used flags. If any rank
/// [ignores](crate::Role::Ignored) variables of the model, such as experts, each looks at its gradients of them, and the ranks tell each
/// other in one more collective. This reads the gradients once more; on a GPU, `backward` waits for them,
/// but not always with `Skip`.
///
/// With a [hook](crate::comm_hook::CommHook::is_local) that sends nothing, each rank decides for itself.
///
/// A pass whose loss a [`GradScaler`](crate::amp::GradScaler) has scaled is left to the scaler, which expects infinities. Models that are trained in one backward pass must have the same
/// policy and the same group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnNonFinite {
    /// Gradients are not checked.
    #[default]
    Ignore,
    /// The step is left out on all ranks, and [`skipped_steps`](crate::DistributedDataParallel::skipped_steps) counts it. The
    /// store that `backward` returns has no gradients, so an optimizer changes nothing, and clipping returns NaN for the norm. (candle_nn's
    /// AdamW changes no parameter either, but counts a step.) The buffers get the values from before the step. With
    /// [`Backward::into`](crate::Backward::into), one such pass leaves out the whole step, and so does one micro-batch under
    /// [`no_sync`](crate::DistributedDataParallel::no_sync).
    ///
    /// **On a GPU**, nothing waits for a model without buffers whose last step [`Adam`](crate::optim::Adam), [`AdamW`](crate::optim::AdamW) or
    /// [`Sgd`](crate::optim::Sgd) made, with neither sharding, a hook, ignored variables, a count nor a join. The store then has the
    /// gradients as they are, with the verdict on them: such an optimizer leaves out the step by itself, any other of this crate waits for
    /// the verdict, and a norm is not finite. The count, and the warning, which does not name the parameter then, come with the next pass,
    /// or with a call of `skipped_steps`, which waits. (An optimizer that is not of this crate must not follow one of these in the middle of
    /// training, since it would use these gradients; rank 0 warns.)
    ///
    /// Rank 0 warns of the first such step. What a program does after each step, such as an update of a schedule or of an
    /// average of weights, it may leave out when the count has grown.
    Skip {
        /// The number of consecutive steps that may be left out. The next one is [`Error::NonFinite`] on every rank. At least 1. A run that
        /// resumes from a checkpoint counts from 0.
        at_most: u64,
    },
    /// The step is [`Error::NonFinite`] on every rank, with the first parameter and the rank that had it. A loss that is
    /// not finite counts as well, even if its gradients are finite. Each bucket is also checked before it is sent, for which a GPU
    /// waits. PyTorch's `TORCH_NCCL_NAN_CHECK`.
    Stop,
}

impl OnNonFinite {
    pub(in crate::ddp) fn check(self) -> Result<()> {
        match self {
            Self::Skip { at_most: 0 } => {
                let reason =
                    "`at_most` must be at least 1, not 0 (OnNonFinite::Stop ends the run at the first such step)";
                Err(Error::invalid("on_non_finite", reason))
            }
            _ => Ok(()),
        }
    }

    pub(in crate::ddp) fn is_on(self) -> bool {
        self != Self::Ignore
    }

    /// The number of consecutive steps that may be left out.
    pub(in crate::ddp) fn at_most(self) -> u64 {
        match self {
            Self::Ignore => u64::MAX,
            Self::Skip { at_most } => at_most,
            Self::Stop => 0,
        }
    }
}

/// The count of the steps that a model has left out.
#[derive(Debug, Default)]
pub(in crate::ddp) struct Skipped {
    pub(in crate::ddp) total: u64,
    pub(in crate::ddp) in_a_row: u64,
    /// Whether the step to which the last pass belongs is left out.
    is_left_out: bool,
    /// The findings of passes under `no_sync` in this rank's gradients of ignored variables.
    pub(in crate::ddp) ignored: Option<Finding>,
}

/// The counts as a group keeps them for an elastic run.
impl From<[u64; 3]> for Skipped {
    fn from([total, in_a_row, is_left_out]: [u64; 3]) -> Self {
        Self { total, in_a_row, is_left_out: is_left_out > 0, ignored: None }
    }
}

impl Skipped {
    pub(in crate::ddp) fn numbers(&self) -> [u64; 3] {
        [self.total, self.in_a_row, u64::from(self.is_left_out)]
    }

    /// Counts a pass, which `begins` a step unless its gradients are added to those of the last pass. Returns whether the step is left
    /// out.
    pub(in crate::ddp) fn pass(&mut self, begins: bool, is_finite: bool) -> bool {
        if begins && !std::mem::take(&mut self.is_left_out) {
            self.in_a_row = 0;
        }
        if !is_finite && !self.is_left_out {
            self.is_left_out = true;
            self.total += 1;
            self.in_a_row += 1;
        }
        self.is_left_out
    }
}

/// A parameter's name, and the kind of its first value that is not finite.
pub(crate) type Finding = (String, &'static str);

/// The search for numbers that are not finite in a model's part of a pass, and its findings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// Whether it looks at the averaged gradients.
    pub(in crate::ddp) looks: bool,
    /// Whether it looks at this rank's gradients as well, before they are sent.
    pub(in crate::ddp) looks_before: bool,
    /// This rank's loss, if it is not finite.
    pub(in crate::ddp) loss: Option<f64>,
    /// The first of this rank's gradients.
    pub(in crate::ddp) own: Option<Finding>,
    /// The first of the averaged gradients, or of this rank's part of them.
    pub(in crate::ddp) averaged: Option<Finding>,
    /// Whether the step must not be made; the same on all ranks.
    pub(in crate::ddp) is_agreed: bool,
    /// Whether the host may learn later whether the averaged gradients are finite.
    pub(in crate::ddp) may_be_late: bool,
    /// The verdict on the averaged gradients, if only a GPU knows it.
    pub(in crate::ddp) verdict: Option<Tensor>,
}

/// On rank 0, of the first such step.
pub(in crate::ddp) fn warn_of_left_out(which: &str, what: &str) {
    warn_aloud(format_args!(
        "all ranks leave out {which}, since {what} (OnNonFinite::Skip). Further ones are only counted, in \
         DistributedDataParallel::skipped_steps"
    ));
}

#[cfg(test)]
mod tests {
    use super::Skipped;

    #[test]
    fn steps_are_counted_and_not_passes() {
        let mut skipped = Skipped::default();
        let mut step = |passes: &[bool]| {
            let left_out: Vec<bool> =
                passes.iter().enumerate().map(|(index, finite)| skipped.pass(index == 0, *finite)).collect();
            (left_out.last().copied().unwrap(), skipped.total, skipped.in_a_row)
        };
        assert_eq!(step(&[true]), (false, 0, 0));
        // The second of two passes, and then the first.
        assert_eq!(step(&[true, false]), (true, 1, 1));
        assert_eq!(step(&[false, true]), (true, 2, 2));
        assert_eq!(step(&[false, false]), (true, 3, 3));
        // The row ends once the next step begins, since a further pass may follow.
        assert_eq!(step(&[true, true]), (false, 3, 3));
        assert_eq!(step(&[false]), (true, 4, 1));
    }
}
