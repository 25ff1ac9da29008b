//! Whether the first gradients were used: a program from PyTorch may call `backward` twice and expect a sum.
use super::parameter::Parameter;
use crate::Result;
use candle_core::DType;

/// What is known of the use of the first averaged gradients.
#[derive(Default)]
pub(super) enum FirstGradients {
    /// There are none yet.
    #[default]
    ToCome,
    /// They are there, and so far no variable has changed.
    Unused,
    /// Nothing needs to be looked at any more.
    Settled,
}

impl FirstGradients {
    /// Looks whether a variable has changed since its replica was brought up to date.
    pub(super) fn look(&mut self, parameters: &[Parameter]) -> Result<()> {
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

    /// A synchronised backward pass begins; the first gradients are still held if `is_held`. Returns whether they are lost.
    pub(super) fn are_lost(&mut self, parameters: &[Parameter], is_held: bool) -> Result<bool> {
        self.look(parameters)?;
        match self {
            Self::ToCome => Ok(false),
            Self::Unused | Self::Settled => {
                let was_unused = matches!(self, Self::Unused);
                *self = Self::Settled;
                Ok(was_unused && !is_held)
            }
        }
    }

    /// A synchronised backward pass has ended.
    pub(super) fn come(&mut self, parameters: &[Parameter]) {
        if matches!(self, Self::ToCome) {
            // Without replicas nobody knows whether a variable has changed.
            *self = if parameters.iter().any(|own| own.replica().is_some()) { Self::Unused } else { Self::Settled };
        }
    }
}
