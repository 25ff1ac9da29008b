//! Attention on CUDA by cuDNN, where it has kernels: a pass is one call, which finds heads side by side where they are. All else runs as
//! in `cuda.rs`.
use super::cuda::{self, APART, Heads, PACKED, gradients, packed_gradients};
use super::problem::{AttentionOptions, Problem};
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::kernels::{self, Address, AttendShape, AttendTensors, Output, address};
use std::sync::{Arc, OnceLock};

/// The tensors are contiguous, and there are queries and keys.
pub(super) fn attention(qkv: [&Tensor; 3], problem: Problem) -> Result<Tensor> {
    match whole(&qkv, problem)? {
        Ok(y) => Ok(y),
        Err(problem) => cuda::attention(qkv, problem),
    }
}

/// The same for heads side by side: `qkv` has the shape (B, T, 3 × H × D), the result (B, T, H × D).
pub(super) fn packed(qkv: &Tensor, heads: usize, options: &AttentionOptions) -> Result<Tensor> {
    let qkv = &qkv.contiguous()?;
    let (batch, tokens, width) = qkv.dims3()?;
    let shape = (batch, tokens, 3, heads, width / (3 * heads));
    // All three have the shape of the first, of which this is a view.
    let part = qkv.detach().reshape(shape)?.narrow(2, 0, 1)?.squeeze(2)?.transpose(1, 2)?;
    match whole(&[qkv], Problem::new([&part; 3], options)?)? {
        Ok(y) => Ok(y),
        Err(problem) => cuda::packed(qkv, problem),
    }
}

/// Values that the backward pass needs.
struct Attention {
    problem: Problem,
    shape: AttendShape,
    /// q, k and v, or one tensor with all three.
    inputs: Vec<Tensor>,
    normalisers: Output,
    result: Arc<OnceLock<Tensor>>,
}

/// Attention of q, k and v, or of one tensor with all three and the heads side by side. Gives the problem back if cuDNN has nothing for
/// it, as for masks.
fn whole(inputs: &[&Tensor], problem: Problem) -> Result<std::result::Result<Tensor, Problem>> {
    let (dtype, device) = (inputs[0].dtype(), inputs[0].device().as_cuda_device()?);
    let Problem { batch, heads, group, queries, keys, size, value_size, is_causal, .. } = problem;
    let (key_heads, is_packed) = (heads / group, inputs.len() == 1);
    let side_by_side = is_packed.then_some(heads);
    let shape = AttendShape { batch, heads, key_heads, queries, keys, size, value_size, is_causal, side_by_side };
    // A plan belongs to one length, and documents have many.
    if problem.mask.is_some() || problem.is_packed() || !kernels::may_attend(dtype, &shape)? {
        return Ok(Err(problem));
    }
    let y = match is_packed {
        true => Output::new(device, dtype, (batch, queries, heads * size))?,
        false => Output::new(device, dtype, problem.output_shape())?,
    };
    let normalisers = Output::new(device, candle_ddp_tensor::accumulator(dtype), (batch, heads, queries))?;
    let tensors = AttendTensors {
        qkv: parts((&shape, dtype), inputs, |input| address(input))?,
        y: y.address()?,
        normalisers: normalisers.address()?,
        backward: None,
    };
    if !kernels::attend(device, dtype, &shape, problem.scale, &tensors)? {
        return Ok(Err(problem));
    }
    let (detached, result) = (inputs.iter().map(|input| input.detach()).collect(), Arc::default());
    let function = Attention { problem, shape, inputs: detached, normalisers, result: Arc::clone(&result) };
    let y = apply(inputs, y.into_result(), function)?;
    let _ = result.set(y.detach());
    Ok(Ok(y))
}

/// The addresses of queries, keys and values, or of their gradients.
fn parts<'a, T>(
    (shape, dtype): (&AttendShape, DType),
    tensors: &'a [T],
    address: impl Fn(&'a T) -> candle_ddp_tensor::Result<Address<'a>>,
) -> Result<[Address<'a>; 3]> {
    match tensors {
        [q, k, v] => Ok([address(q)?, address(k)?, address(v)?]),
        [together, ..] => {
            let first = address(together)?;
            Ok([0, 1, 2].map(|part| first.skip(part * shape.heads * shape.size, dtype)))
        }
        [] => candle_core::bail!("attention has no tensors"),
    }
}

impl Function for Attention {
    fn name(&self) -> &'static str {
        if self.shape.side_by_side.is_some() { PACKED } else { APART }
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { problem, shape, inputs, normalisers, result } = self;
        let Some(y) = result.get() else {
            candle_core::bail!("attention's backward pass runs before its result is stored")
        };
        let (dtype, device) = (dy.dtype(), dy.device().as_cuda_device()?);
        let found = inputs.iter().map(|input| Ok(Output::new(device, dtype, input.shape())?));
        let found = found.collect::<Result<Vec<_>>>()?;
        let tensors = AttendTensors {
            qkv: parts((shape, dtype), inputs, address)?,
            y: address(y)?,
            normalisers: normalisers.address()?,
            backward: Some((address(dy)?, parts((shape, dtype), &found, Output::address)?)),
        };
        if kernels::attend(device, dtype, shape, problem.scale, &tensors)? {
            return Ok(found.into_iter().map(|output| Some(output.into_tensor())).collect());
        }
        match inputs.as_slice() {
            [q, k, v] => gradients(problem, &[q, k, v].map(Tensor::clone), normalisers, dy),
            [qkv, ..] => packed_gradients(problem, &Heads::new(problem).apart(qkv)?, normalisers, dy),
            [] => candle_core::bail!("attention has no tensors"),
        }
    }
}
