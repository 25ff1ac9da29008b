//! Rotary position embeddings, with a gradient.
use super::autocast::widest;
use super::view::contiguous;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, WithDType,
};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::op1;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, dispatch};
use rayon::prelude::*;

/// The approximate number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;

/// Rotates the pairs (i, i + D / 2) of each vector by the angles of its position: a drop-in for
/// `candle_nn::rotary_emb::rope`, which has no gradient.
///
/// `x` has the shape (B, H, T, D), with an even D, and the dtype f32, f64, f16 or bf16. `cos` and `sin` have its dtype (under
/// [`autocast`](crate::autocast()) by lists they may be f32, and then the result is), and the shape (T′, D / 2), or (B, T′, D / 2) with positions for each sample, where T′ is at least T. Gradients end here at
/// `cos` and `sin`, which are tables.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::rope;
/// // A rotation by a right angle at the second position.
/// let x = Tensor::new(&[[[[1f32, 0.], [1., 0.]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[1f32], [0.]], &Device::Cpu)?, Tensor::new(&[[0f32], [1.]], &Device::Cpu)?);
/// let y = rope(&x, &cos, &sin)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 0., 0., 1.]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for shapes and dtypes that do not fit;
/// [`Error::UnsupportedDType`].
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply(x, cos, sin, Kind::Halves)
}

/// Rotates the pairs (2i, 2i + 1) of each vector by the angles of its position: a drop-in for
/// `candle_nn::rotary_emb::rope_i`, which has no gradient. Shapes, dtypes and errors are those of [`rope`].
/// Gradients end here at `cos` and `sin`.
///
/// # Errors
/// The errors of [`rope`].
pub fn rope_i(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply(x, cos, sin, Kind::Interleaved)
}

/// [`rope`] for `x` of the shape (B, T, H, D): a drop-in for `candle_nn::rotary_emb::rope_thd`, which has no gradient. Gradients
/// end here at `cos` and `sin`.
///
/// # Errors
/// The errors of [`rope`].
pub fn rope_thd(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    apply(x, cos, sin, Kind::HalvesThd)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Halves,
    Interleaved,
    HalvesThd,
}

fn apply(x: &Tensor, cos: &Tensor, sin: &Tensor, kind: Kind) -> Result<Tensor> {
    let [x, cos] = &widest(x, cos)?;
    let [_, sin] = &widest(x, sin)?;
    let positions = match (x.rank(), kind) {
        (4, Kind::HalvesThd) => x.dim(1)?,
        (4, _) => x.dim(2)?,
        _ => 0,
    };
    let fits = |t: &Tensor| match (x.dims(), t.dims()) {
        (&[_, _, _, size], &[count, half]) => size == 2 * half && count >= positions,
        (&[batch, _, _, size], &[samples, count, half]) => samples == batch && size == 2 * half && count >= positions,
        _ => false,
    };
    if !fits(cos) || cos.shape() != sin.shape() || [cos.dtype(), sin.dtype()] != [x.dtype(); 2] {
        let [x, cos, sin] = [x, cos, sin].map(|t| describe(t.dtype(), t.shape()));
        let order = if kind == Kind::HalvesThd { "(B, T, H, D)" } else { "(B, H, T, D)" };
        let reason = format!(
            "x must be {order}, and cos and sin (T′, D / 2) or (B, T′, D / 2) with T′ at least T, all of one dtype, \
             but they are {x}, {cos} and {sin}"
        );
        return Err(Error::invalid("the input of rope", reason).into());
    }
    let x = contiguous(x)?;
    let (cos, sin) = (cos.detach().contiguous()?, sin.detach().contiguous()?);
    op1(&x, Rope { kind, cos, sin })
}

struct Rope {
    kind: Kind,
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// `sign` −1 rotates back, which is the gradient.
    fn on_cuda(&self, device: &CudaDevice, (x, dtype): (Address, DType), shape: &Shape, sign: f64) -> Result<Output> {
        kernels::supported(dtype, "rope")?;
        let (batch, second, third, size) = shape.dims4()?;
        let (vectors, half) = (batch * second * third, size / 2);
        let table = if self.cos.rank() == 3 { self.cos.dim(1)? * half } else { 0 };
        let [is_thd, is_interleaved] = [Kind::HalvesThd, Kind::Interleaved].map(|kind| usize::from(self.kind == kind));
        let y = Output::new(device, dtype, shape)?;
        let tensors = [x, kernels::address(&self.cos)?, kernels::address(&self.sin)?, y.address()?];
        let vector = Address::vector(&tensors, half, dtype);
        let launch = Launch {
            kernel: Kernel::Rope,
            dtype,
            grid: Grid::Threads(vectors * half / vector),
            tensors: &tensors,
            numbers: &[vectors, second, third, half, is_thd, is_interleaved, table, vector],
            reals: &[sign],
        };
        kernels::launch(device, launch)?;
        Ok(y)
    }

    /// The same on the CPU.
    fn rotate<T: Element>(&self, x: &[T], shape: &Shape, sign: f64) -> Result<Vec<T>> {
        let (batch, second, third, size) = shape.dims4()?;
        let mut y = vec![T::from_f64(0.0); x.len()];
        if x.is_empty() {
            return Ok(y);
        }
        let wide = |t: &Tensor| t.to_dtype(accumulator(t.dtype()))?.flatten_all()?.to_vec1::<T::Real>();
        let (cos, sin) = (wide(&self.cos)?, wide(&self.sin)?);
        let (half, sign) = (size / 2, T::Real::from_f64(sign));
        // The angles of one sample, if each has its own.
        let table = if self.cos.rank() == 3 { cos.len() / batch } else { 0 };
        let angles = |row: usize| {
            let position = if self.kind == Kind::HalvesThd { row / third % second } else { row % third };
            let start = row / (second * third) * table + position * half;
            start..start + half
        };
        let rows = y.par_chunks_exact_mut(size).zip(x.par_chunks_exact(size)).enumerate();
        rows.with_min_len((BLOCK_ELEMENTS / size).max(1)).each(|(row, (y, x))| {
            let (cos, sin) = (&cos[angles(row)], &sin[angles(row)]);
            let rotate = |x0: T, x1: T, cos: T::Real, sin: T::Real| {
                let (x0, x1, sin) = (x0.widen(), x1.widen(), sin * sign);
                (T::narrow(x0 * cos - x1 * sin), T::narrow(x0 * sin + x1 * cos))
            };
            candle_ddp_tensor::vectorise!(|| {
                if self.kind == Kind::Interleaved {
                    let pairs = y.as_chunks_mut::<2>().0.iter_mut().zip(x.as_chunks::<2>().0);
                    for ((y, x), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
                        (y[0], y[1]) = rotate(x[0], x[1], *cos, *sin);
                    }
                } else {
                    let ((y0, y1), (x0, x1)) = (y.split_at_mut(half), x.split_at(half));
                    let pairs = y0.iter_mut().zip(y1).zip(x0.iter().zip(x1));
                    for (((y0, y1), (x0, x1)), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
                        (*y0, *y1) = rotate(*x0, *x1, *cos, *sin);
                    }
                }
            });
        });
        Ok(y)
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = dispatch!(x.dtype(), self.name(), T => {
            Ok(T::to_cpu_storage_owned(self.rotate(slice::<T>(x, layout)?, layout.shape(), 1.0)?))
        })?;
        Ok((y, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let input = (kernels::storage_address(x, layout)?, x.dtype());
        Ok(self.on_cuda(x.device(), input, layout.shape(), 1.0)?.into_parts())
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        if let Device::Cuda(device) = dy.device() {
            let dx = self.on_cuda(device, (kernels::address(&dy)?, dy.dtype()), dy.shape(), -1.0)?;
            return Ok(Some(dx.into_tensor()));
        }
        dispatch!(x.dtype(), self.name(), T => with_slice::<T, _>(&dy, |dy| {
            Ok(Some(Tensor::from_vec(self.rotate(dy, x.shape(), -1.0)?, x.shape(), x.device())?))
        }))
    }
}
