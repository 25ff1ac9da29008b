//! Softmax and its logarithm.
use super::autocast::wide;
use super::rows::{dot, exponentials, larger, maximum, sum};
use super::view::contiguous;
use candle_core::backend::BackendStorage;
use candle_core::shape::Dim;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, WithDType,
};
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::function::{argument, op1};
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Real, dispatch, vectorise};
use rayon::prelude::*;

/// The number of neighbouring columns that are processed together if the dimension is not the last.
pub(super) const TILE: usize = 128;
/// The approximate number of elements that a thread takes at a time.
pub(super) const BLOCK_ELEMENTS: usize = 1 << 14;

/// e^x, divided by its sum over dimension `dim`: `torch.nn.functional.softmax`, and a drop-in for
/// `candle_nn::ops::softmax`.
///
/// `x` has any shape and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for f64).
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::softmax;
/// let y = softmax(&Tensor::new(&[[0f32, 0.], [0., 3f32.ln()]], &Device::Cpu)?, 1)?.to_vec2::<f32>()?;
/// assert_eq!(y[0], [0.5, 0.5]);
/// assert!((y[1][1] - 0.75).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// candle's for a dimension that `x` does not have; [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    apply(x, dim.to_index(x.shape(), "softmax")?, false)
}

/// The logarithm of [`softmax`], calculated directly: `torch.nn.functional.log_softmax`, and a drop-in for
/// `candle_nn::ops::log_softmax`.
///
/// # Errors
/// As with [`softmax`].
pub fn log_softmax(x: &Tensor, dim: impl Dim) -> Result<Tensor> {
    apply(x, dim.to_index(x.shape(), "log_softmax")?, true)
}

/// Computes [`softmax`] over the last dimension. It replaces `candle_nn::ops::softmax_last_dim`, which has no
/// gradient.
///
/// # Errors
/// As with [`softmax`].
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    softmax(x, D::Minus1)
}

fn apply(x: &Tensor, dim: usize, log: bool) -> Result<Tensor> {
    let x = wide(x)?;
    if x.elem_count() == 0 {
        return argument(&x).affine(1.0, 0.0);
    }
    op1(&contiguous(&x)?, Softmax { dim, log })
}

/// A tensor's dimension, the product of the later dimensions, and the product of both.
pub(super) fn extents(shape: &Shape, dim: usize) -> (usize, usize, usize) {
    let inner: usize = shape.dims()[dim + 1..].iter().product();
    (shape.dims()[dim], inner, shape.dims()[dim] * inner)
}

/// The maximum m of a row, and Σ e^(x − m), whose terms are left in `to`.
pub(super) fn row_sum<T: Element>(x: &[T], to: &mut [T::Real]) -> (T::Real, T::Real) {
    vectorise!(move || {
        let max = maximum(x, T::Real::from_f64(f64::NEG_INFINITY));
        exponentials(x, max, to);
        (max, sum(to))
    })
}

/// The same for each of up to [`TILE`] neighbouring columns, whose rows are `inner` elements apart, without storing
/// terms.
pub(super) fn column_sums<T: Element>(x: &[T], inner: usize, max: &mut [T::Real], sums: &mut [T::Real]) {
    vectorise!(move || {
        let count = max.len();
        max.fill(T::Real::from_f64(f64::NEG_INFINITY));
        sums.fill(T::Real::from_f64(0.0));
        for row in x.chunks(inner) {
            for (max, x) in max.iter_mut().zip(&row[..count]) {
                *max = larger(*max, x.widen());
            }
        }
        for row in x.chunks(inner) {
            for ((sum, x), max) in sums.iter_mut().zip(&row[..count]).zip(&*max) {
                *sum += (x.widen() - *max).exp();
            }
        }
    })
}

fn softmax_row<T: Element>(y: &mut [T], exponentials: &[T::Real], scale: T::Real) {
    vectorise!(move || {
        for (y, value) in y.iter_mut().zip(exponentials) {
            *y = T::narrow(*value * scale);
        }
    })
}

fn log_softmax_row<T: Element>(y: &mut [T], x: &[T], max: T::Real, log: T::Real) {
    vectorise!(move || {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::narrow(x.widen() - max - log);
        }
    })
}

fn softmax_tile<T: Element>(y: &mut [T], x: &[T], inner: usize, log: bool, max: &[T::Real], sums: &mut [T::Real]) {
    vectorise!(move || {
        let count = max.len();
        for sum in &mut *sums {
            *sum = if log { sum.ln() } else { T::Real::from_f64(1.0) / *sum };
        }
        for (y, x) in y.chunks_mut(inner).zip(x.chunks(inner)) {
            let elements = y[..count].iter_mut().zip(&x[..count]).zip(max).zip(&*sums);
            if log {
                for (((y, x), max), log) in elements {
                    *y = T::narrow(x.widen() - *max - *log);
                }
            } else {
                for (((y, x), max), scale) in elements {
                    *y = T::narrow((x.widen() - *max).exp() * *scale);
                }
            }
        }
    })
}

fn gradient_row<T: Element>(dx: &mut [T], y: &[T], dy: &[T], log: bool) {
    vectorise!(move || {
        if log {
            let sum = sum(dy);
            for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = T::narrow(dy.widen() - y.widen().exp() * sum);
            }
        } else {
            let sum = dot(y, dy);
            for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = T::narrow(y.widen() * (dy.widen() - sum));
            }
        }
    })
}

fn gradient_tile<T: Element>(dx: &mut [T], y: &[T], dy: &[T], inner: usize, log: bool, sums: &mut [T::Real]) {
    vectorise!(move || {
        let count = sums.len();
        sums.fill(T::Real::from_f64(0.0));
        for (y, dy) in y.chunks(inner).zip(dy.chunks(inner)) {
            for ((sum, y), dy) in sums.iter_mut().zip(&y[..count]).zip(&dy[..count]) {
                *sum += if log { dy.widen() } else { y.widen() * dy.widen() };
            }
        }
        for ((dx, y), dy) in dx.chunks_mut(inner).zip(y.chunks(inner)).zip(dy.chunks(inner)) {
            let elements = dx[..count].iter_mut().zip(&y[..count]).zip(&dy[..count]).zip(&*sums);
            if log {
                for (((dx, y), dy), sum) in elements {
                    *dx = T::narrow(dy.widen() - y.widen().exp() * *sum);
                }
            } else {
                for (((dx, y), dy), sum) in elements {
                    *dx = T::narrow(y.widen() * (dy.widen() - *sum));
                }
            }
        }
    })
}

struct Softmax {
    dim: usize,
    log: bool,
}

impl Softmax {
    fn forward<T: Element>(&self, x: &[T], shape: &Shape) -> Vec<T> {
        let (count, inner, block) = extents(shape, self.dim);
        let mut y = vec![T::from_f64(0.0); x.len()];
        let zero = T::Real::from_f64(0.0);
        let blocks = y.par_chunks_exact_mut(block).zip(x.par_chunks_exact(block));
        let scratch = || vec![zero; if inner == 1 { count } else { 2 * TILE }];
        blocks.with_min_len((BLOCK_ELEMENTS / block).max(1)).each_with(scratch, |scratch, (y, x)| {
            if inner == 1 {
                let (max, sum) = row_sum(x, scratch);
                match self.log {
                    true => log_softmax_row(y, x, max, sum.ln()),
                    false => softmax_row(y, scratch, T::Real::from_f64(1.0) / sum),
                }
                return;
            }
            let (max, sums) = scratch.split_at_mut(TILE);
            for tile in (0..inner).step_by(TILE) {
                let count = TILE.min(inner - tile);
                let (max, sums) = (&mut max[..count], &mut sums[..count]);
                column_sums(&x[tile..], inner, max, sums);
                softmax_tile(&mut y[tile..], &x[tile..], inner, self.log, max, sums);
            }
        });
        y
    }

    fn backward<T: Element>(&self, y: &[T], dy: &[T], shape: &Shape) -> Vec<T> {
        let (_, inner, block) = extents(shape, self.dim);
        let mut dx = vec![T::from_f64(0.0); y.len()];
        let zero = T::Real::from_f64(0.0);
        let blocks = dx.par_chunks_exact_mut(block).zip(y.par_chunks_exact(block)).zip(dy.par_chunks_exact(block));
        blocks.with_min_len((BLOCK_ELEMENTS / block).max(1)).each(|((dx, y), dy)| {
            if inner == 1 {
                return gradient_row(dx, y, dy, self.log);
            }
            let mut sums = [zero; TILE];
            for tile in (0..inner).step_by(TILE) {
                let sums = &mut sums[..TILE.min(inner - tile)];
                gradient_tile(&mut dx[tile..], &y[tile..], &dy[tile..], inner, self.log, sums);
            }
        });
        dx
    }
}

impl Softmax {
    /// Launches the kernel for rows or the one for columns.
    fn launch(
        &self,
        device: &CudaDevice,
        ([rows, columns], dtype): ([Kernel; 2], DType),
        shape: &Shape,
        tensors: &[Address],
    ) -> Result<()> {
        let (count, inner, block) = extents(shape, self.dim);
        let outer = shape.elem_count() / block;
        let numbers = |rest: [usize; 2]| [outer, count, inner, usize::from(self.log), rest[0], rest[1]];
        let (kernel, grid, numbers) = if inner == 1 {
            let vector = Address::vector(tensors, 0, dtype);
            let lanes = kernels::lanes(count, vector);
            let grid = Grid::Blocks(kernels::blocks_of_rows(outer, lanes));
            (rows, grid, &numbers([usize::from(vector > 1), lanes]))
        } else {
            let vector = Address::vector(tensors, inner, dtype);
            (columns, Grid::Threads(outer * (inner / vector)), &numbers([vector, 0]))
        };
        Ok(kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals: &[] })?)
    }
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        if self.log { "log_softmax" } else { "softmax" }
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = dispatch!(x.dtype(), self.name(), T => {
            Ok(T::to_cpu_storage_owned(self.forward(slice::<T>(x, layout)?, layout.shape())))
        })?;
        Ok((y, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        kernels::supported(x.dtype(), self.name())?;
        let y = Output::new(x.device(), x.dtype(), layout.shape())?;
        let tensors = [kernels::storage_address(x, layout)?, y.address()?];
        let kernels = [Kernel::SoftmaxRows, Kernel::SoftmaxColumns];
        self.launch(x.device(), (kernels, x.dtype()), layout.shape(), &tensors)?;
        Ok(y.into_parts())
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        if let Device::Cuda(device) = x.device() {
            let dx = Output::new(device, x.dtype(), x.shape())?;
            let tensors = [kernels::address(y)?, kernels::address(&dy)?, dx.address()?];
            let kernels = [Kernel::SoftmaxRowsBackward, Kernel::SoftmaxColumnsBackward];
            self.launch(device, (kernels, x.dtype()), x.shape(), &tensors)?;
            return Ok(Some(dx.into_tensor()));
        }
        dispatch!(x.dtype(), self.name(), T => with_slice::<T, _>(y, |y| with_slice::<T, _>(&dy, |dy| {
            let dx = self.backward(y, dy, x.shape());
            Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
        })))
    }
}
