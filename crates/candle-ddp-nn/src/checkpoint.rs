//! Activation checkpointing: the backward pass recomputes a function's intermediate results, which are not kept.
use crate::{autocast_mode, set_autocast};
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
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
/// It may return a tensor, or several in a pair, a triple or a `Vec`. They leave the checkpoint in one message of the widest dtype, so that a
/// sum of their gradients begins the second run; those of integers have no gradient.
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
/// Returns the errors of `function`, and an error for a result without a floating-point tensor, or inputs or results on several
/// devices.
pub fn checkpoint<F, T>(inputs: &[&Tensor], function: F) -> Result<T>
where
    F: Fn(&[Tensor]) -> Result<T> + Send + Sync + 'static,
    T: Results,
{
    checkpoint_holding(inputs, move |inputs, _| Ok((function(inputs)?, ())))
}

/// The two times at which a checkpointed function runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Without a graph.
    Forward,
    /// Once more, with the graph that gradients need.
    Backward,
}

/// The result of a checkpointed function: a tensor, or several.
pub trait Results: Sized {
    /// Replaces each tensor, in order.
    ///
    /// # Errors
    /// The errors of `replace`.
    fn replace(self, replace: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Results for Tensor {
    fn replace(self, replace: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        replace(self)
    }
}

impl<A: Results, B: Results> Results for (A, B) {
    fn replace(self, replace: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.replace(replace)?, self.1.replace(replace)?))
    }
}

impl<A: Results, B: Results, C: Results> Results for (A, B, C) {
    fn replace(self, replace: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.replace(replace)?, self.1.replace(replace)?, self.2.replace(replace)?))
    }
}

impl<T: Results> Results for Vec<T> {
    fn replace(self, replace: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(|results| results.replace(replace)).collect()
    }
}

/// [`checkpoint`] for a function that also returns what it holds: after its run in the backward pass, until gradients have flowed
/// through its result.
///
/// # Errors
/// The errors of [`checkpoint`].
pub fn checkpoint_holding<F, T, G>(inputs: &[&Tensor], function: F) -> Result<T>
where
    F: Fn(&[Tensor], Run) -> Result<(T, G)> + Send + Sync + 'static,
    T: Results,
    G: 'static,
{
    let detached: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let (replay, result) = Replay::record(|| function(&detached, Run::Forward));
    let (results, held) = result?;
    let mut last = None;
    let (results, joined) = join(results, |other| last = Some(other.clone()))?;
    let Some(joined) = joined else {
        let is = last.map_or("none".to_string(), |last| describe(last.dtype(), last.shape()));
        let reason = format!("its result must be floating-point for gradients to flow, not {is}");
        return Err(Error::invalid("function", reason).into());
    };
    if !is_grad_enabled() {
        return results.replace(&mut |result| Ok(result.detach()));
    }
    let (leaves, mode) = (Leaves::of(&joined), autocast_mode());
    let again = move |inputs: &[Tensor]| {
        let (results, held) = set_autocast(mode, || replay.play(|| function(inputs, Run::Backward)))?;
        match join(results, |_| ())? {
            (_, Some(joined)) => Ok((joined, held)),
            (_, None) => Err(Error::invalid("function", "its second run returned no floating-point tensor").into()),
        }
    };
    let copy = rerun("checkpoint", inputs, leaves, &joined.detach(), again)?;
    // The results may be views of what is held.
    let results = split(results, &copy);
    drop(held);
    results
}

/// All floating-point results as one tensor: the only one as it is, several as a list of their numbers in the widest dtype. The `others` have no
/// gradient.
fn join<T: Results>(results: T, mut others: impl FnMut(&Tensor)) -> Result<(T, Option<Tensor>)> {
    let mut floats = Vec::new();
    let results = results.replace(&mut |result| {
        if result.dtype().is_float() {
            floats.push(result.clone())
        } else {
            others(&result)
        }
        Ok(result)
    })?;
    let Some(first) = floats.first().filter(|_| floats.len() > 1) else { return Ok((results, floats.pop())) };
    let dtype = floats.iter().fold(first.dtype(), |widest, float| match (widest, float.dtype()) {
        (one, other) if one == other => one,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        // There is no wider one of two that have 16 bits.
        _ => DType::F32,
    });
    let lists = floats.iter().map(|float| float.flatten_all()?.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
    Ok((results, Some(Tensor::cat(&lists, 0)?)))
}

/// Gives the floating-point `results` the values, and the graph, of what [`join`] has made of them.
fn split<T: Results>(results: T, joined: &Tensor) -> Result<T> {
    let mut count = 0;
    let results = results.replace(&mut |result| {
        count += usize::from(result.dtype().is_float());
        Ok(result)
    })?;
    let mut start = 0;
    results.replace(&mut |result| {
        if !result.dtype().is_float() {
            return Ok(result.detach());
        }
        if count == 1 {
            return Ok(joined.clone());
        }
        let part = joined.narrow(0, start, result.elem_count())?.reshape(result.shape())?.to_dtype(result.dtype())?;
        start += result.elem_count();
        Ok(part)
    })
}
