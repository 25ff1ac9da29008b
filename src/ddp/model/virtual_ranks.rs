//! The conditions for virtual ranks: options that allow them, and buffers that do not depend on the number of ranks.
use crate::ddp::model::options::DdpOptions;
use crate::ddp::model::parameter::{Buffer, Variables};
use crate::kernels::is_attention_fast;
use crate::tensor::copy;
use crate::{Error, Result};
use candle_core::Tensor;

/// Checks what the options and the model must fulfil for results that do not depend on the number of ranks.
pub(in crate::ddp) fn check_options(options: &DdpOptions, variables: &Variables) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid("virtual_ranks", reason));
    if !options.broadcast_buffers && !variables.buffers.is_empty() {
        return refuse(
            "they need broadcast_buffers, since each rank's own buffers depend on the number of ranks".to_string(),
        );
    }
    if is_attention_fast()? && variables.shared().any(|(_, var)| var.device().is_cuda()) {
        return refuse(
            "CANDLE_DDP_CUDNN_ATTENTION must not be `fast` in the environment: the gradients of attention would have other bits in every \
             run. Unset it"
                .to_string(),
        );
    }
    if let Some(Buffer { name, .. }) = variables.ignored.first() {
        return refuse(format!(
            "the variable {name} has Role::Ignored, so each rank has its own gradient of it, which depends on the number of ranks: \
             give it another role"
        ));
    }
    Ok(())
}

/// Values of the buffers, such as running means. Every micro-batch begins with those before the step, and the step leaves
/// those after micro-batch 0, as if each were computed by its own rank.
#[derive(Default)]
pub(in crate::ddp) struct Snapshots {
    before: Option<Vec<Tensor>>,
    after_first: Option<Vec<Tensor>>,
}

impl Snapshots {
    /// Keeps the values before a step. Call it before every forward pass between two steps.
    pub(in crate::ddp) fn keep(&mut self, buffers: &[Buffer]) -> Result<()> {
        if !buffers.is_empty() {
            *self = Self { before: Some(values(buffers)?), after_first: None };
        }
        Ok(())
    }

    /// Keeps the values before a step, unless they are kept already.
    pub(in crate::ddp) fn keep_first(&mut self, buffers: &[Buffer]) -> Result<()> {
        if self.before.is_some() { Ok(()) } else { self.keep(buffers) }
    }

    /// The step is over.
    pub(in crate::ddp) fn forget(&mut self) {
        self.before = None;
    }

    /// Keeps the values after micro-batch 0. After this rank's last micro-batch, when rank 0 sends the buffers, they get these
    /// values.
    pub(in crate::ddp) fn take(&mut self, buffers: &[Buffer], number: usize, is_last: bool) -> Result<()> {
        if number == 0 && !buffers.is_empty() {
            self.after_first = Some(values(buffers)?);
        } else if is_last && let Some(first) = self.after_first.take() {
            set(buffers, &first)?;
        }
        Ok(())
    }

    /// Gives the buffers the values from before the step, which `option` needs.
    pub(in crate::ddp) fn restore(&self, buffers: &[Buffer], option: &'static str) -> Result<()> {
        match &self.before {
            _ if buffers.is_empty() => Ok(()),
            Some(before) => set(buffers, before),
            None => {
                let reason = "the model has buffers, and must run its forward passes through ddp.forward, ddp.forward_t or ddp.call, \
                              which keep their values before each step";
                Err(Error::invalid(option, reason))
            }
        }
    }
}

fn values(buffers: &[Buffer]) -> Result<Vec<Tensor>> {
    let copies = buffers.iter().map(|buffer| buffer.var.as_detached_tensor().copy());
    Ok(copies.collect::<candle_core::Result<_>>()?)
}

fn set(buffers: &[Buffer], values: &[Tensor]) -> Result<()> {
    Ok(copy::copy_all(buffers.iter().map(|buffer| buffer.var.as_tensor()).zip(values))?)
}
