//! Activation checkpointing: the backward pass recomputes a function's intermediate results, which are not kept.
use crate::{autocast_mode, set_autocast};
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::{Leaves, is_grad_enabled, rerun};
use candle_ddp_tensor::seed::Replay;

/// Computes `function` of `inputs` and keeps only the inputs for the backward pass, which runs `function` again:
/// `torch.utils.checkpoint.checkpoint`. This trades the memory of the intermediate results for the time of another
/// forward pass.
///
/// The result and all gradients, including those of the parameters that `function` uses, are the same as without a
/// checkpoint. Under candle-ddp's `DistributedDataParallel` a parameter may be used in several checkpoints and
/// outside them; its gradient is averaged once, when it is complete. [`Dropout`](super::Dropout) and
/// [`dropout`](super::dropout) use the same masks in both runs, and [`BatchNorm`](super::BatchNorm) updates its running
/// statistics in the first run alone (in PyTorch, in both). Any other state that `function` changes is changed twice, including the
/// statistics of candle's own `BatchNorm`.
///
/// `function` gets its inputs without their graph. Gradients flow to `inputs` and to parameters, but to no other
/// captured tensors. candle's own dropout uses different masks in the second run. Under [`no_grad`](super::no_grad) `function` runs
/// once, and nothing is kept.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// use candle_ddp_nn::{checkpoint, linear, relu};
/// # let varmap = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// # let x = Tensor::zeros((2, 8), DType::F32, &Device::Cpu)?;
/// let (first, second) = (linear(8, 32, vb.pp("first"))?, linear(32, 8, vb.pp("second"))?);
/// let y = checkpoint(&[&x], move |x| second.forward(&relu(&first.forward(&x[0])?)?))?;
/// # assert_eq!(y.backward()?.get_ids().count(), 4);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns the errors of `function`, and an error for a result that is not floating-point or inputs on several
/// devices.
pub fn checkpoint<F>(inputs: &[&Tensor], function: F) -> Result<Tensor>
where
    F: Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
{
    checkpoint_holding(inputs, move |inputs, _| Ok((function(inputs)?, ())))
}

/// The two times at which a checkpointed function runs.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    Forward,
    Backward,
}

/// [`checkpoint`] for a function that also returns what it holds: after its run in the backward pass, until gradients have flowed
/// through its result.
///
/// # Errors
/// Those of [`checkpoint`].
#[doc(hidden)]
pub fn checkpoint_holding<F, G>(inputs: &[&Tensor], function: F) -> Result<Tensor>
where
    F: Fn(&[Tensor], Run) -> Result<(Tensor, G)> + Send + Sync + 'static,
    G: 'static,
{
    let detached: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let (replay, result) = Replay::record(|| function(&detached, Run::Forward));
    let (result, held) = result?;
    if !result.dtype().is_float() {
        let is = candle_ddp_tensor::error::describe(result.dtype(), result.shape());
        let reason = format!("its result must be floating-point for gradients to flow, not {is}");
        return Err(Error::invalid("function", reason).into());
    }
    if !is_grad_enabled() {
        return Ok(result.detach());
    }
    let (leaves, mode) = (Leaves::of(&result), autocast_mode());
    let again = move |inputs: &[Tensor]| set_autocast(mode, || replay.play(|| function(inputs, Run::Backward)));
    let copy = rerun("checkpoint", inputs, leaves, &result.detach(), again);
    // The result may be a view of what is held.
    drop(held);
    copy
}
