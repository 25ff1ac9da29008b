//! A linear layer and the cross entropy of its output, as one operation: the head of a language model.
mod cpu;
mod cuda;
mod head;

use crate::autocast::{Casts, to_dtype};
use crate::cross_entropy::{CrossEntropyOptions, check, cross_entropy_with};
use crate::linear;
use crate::lora::adapter;
use crate::view::reshape;
use candle_core::{D, DType, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use head::Head;

/// Options of [`linear_cross_entropy_with`].
#[derive(Clone, Debug, Default)]
pub struct LinearCrossEntropyOptions {
    /// The options of the loss.
    pub cross_entropy: CrossEntropyOptions,
    /// The number of rows of `x` whose logits exist at the same time, at least 1. `None`, the default: all rows. The last chunk may
    /// be smaller. Chunks save memory: (rows − `batch_chunk_size`) × classes elements. They cost little time if they have some
    /// thousand rows, but in f16 and bf16 the gradients of `x` and `weight` are kept in f32 until the backward pass.
    pub batch_chunk_size: Option<usize>,
}

/// The cross entropy between x · weightᵀ + bias and `targets`. [`linear_cross_entropy_with`] with the default options.
///
/// # Errors
/// The errors of [`linear_cross_entropy_with`].
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, targets: &Tensor) -> Result<Tensor> {
    linear_cross_entropy_with(x, weight, bias, targets, LinearCrossEntropyOptions::default())
}

/// The cross entropy between the logits x · weightᵀ + bias and `targets`, as a scalar of dtype f32 (f64 for f64):
/// `torch.nn.functional.linear_cross_entropy`. The same as [`Linear`](crate::Linear) and
/// [`cross_entropy_with`](crate::cross_entropy_with), in less time and memory: nobody else sees the logits, so that their gradients
/// take their place, and on a GPU the rows of a vocabulary such as 50,257 begin at addresses that suit matrix products. (For that, a
/// call copies such a `weight`.)
///
/// `x` has the shape (…, features), `weight` (classes, features) and `bias` (classes), all of the same dtype, f32, f64, f16 or bf16.
/// `targets` has the shape of `x` without its last dimension, and the dtypes and values of
/// [`cross_entropy_with`](crate::cross_entropy_with). Logits are rounded to the dtype; the loss is calculated in f32 (f64 for f64).
///
/// The forward pass also calculates the gradients of the logits, and of its arguments if it takes chunks or runs on a CPU;
/// under [`no_grad`](crate::no_grad) it does not.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::linear_cross_entropy;
/// let (hidden, head) = (Tensor::ones((2, 5, 8), DType::F32, &Device::Cpu)?, Tensor::zeros((100, 8), DType::F32, &Device::Cpu)?);
/// let next_tokens = Tensor::zeros((2, 5), DType::U32, &Device::Cpu)?;
/// let loss = linear_cross_entropy(&hidden, &head, None, &next_tokens)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 100f32.ln());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for shapes, dtypes or devices that do not fit, a `batch_chunk_size` of 0, and
/// the targets and options that [`cross_entropy_with`](crate::cross_entropy_with) refuses; [`Error::UnsupportedDType`]. As there, targets
/// out of range make the loss NaN on a GPU.
pub fn linear_cross_entropy_with(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    options: LinearCrossEntropyOptions,
) -> Result<Tensor> {
    if let Some(adapter) = adapter::of(weight) {
        let logits = linear::adapted(&adapter, x, bias)?;
        let classes = logits.dim(D::Minus1)?;
        return cross_entropy_with(&reshape(&logits, ((), classes))?, &targets.flatten_all()?, options.cross_entropy);
    }
    let Some(casts) = Casts::of_product([x, weight].into_iter().chain(bias))? else {
        return with_head(x, (weight, weight.dtype()), bias, targets, options);
    };
    let bias = bias.map(|bias| casts.of(bias)).transpose()?;
    let (x, dtype) = (casts.of(x)?, casts.dtype_of(weight));
    // The loss is f32 in any case.
    with_head(&x, (&casts.unrounded(weight)?, dtype), bias.as_ref(), targets, options)
}

/// The loss, with the weight and the dtype that it is rounded to.
fn with_head(
    x: &Tensor,
    (weight, dtype): (&Tensor, DType),
    bias: Option<&Tensor>,
    targets: &Tensor,
    options: LinearCrossEntropyOptions,
) -> Result<Tensor> {
    let names = ["the input of linear_cross_entropy", "the bias of linear_cross_entropy"];
    linear::check(names, x, (weight, dtype), bias)?;
    let (classes, _) = weight.dims2()?;
    if targets.dims() != &x.dims()[..x.rank() - 1] || classes == 0 {
        let [x, weight, targets] = [x, weight, targets].map(|tensor| describe(tensor.dtype(), tensor.shape()));
        let reason = format!(
            "they must be (…, features), (classes, features) and (…), with at least one class, not {x}, {weight} and {targets}"
        );
        return Err(Error::invalid("the input, weight and targets of linear_cross_entropy", reason).into());
    }
    check(targets, classes, &options.cross_entropy)?;
    if options.batch_chunk_size == Some(0) {
        return Err(Error::invalid("batch_chunk_size", "it must be at least 1, or None for all rows").into());
    }
    let rows = targets.elem_count();
    let chunk = options.batch_chunk_size.unwrap_or(rows).clamp(1, rows.max(1));
    let (x, weight, bias) = (x.contiguous()?, weight.contiguous()?, bias.map(Tensor::contiguous).transpose()?);
    // On the CPU, it is rounded while it is packed.
    let weight = if x.device().is_cuda() { to_dtype(&weight, dtype)? } else { weight };
    let head = Head { x: &x, weight: &weight, bias: bias.as_ref(), chunk };
    match x.device().is_cuda() {
        true => cuda::linear_cross_entropy(&head, targets, &options.cross_entropy),
        false => cpu::linear_cross_entropy(&head, targets, &options.cross_entropy),
    }
}
