//! Linear layers.
pub(crate) mod cuda;
pub(crate) mod product;
mod uneven;

pub(crate) use uneven::is_uneven;

use super::autocast::{Casts, to_dtype};
use super::gemm::{self, Strides, threads};
use super::lora::adapter::{self, Adapter};
use super::view::contiguous;
use candle_core::{D, DType, Module, Result, Shape, Storage, Tensor, WithDType};
use candle_ddp_tensor::borrow::{slice_tensor, with_slice};
use candle_ddp_tensor::column_sums::column_sums;
use candle_ddp_tensor::dispatch;
use candle_ddp_tensor::error::describe_placed;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::{Element, Error};
use candle_nn::{Init, VarBuilder};
use product::Extents;

/// y = x · Wᵀ + b: `torch.nn.Linear`, and a drop-in for [`candle_nn::Linear`] with the same names in the `VarMap`
/// (`weight` of shape (out, in), `bias` of shape (out)). Made by [`linear`] and [`linear_no_bias`].
///
/// Takes tensors of one or more dimensions, the last of which has `in` elements, of dtype f32, f64, f16 or bf16; f16
/// and bf16 are multiplied and added in f32. The bias is added inside the matrix product; on CUDA, cuBLASLt
/// adds it in large products, and in others a kernel writes it to the output first.
///
/// ```
/// # use candle_core::{Device, Module, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::Linear;
/// let weight = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
/// let layer = Linear::new(weight, Some(Tensor::new(&[10f32, 20., 30.], &Device::Cpu)?));
/// let y = layer.forward(&Tensor::new(&[[1f32, 1.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[13., 27., 41.]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

/// A [`Linear`] layer with a bias, initialised as candle-nn's: the weight by Kaiming's normal distribution, the bias uniformly
/// between ±1/√in.
///
/// # Errors
/// Returns the errors of `vb`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(out_dim, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Linear::new(weight, Some(bias)))
}

/// A [`Linear`] layer without a bias.
///
/// # Errors
/// Returns the errors of `vb`.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Linear::new(weight, None))
}

/// [`linear`] or [`linear_no_bias`].
///
/// # Errors
/// Returns the errors of `vb`.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias { linear(in_dim, out_dim, vb) } else { linear_no_bias(in_dim, out_dim, vb) }
}

impl Linear {
    /// A layer with `weight`, of shape (out, in), and `bias`, of shape (out).
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// The weight, of shape (out, in).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, of shape (out), if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    /// # Errors
    /// Returns an error for an input of another width, dtype or device than the weight, or of a dtype that is not
    /// floating-point.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Self { weight, bias } = self;
        if let Some(adapter) = adapter::of(weight) {
            return adapted(&adapter, x, bias.as_ref());
        }
        let Some(casts) = Casts::of_product([x, weight].into_iter().chain(bias))? else {
            return multiply(x, (weight, weight.dtype()), bias.as_ref());
        };
        let bias = bias.as_ref().map(|bias| casts.of(bias)).transpose()?;
        let y = multiply(&casts.of(x)?, (&casts.unrounded(weight)?, casts.dtype_of(weight)), bias.as_ref())?;
        casts.result(y, x)
    }
}

/// The result of a layer whose weight has this adapter. Its gradients come from two narrow products.
pub(crate) fn adapted(adapter: &Adapter, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = Linear::new(adapter.base().clone(), bias.cloned()).forward(x)?;
    let delta = adapter.multiplied(x, |x| {
        let [down, up] = adapter.matrices()?;
        Linear::new(up, None).forward(&adapter.scaled(&Linear::new(down, None).forward(x)?)?)
    })?;
    adapter::sum(&y, &delta)
}

/// x · Wᵀ + b, with the weight and the dtype that it is rounded to.
fn multiply(x: &Tensor, (weight, dtype): (&Tensor, DType), bias: Option<&Tensor>) -> Result<Tensor> {
    check(["the input of Linear", "the bias of Linear"], x, (weight, dtype), bias)?;
    let (x, weight) = (contiguous(x)?, contiguous(weight)?);
    let product = Product { x: x.detach(), weight: weight.detach() };
    let result = product.forward(bias)?;
    match bias {
        Some(bias) => apply(&[&x, &weight, bias], result, product),
        None => apply(&[&x, &weight], result, product),
    }
}

/// Refuses arguments that do not fit each other; `names` are those of the input and of the bias. `dtype` is the one that the weight is
/// rounded to.
pub(crate) fn check(
    names: [&'static str; 2],
    x: &Tensor,
    (weight, dtype): (&Tensor, DType),
    bias: Option<&Tensor>,
) -> Result<()> {
    let (out, features) = weight.dims2()?;
    let alike = |other: &Tensor| other.dtype() == dtype && other.device().same_device(weight.device());
    if x.rank() == 0 || x.dim(D::Minus1)? != features || !alike(x) {
        let reason = format!(
            "it is {}, and the weight is {}: it must be (…, {features}) of the same dtype and on the same device",
            describe_placed(x),
            describe_placed(weight)
        );
        return Err(Error::invalid(names[0], reason).into());
    }
    if let Some(bias) = bias
        && (bias.dims() != [out] || !alike(bias))
    {
        let reason = format!(
            "it is {}, and the weight is {}: it must be ({out}) of the same dtype and on the same device",
            describe_placed(bias),
            describe_placed(weight)
        );
        return Err(Error::invalid(names[1], reason).into());
    }
    Ok(())
}

/// The product, with the tensors that its gradients need.
struct Product {
    x: Tensor,
    /// The weight in the dtype of `x`, or in f32, which is rounded to that dtype in each pass, on the CPU while it is packed.
    weight: Tensor,
}

impl Product {
    /// Rows, inputs and outputs.
    fn extents(&self) -> Result<Extents> {
        let (out, features) = self.weight.dims2()?;
        let rows = self.x.dims()[..self.x.rank() - 1].iter().product();
        Ok((rows, features, out))
    }

    fn forward(&self, bias: Option<&Tensor>) -> Result<(Storage, Shape)> {
        let (rows, features, out) = self.extents()?;
        let extents = (rows, out, features);
        let mut shape = self.x.dims().to_vec();
        shape.pop();
        shape.push(out);
        if self.x.device().is_cuda() {
            let (weight, shape) = (to_dtype(&self.weight, self.x.dtype())?, Shape::from(shape));
            return Ok(cuda::forward((rows, features, out), &self.x, &weight, bias, shape)?.into_result());
        }
        let storage = dispatch!(self.x.dtype(), "Linear", T => {
            let b = Strides::transposed(features);
            with_slice::<T, _>(&self.x, |x| {
                let y = match bias {
                    Some(bias) => {
                        with_slice::<T, _>(bias, |bias| self.by_weight(extents, (x, Strides::rows(features)), b, Some(bias)))?
                    }
                    None => self.by_weight(extents, (x, Strides::rows(features)), b, None)?,
                };
                Ok(T::to_cpu_storage_owned(y))
            })
        })?;
        Ok((Storage::Cpu(storage), Shape::from(shape)))
    }

    /// a · b + bias, where b is the weight, or its transpose, in the CPU's memory.
    fn by_weight<T: Element>(
        &self,
        extents: Extents,
        a: (&[T], Strides),
        b: Strides,
        bias: Option<&[T]>,
    ) -> Result<Vec<T>> {
        match self.weight.dtype() == T::DTYPE {
            true => with_slice::<T, _>(&self.weight, |weight| gemm::product(extents, a, (weight, b), bias, threads())),
            false => {
                with_slice::<T::Real, _>(&self.weight, |weight| gemm::product(extents, a, (weight, b), bias, threads()))
            }
        }
    }

    /// The weight's gradient, dyᵀ · x, in the weight's dtype.
    fn d_weight<T: Element>(&self, extents: Extents, dy: &[T], x: &[T]) -> Result<Tensor> {
        let (dy, x) = ((dy, Strides::transposed(extents.0)), (x, Strides::rows(extents.1)));
        let shape = self.weight.shape();
        if self.weight.dtype() == T::DTYPE {
            return Ok(slice_tensor(gemm::product(extents, dy, x, None, threads())?, shape));
        }
        let mut d_weight = vec![T::Real::default(); shape.elem_count()];
        gemm::gemm(extents, &mut d_weight, false, dy, x, threads())?;
        Ok(slice_tensor(d_weight, shape))
    }
}

impl Function for Product {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn backward(&self, dy: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let (rows, features, out) = self.extents()?;
        let needs_bias = needed.get(2) == Some(&true);
        if dy.device().is_cuda() {
            let (extents, needed) = ((rows, features, out), [needed[0], needed[1], needs_bias]);
            let weight = to_dtype(&self.weight, self.x.dtype())?;
            let [dx, d_weight, d_bias] = cuda::gradients(extents, [&self.x, &weight, dy], needed)?;
            let d_weight = d_weight.map(|gradient| to_dtype(&gradient, self.weight.dtype())).transpose()?;
            return Ok(vec![dx, d_weight, d_bias]);
        }
        let mut gradients = vec![None; needed.len()];
        if needs_bias {
            gradients[2] = Some(column_sums(dy, &Shape::from(out))?);
        }
        dispatch!(dy.dtype(), "Linear", T => with_slice::<T, _>(dy, |dy| {
            if needed[0] {
                let (dy, weight) = ((dy, Strides::rows(out)), Strides::rows(features));
                let dx = self.by_weight((rows, features, out), dy, weight, None)?;
                gradients[0] = Some(slice_tensor(dx, self.x.shape()));
            }
            if needed[1] {
                gradients[1] = Some(with_slice::<T, _>(&self.x, |x| self.d_weight((out, features, rows), dy, x))?);
            }
            Ok(gradients)
        }))
    }
}
