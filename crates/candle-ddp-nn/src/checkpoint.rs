//! Activation checkpointing: what lies between the inputs and the result of a function is computed again in the backward
//! pass, instead of being kept.
use candle_core::{Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::{Leaves, rerun};
use candle_ddp_tensor::seed::Replay;

/// Computes `function` of `inputs` and keeps nothing but these for the backward pass, which computes `function` once more:
/// `torch.utils.checkpoint.checkpoint`. It takes the memory of what lies in between for the time of a forward pass more.
///
/// The result, its gradients and those of the parameters that `function` uses are those without a checkpoint. Under
/// [`DistributedDataParallel`](crate::DistributedDataParallel) a parameter may be used in several checkpoints and outside of
/// them; its gradient is averaged once, when it is complete. [`Dropout`](super::Dropout) and [`dropout`](super::dropout)
/// use the same masks in both runs. What else `function` changes, it changes twice: the running statistics of batch
/// normalisation, for example, as in PyTorch.
///
/// `function` gets its inputs without their graph. Gradients flow to `inputs` and to parameters, and to nothing else that
/// `function` has captured. Candle's own dropout has other masks in the second run.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// use candle_ddp::nn::{checkpoint, linear, relu};
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
/// Those of `function`; a result of no floating-point dtype; inputs on several devices.
pub fn checkpoint<F>(inputs: &[&Tensor], function: F) -> Result<Tensor>
where
    F: Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
{
    let detached: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let (replay, result) = Replay::record(|| function(&detached));
    let result = result?;
    if !result.dtype().is_float() {
        let is = candle_ddp_tensor::error::describe(result.dtype(), result.shape());
        return Err(Error::invalid("function", format!("its result is {is}, through which no gradient flows")).into());
    }
    let leaves = Leaves::of(&result);
    rerun("checkpoint", inputs, leaves, &result.detach(), move |inputs| replay.play(|| function(inputs)))
}
