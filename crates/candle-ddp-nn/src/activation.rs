//! Activation functions, each with one operation forward and one backward.
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor, WithDType,
};
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::function::{argument, op1_in};
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, MemoryFormat, Real, dispatch, vectorise};
#[doc(no_inline)]
pub use candle_nn::activation::*;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// The number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;
/// The coefficient of the cube in the approximation of gelu.
const CUBE: f64 = 0.044_715;

/// max(x, 0), and NaN where x is NaN: `torch.nn.functional.relu`. Unlike with candle's `Tensor::relu`, the gradient
/// at 0 is 0.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::relu;
/// let y = relu(&Tensor::new(&[-2f32, 0., 3.], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0., 0., 3.]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType), carried by candle's error.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    Operation::Relu.apply(x)
}

/// x × (1 + tanh(√(2 / π) × (x + 0.044715 x³))) / 2: `torch.nn.functional.gelu(x, approximate='tanh')`, and candle's
/// `Tensor::gelu`. It approximates [`gelu_erf`].
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for f64).
///
/// # Errors
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType), carried by candle's error.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    Operation::Gelu.apply(x)
}

/// x × (1 + erf(x / √2)) / 2: `torch.nn.functional.gelu(x)`, and candle's `Tensor::gelu_erf`, whose gradient is
/// accurate to only six digits.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for f64).
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::gelu_erf;
/// let y = gelu_erf(&Tensor::new(&[0f32, 1., -10.], &Device::Cpu)?)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 0.841345).abs() < 1e-6 && y[2].abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType), carried by candle's error.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    Operation::GeluErf.apply(x)
}

/// x / (1 + e^−x): `torch.nn.functional.silu`, and a drop-in for `candle_nn::ops::silu`.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for f64).
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::silu;
/// let y = silu(&Tensor::new(&[0f32, 3f32.ln()], &Device::Cpu)?)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 0.75 * 3f32.ln()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType), carried by candle's error.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    Operation::Silu.apply(x)
}

/// The hyperbolic tangent: `torch.tanh`, and candle's `Tensor::tanh`. Where logits are capped, it is `c × tanh(x / c)`.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for f64).
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::tanh;
/// let y = tanh(&Tensor::new(&[0f32, 3f32.ln(), -50.], &Device::Cpu)?)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 0.8).abs() < 1e-6 && y[2] == -1.);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType), carried by candle's error.
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    Operation::Tanh.apply(x)
}

/// An activation function by its name in a model's config: a drop-in for [`candle_nn::Activation`], with the same names in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// [`gelu_erf`], as `torch.nn.GELU()`.
    #[default]
    #[serde(alias = "gelu")]
    Gelu,
    /// [`gelu`], the approximation with tanh.
    #[serde(alias = "gelu_new")]
    NewGelu,
    /// [`relu`].
    Relu,
    /// relu(x)².
    Relu2,
    /// min(max(x, 0), 6).
    Relu6,
    /// [`silu`].
    Silu,
    /// 1 / (1 + e^−x).
    Sigmoid,
    /// min(max((x + 3) / 6, 0), 1).
    HardSigmoid,
    /// silu(a) × b of the two halves of the last dimension.
    Swiglu,
    /// [`silu`], by another name.
    Swish,
    /// x × tanh(ln(1 + e^x)).
    Mish,
    /// x × min(max((x + 3) / 6, 0), 1).
    HardSwish,
    /// x above 0, and otherwise this factor times e^x − 1.
    Elu(f64),
    /// x above 0, and otherwise this factor times x.
    LeakyRelu(f64),
    /// [`gelu`], by Hugging Face's name.
    #[serde(alias = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        use candle_nn::Activation as Candles;
        let candles = match *self {
            Self::Gelu => return gelu_erf(x),
            Self::NewGelu | Self::GeluPytorchTanh => return gelu(x),
            Self::Relu => return relu(x),
            Self::Relu2 => return relu(x)?.sqr(),
            Self::Silu | Self::Swish => return silu(x),
            Self::Mish => return mish(x),
            Self::Relu6 => Candles::Relu6,
            Self::Sigmoid => Candles::Sigmoid,
            Self::HardSigmoid => Candles::HardSigmoid,
            Self::Swiglu => Candles::Swiglu,
            Self::HardSwish => Candles::HardSwish,
            Self::Elu(alpha) => Candles::Elu(alpha),
            Self::LeakyRelu(slope) => Candles::LeakyRelu(slope),
        };
        candles.forward(&argument(x))
    }
}

/// ln(1 + e^x), finite for every finite x. candle's gradients of both terms add up to the correct one at 0 too.
pub(super) fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

/// x × tanh(ln(1 + e^x)): a drop-in for `candle_nn::ops::mish`, whose gradient is NaN for large x.
///
/// # Errors
/// Returns candle's error for an integer dtype.
pub fn mish(x: &Tensor) -> Result<Tensor> {
    let x = argument(x);
    &x * softplus(&x)?.tanh()?
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Relu,
    Gelu,
    GeluErf,
    Silu,
    Tanh,
}

impl Operation {
    fn apply(self, x: &Tensor) -> Result<Tensor> {
        if x.elem_count() == 0 {
            return argument(x).affine(1.0, 0.0);
        }
        op1_in(MemoryFormat::of(x), x, self)
    }

    fn forward<T: Element>(self, x: &[T]) -> Vec<T> {
        let mut y = vec![T::from_f64(0.0); x.len()];
        y.par_chunks_mut(BLOCK_ELEMENTS).zip(x.par_chunks(BLOCK_ELEMENTS)).each(|(y, x)| match self {
            Self::Relu => relu_values(y, x),
            Self::Gelu => gelu_values(y, x),
            Self::GeluErf => gelu_erf_values(y, x),
            Self::Silu => silu_values(y, x),
            Self::Tanh => tanh_values(y, x),
        });
        y
    }

    /// Whether the gradient follows from the result, and not from `x`.
    fn is_of_result(self) -> bool {
        matches!(self, Self::Relu | Self::Tanh)
    }

    /// `x` is the result if it [follows](Self::is_of_result) from that.
    fn backward<T: Element>(self, x: &[T], dy: &[T]) -> Vec<T> {
        let mut dx = vec![T::from_f64(0.0); x.len()];
        let blocks = dx.par_chunks_mut(BLOCK_ELEMENTS).zip(x.par_chunks(BLOCK_ELEMENTS));
        blocks.zip(dy.par_chunks(BLOCK_ELEMENTS)).each(|((dx, x), dy)| match self {
            Self::Relu => relu_gradients(dx, x, dy),
            Self::Gelu => gelu_gradients(dx, x, dy),
            Self::GeluErf => gelu_erf_gradients(dx, x, dy),
            Self::Silu => silu_gradients(dx, x, dy),
            Self::Tanh => tanh_gradients(dx, x, dy),
        });
        dx
    }

    fn launch(
        self,
        device: &CudaDevice,
        (kernel, dtype): (Kernel, DType),
        elements: usize,
        tensors: &[Address],
    ) -> Result<()> {
        // The same order as in elementwise.cu.
        let vector = Address::vector(tensors, elements, dtype);
        let (grid, numbers) = (Grid::Threads(elements / vector), &[elements, vector, self as usize]);
        Ok(kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals: &[] })?)
    }
}

#[inline(always)]
pub(crate) fn sigmoid<R: Real>(x: R) -> R {
    let one = R::from_f64(1.0);
    one / (one + (-x).exp())
}

/// Twice the argument of gelu's hyperbolic tangent: (1 + tanh(u)) / 2 is the sigmoid of 2u.
#[inline(always)]
fn gelu_argument<R: Real>(x: R) -> R {
    x * (R::from_f64(1.0) + R::from_f64(CUBE) * x * x) * R::from_f64((8.0 / PI).sqrt())
}

/// The type used for arithmetic.
#[inline(always)]
fn c<R: Real>(value: f64) -> R {
    R::from_f64(value)
}

/// Loops over the elements: y of x, and dx of x and dy.
macro_rules! activation {
    ($values:ident, $gradients:ident, |$x:ident| $value:expr, |$of:ident, $dy:ident| $gradient:expr) => {
        fn $values<T: Element>(y: &mut [T], x: &[T]) {
            vectorise!(move || {
                for (y, x) in y.iter_mut().zip(x) {
                    let $x = x.widen();
                    *y = T::narrow($value);
                }
            })
        }

        fn $gradients<T: Element>(dx: &mut [T], x: &[T], dy: &[T]) {
            vectorise!(move || {
                for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
                    let ($of, $dy) = (x.widen(), dy.widen());
                    *dx = T::narrow($gradient);
                }
            })
        }
    };
}

activation!(relu_values, relu_gradients, |x| if x <= c(0.0) { c(0.0) } else { x }, |y, dy| {
    if y <= c(0.0) { c(0.0) } else { dy }
});
activation!(gelu_values, gelu_gradients, |x| x * sigmoid(gelu_argument(x)), |x, dy| {
    let s = sigmoid(gelu_argument(x));
    let slope = c::<T::Real>((8.0 / PI).sqrt()) * (c::<T::Real>(1.0) + c::<T::Real>(3.0 * CUBE) * x * x);
    dy * (s + x * s * (c::<T::Real>(1.0) - s) * slope)
});
activation!(gelu_erf_values, gelu_erf_gradients, |x| x * x.normal_cdf(), |x, dy| {
    let density = (x * x * c(-0.5)).exp() * c(FRAC_1_SQRT_2 / PI.sqrt());
    dy * (x.normal_cdf() + x * density)
});
activation!(silu_values, silu_gradients, |x| x * sigmoid(x), |x, dy| {
    let s = sigmoid(x);
    dy * s * (c::<T::Real>(1.0) + x * (c::<T::Real>(1.0) - s))
});

activation!(tanh_values, tanh_gradients, |x| x.tanh(), |y, dy| dy * (c::<T::Real>(1.0) - y * y));

impl CustomOp1 for Operation {
    fn name(&self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Gelu => "gelu",
            Self::GeluErf => "gelu_erf",
            Self::Silu => "silu",
            Self::Tanh => "tanh",
        }
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = dispatch!(x.dtype(), self.name(), T => {
            Ok(T::to_cpu_storage_owned(self.forward(slice::<T>(x, layout)?)))
        })?;
        Ok((y, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        kernels::supported(x.dtype(), self.name())?;
        let y = Output::new(x.device(), x.dtype(), layout.shape())?;
        let tensors = [kernels::storage_address(x, layout)?, y.address()?];
        self.launch(x.device(), (Kernel::Activation, x.dtype()), layout.shape().elem_count(), &tensors)?;
        Ok(y.into_parts())
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (of, dy) = (if self.is_of_result() { y } else { x }, dy.contiguous()?);
        if let Device::Cuda(device) = x.device() {
            let dx = Output::new(device, x.dtype(), x.shape())?;
            let tensors = [kernels::address(of)?, kernels::address(&dy)?, dx.address()?];
            self.launch(device, (Kernel::ActivationBackward, x.dtype()), x.elem_count(), &tensors)?;
            return Ok(Some(dx.into_tensor()));
        }
        dispatch!(x.dtype(), self.name(), T => with_slice::<T, _>(of, |of| with_slice::<T, _>(&dy, |dy| {
            Ok(Some(Tensor::from_vec(self.backward(of, dy), x.shape(), x.device())?))
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    #[test]
    fn mish_has_gradients_everywhere() {
        for x in [-800.0, -3.0, 0.0, 1e-3, 2.0, 100.0, 800.0f64] {
            let of = |x: f64| mish(&Tensor::new(x, &Device::Cpu).unwrap()).unwrap().to_scalar::<f64>().unwrap();
            let var = Var::new(x, &Device::Cpu).unwrap();
            let gradient = mish(&var).unwrap().backward().unwrap().get(&var).unwrap().to_scalar::<f64>().unwrap();
            let difference = (of(x + 1e-5) - of(x - 1e-5)) / 2e-5;
            assert!((gradient - difference).abs() < 1e-8, "{x}: {gradient}, not {difference}");
        }
    }
}
