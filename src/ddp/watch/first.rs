//! Detects gradients that were never used: a program ported from PyTorch may call `backward` twice and expect a sum.
use crate::Result;
use crate::ddp::model::parameter::Parameter;
use candle_core::DType;

/// Whether the first averaged gradients were used.
#[derive(Default)]
pub(in crate::ddp) enum FirstGradients {
    /// There are no gradients yet.
    #[default]
    ToCome,
    /// The gradients exist, and no variable has changed so far.
    Unused,
    /// There is nothing more to check.
    Settled,
}

impl FirstGradients {
    /// Checks whether a variable has changed since its replica was last updated.
    pub(in crate::ddp) fn look(&mut self, parameters: &[Parameter]) -> Result<()> {
        if !matches!(self, Self::Unused) {
            return Ok(());
        }
        for parameter in parameters.iter().filter(|parameter| parameter.var.elem_count() > 0) {
            let Some(replica) = parameter.replica() else { continue };
            let differs = parameter.var.to_dtype(replica.dtype())?.ne(&replica.detach())?.to_dtype(DType::F32)?;
            if differs.sum_all()?.to_scalar::<f32>()? > 0. {
                *self = Self::Settled;
                break;
            }
        }
        Ok(())
    }

    /// Call at the start of a synchronised backward pass; `is_held` says whether the first gradients still exist.
    /// Returns whether they are lost.
    pub(in crate::ddp) fn are_lost(&mut self, parameters: &[Parameter], is_held: bool) -> Result<bool> {
        self.look(parameters)?;
        let was_unused = matches!(self, Self::Unused);
        if was_unused {
            *self = Self::Settled;
        }
        Ok(was_unused && !is_held)
    }

    /// Call if all ranks have left out the step with the first gradients, so that the next ones count.
    pub(in crate::ddp) fn are_left_out(&mut self) {
        if matches!(self, Self::Unused) {
            *self = Self::ToCome;
        }
    }

    /// Call at the end of a synchronised backward pass.
    pub(in crate::ddp) fn come(&mut self, parameters: &[Parameter]) {
        if matches!(self, Self::ToCome) {
            // Without replicas, changes of variables cannot be detected.
            *self = if parameters.iter().any(|own| own.replica().is_some()) { Self::Unused } else { Self::Settled };
        }
    }
}
