//! Other shapes of a tensor, without a cost in the backward pass.
use crate::autocast;
use candle_core::shape::{Dim, Dims, ShapeWithOneHole};
use candle_core::{Result, Shape, Tensor};
use candle_ddp_tensor::function::{Function, adopt, argument};

/// `x` with the shape `shape`, in which one `()` stands for the dimension that follows from the others: [`Tensor::reshape`].
///
/// This and [`flatten`], [`transpose`], [`permute`], [`narrow`] and [`cat`] are candle's operations, with the same results and gradients.
/// In the backward pass, candle adds the gradient of each to zeros, which takes two passes over the memory of its argument. Between
/// layers and functions of this crate, these pass the gradient on instead.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// # let varmap = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// use candle_ddp_nn::{linear, matmul, reshape, softmax, transpose};
/// let layer = linear(8, 8, vb)?;
/// // The scores of two heads: (samples, tokens, width) to (samples, heads, tokens, width / heads).
/// let x = layer.forward(&Tensor::ones((3, 5, 8), DType::F32, &Device::Cpu)?)?;
/// let heads = transpose(&reshape(&x, (3, 5, 2, 4))?, 1, 2)?;
/// let scores = softmax(&matmul(&heads, &transpose(&heads, 2, 3)?)?, 3)?;
/// assert_eq!(scores.dims(), [3, 2, 5, 5]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// candle's, for a shape of another number of elements.
pub fn reshape(x: &Tensor, shape: impl ShapeWithOneHole) -> Result<Tensor> {
    adopt(argument(x).reshape(shape)?, &[x], Reshape(x.shape().clone()))
}

/// `x` with its dimensions from `start` to `end`, inclusive, as one: [`Tensor::flatten`]. See [`reshape`].
///
/// # Errors
/// candle's, for dimensions that `x` does not have.
pub fn flatten(x: &Tensor, start: impl Dim, end: impl Dim) -> Result<Tensor> {
    adopt(argument(x).flatten(start, end)?, &[x], Reshape(x.shape().clone()))
}

/// `x` with two of its dimensions exchanged: [`Tensor::transpose`], a view. See [`reshape`].
///
/// # Errors
/// candle's, for dimensions that `x` does not have.
pub fn transpose(x: &Tensor, first: impl Dim, second: impl Dim) -> Result<Tensor> {
    let (first, second) = (first.to_index(x.shape(), "transpose")?, second.to_index(x.shape(), "transpose")?);
    let mut dims: Vec<usize> = (0..x.rank()).collect();
    dims.swap(first, second);
    adopt(argument(x).transpose(first, second)?, &[x], Permute(dims))
}

/// `x` with its dimensions in the order `dims`: [`Tensor::permute`], a view. See [`reshape`].
///
/// # Errors
/// candle's, if `dims` does not name each dimension once.
pub fn permute(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    let dims = dims.to_indexes(x.shape(), "permute")?;
    let y = argument(x).permute(dims.clone())?;
    let mut inverse = vec![0; dims.len()];
    for (to, &from) in dims.iter().enumerate() {
        inverse[from] = to;
    }
    adopt(y, &[x], Permute(inverse))
}

/// The `length` elements of `x` from `start` in the dimension `dim`: [`Tensor::narrow`], a view. See [`reshape`].
///
/// # Errors
/// candle's, for elements that `x` does not have.
pub fn narrow(x: &Tensor, dim: impl Dim, start: usize, length: usize) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "narrow")?;
    adopt(argument(x).narrow(dim, start, length)?, &[x], Narrow { shape: x.shape().clone(), dim, start })
}

/// The tensors one after the other in the dimension `dim`: [`Tensor::cat`]. See [`reshape`].
///
/// Under [`autocast`](crate::autocast()) by lists, tensors of several dtypes become f32.
///
/// # Errors
/// candle's, for no tensors, or if they differ in another dimension or in dtype.
pub fn cat(tensors: &[&Tensor], dim: impl Dim) -> Result<Tensor> {
    let is_mixed = autocast::is_mixed(tensors);
    let part = |x: &&Tensor| if is_mixed { autocast::wide(x) } else { Ok((*x).clone()) };
    let tensors = tensors.iter().map(part).collect::<Result<Vec<Tensor>>>()?;
    let arguments: Vec<Tensor> = tensors.iter().map(argument).collect();
    let Some(first) = arguments.first() else { return Tensor::cat(&arguments, dim) };
    let dim = dim.to_index(first.shape(), "cat")?;
    let y = Tensor::cat(&arguments, dim)?;
    let lengths = tensors.iter().map(|tensor| tensor.dims()[dim]).collect();
    adopt(y, &tensors.iter().collect::<Vec<_>>(), Cat { dim, lengths })
}

/// `x`, or a contiguous copy of it. candle would add the gradients of the copy, and of each view before it, to zeros.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    adopt(argument(x).contiguous()?, &[x], Contiguous)
}

struct Contiguous;

impl Function for Contiguous {
    fn name(&self) -> &'static str {
        "contiguous"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient.clone())])
    }
}

/// The argument's shape.
struct Reshape(Shape);

impl Function for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient.reshape(self.0.dims())?)])
    }
}

/// The order of the dimensions that undoes the view.
struct Permute(Vec<usize>);

impl Function for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient.permute(self.0.clone())?)])
    }
}

struct Narrow {
    /// The argument's.
    shape: Shape,
    dim: usize,
    start: usize,
}

impl Function for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let whole = Tensor::zeros(&self.shape, gradient.dtype(), gradient.device())?;
        if gradient.elem_count() > 0 {
            whole.slice_set(gradient, self.dim, self.start)?;
        }
        Ok(vec![Some(whole)])
    }
}

struct Cat {
    dim: usize,
    lengths: Vec<usize>,
}

impl Function for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let mut start = 0;
        let part = |&length: &usize| {
            let part = gradient.narrow(self.dim, start, length)?;
            start += length;
            Ok(Some(part))
        };
        self.lengths.iter().map(part).collect()
    }
}
