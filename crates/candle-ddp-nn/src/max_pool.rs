//! Pooling by the maximum.
use super::pool::{Windows, windows};
use super::resample::{format_of, plane, with_planes};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, ToUsize2, WithDType,
};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::function::op1_in;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, MemoryFormat, dispatch, vectorise};
use rayon::prelude::*;
use std::sync::OnceLock;

/// The approximate number of comparisons that a thread makes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;

/// Options of [`max_pool2d`]. The default is PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaxPool2dOptions {
    /// The distance between windows, in rows and columns. `None`, the default: the size of a window.
    pub stride: Option<(usize, usize)>,
    /// The number of rows and columns of −∞ added at each border, at most half a window; 0 by default.
    pub padding: (usize, usize),
    /// Whether windows may reach beyond the (padded) input at the bottom and at the right; `false` by default.
    pub ceil_mode: bool,
}

/// The maximum of every window of `kernel` rows and columns (`3`, or `(2, 3)`): `torch.nn.functional.max_pool2d`.
///
/// `x` has the shape (N, C, H, W) or (C, H, W) and the dtype f32, f64, f16 or bf16. The result has the height (H + 2
/// × padding − kernel) / stride + 1, rounded down, and its width follows the same rule. The gradient goes to the
/// first of equal maxima, row by row. A NaN in a window is its maximum; of several NaNs, the last.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{MaxPool2dOptions, max_pool2d};
/// let x = Tensor::arange(0f32, 16., &Device::Cpu)?.reshape((1, 4, 4))?;
/// let y = max_pool2d(&x, 2, MaxPool2dOptions::default())?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[5., 7.], [13., 15.]]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](candle_ddp_tensor::Error::Base), carried by candle's error, for another rank, an empty
/// plane, a kernel or stride of 0, padding of more than half a window, and windows larger than the padded input;
/// [`Error::UnsupportedDType`](candle_ddp_tensor::Error::UnsupportedDType).
pub fn max_pool2d(x: &Tensor, kernel: impl ToUsize2, options: MaxPool2dOptions) -> Result<Tensor> {
    const INPUT: &str = "the input of max_pool2d";
    let (height, width) = plane(x, INPUT)?;
    let (kernel, MaxPool2dOptions { stride, padding, ceil_mode }) = (kernel.to_usize2(), options);
    let stride = stride.unwrap_or(kernel);
    // The kernels count in 32 bits.
    let axes = [height + padding.0 + kernel.0, width + padding.1 + kernel.1, stride.0, stride.1];
    if axes.into_iter().chain([height * width]).any(|extent| u32::try_from(extent).is_err()) {
        let reason = format!(
            "a plane must have less than 2^32 elements, also in one direction with padding and a window, not {height} × {width} \
             with windows of {kernel:?} every {stride:?}"
        );
        return Err(Error::invalid(INPUT, reason).into());
    }
    // The kernels for channels last number the elements of a window with eight bits.
    let format = if kernel.0 * kernel.1 <= 256 { format_of(x) } else { MemoryFormat::Contiguous };
    let op = MaxPool {
        format,
        rows: windows(height, kernel.0, stride.0, padding.0, ceil_mode)?,
        columns: windows(width, kernel.1, stride.1, padding.1, ceil_mode)?,
        indices: OnceLock::new(),
    };
    op1_in(format, x, op)
}

struct MaxPool {
    format: MemoryFormat,
    rows: Windows,
    columns: Windows,
    /// Where each maximum was found: in its plane, or in eight bits in its window.
    indices: OnceLock<Indices>,
}

enum Indices {
    OnCpu(Vec<u32>),
    OnCuda(Output),
}

impl MaxPool {
    fn blocks(&self) -> usize {
        let comparisons = self.rows.count * self.columns.count * self.rows.kernel * self.columns.kernel;
        (BLOCK_ELEMENTS / comparisons).max(1)
    }

    fn forward<T: Element>(&self, x: &[T], y: &mut [T], indices: &mut [u32]) {
        let Self { rows, columns, .. } = self;
        let (input, output) = (rows.size * columns.size, rows.count * columns.count);
        let each = y.par_chunks_exact_mut(output).zip(indices.par_chunks_exact_mut(output));
        let each = each.zip(x.par_chunks_exact(input)).with_min_len(self.blocks());
        each.each_with(
            || vec![T::Real::from_f64(0.0); columns.count],
            |best, ((y, indices), x)| {
                let lines = y.chunks_exact_mut(columns.count).zip(indices.chunks_exact_mut(columns.count));
                for (row, (y, indices)) in lines.enumerate() {
                    let inside = rows.inside(row);
                    best.fill(T::Real::from_f64(f64::NEG_INFINITY));
                    for (column, index) in indices.iter_mut().enumerate() {
                        *index = (inside.start * columns.size + columns.inside(column).start) as u32;
                    }
                    for row in inside {
                        let start = row * columns.size;
                        compare_row(columns, &x[start..start + columns.size], start, best, indices);
                    }
                    y.iter_mut().zip(&*best).for_each(|(y, best)| *y = T::narrow(*best));
                }
            },
        );
    }

    /// The numbers that the kernels need, for an x that is stored in the shape `x`, and threads of `vector` elements.
    fn numbers(&self, x: &Shape, vector: usize) -> Vec<usize> {
        let Self { format, rows, columns, .. } = self;
        let pair = |of: fn(&Windows) -> usize| [of(rows), of(columns)];
        let (planes, channels) = match (format, x.dims()) {
            (MemoryFormat::ChannelsLast, &[n, .., channels]) => (n, channels),
            _ => (x.elem_count() / (rows.size * columns.size), 1),
        };
        let extents =
            [pair(|w| w.size), pair(|w| w.count), pair(|w| w.kernel), pair(|w| w.stride), pair(|w| w.padding)];
        [&[planes][..], extents.as_flattened(), &[vector, channels]].concat()
    }

    /// Whether the kernels that halve the width have these windows.
    fn halves(&self) -> bool {
        let Windows { kernel, stride, padding, .. } = self.columns;
        (self.rows.kernel, kernel, stride, padding) == (3, 3, 2, 1)
    }

    fn forward_on_cuda(&self, x: Address, shape: &Shape, device: &CudaDevice, dtype: DType) -> Result<Output> {
        let y_shape = with_planes(self.format, shape, self.rows.count, self.columns.count);
        let y = Output::new(device, dtype, &y_shape)?;
        let (to, elements) = (y.address()?, y_shape.elem_count());
        let most = Address::vector(&[x], self.columns.size, dtype);
        let (kernel, vector, threads) = match (self.format, shape.dims().last()) {
            (MemoryFormat::ChannelsLast, Some(channels)) => {
                let vector = Address::vector(&[x, to], *channels, dtype);
                (Kernel::MaxPoolPixels, vector, elements / vector)
            }
            _ if self.halves() && most > 1 => {
                let vector = Address::vector(&[to], self.columns.count, dtype);
                (Kernel::MaxPoolHalve, vector, elements / self.columns.count * self.columns.count.div_ceil(most))
            }
            _ => (Kernel::MaxPool, 1, elements),
        };
        let indices = Output::new(device, if kernel == Kernel::MaxPool { DType::U32 } else { DType::U8 }, &y_shape)?;
        let launch = Launch {
            kernel,
            dtype,
            grid: Grid::Threads(threads),
            tensors: &[x, to, indices.address()?],
            numbers: &self.numbers(shape, vector),
            reals: &[],
        };
        kernels::launch(device, launch)?;
        let _ = self.indices.set(Indices::OnCuda(indices));
        Ok(y)
    }

    fn backward_on_cuda(&self, x: &Tensor, dy: &Tensor, indices: &Output) -> Result<Tensor> {
        let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
        let dx = Output::new(device, dtype, x.shape())?;
        let tensors = &[kernels::address(dy)?, dx.address()?, indices.address()?];
        let most = Address::vector(&tensors[1..2], self.columns.size, dtype);
        let (kernel, vector, each) = match (self.format, x.dims().last()) {
            (MemoryFormat::ChannelsLast, Some(channels)) => {
                let vector = Address::vector(&tensors[..2], *channels, dtype);
                (Kernel::MaxPoolPixelsBackward, vector, vector)
            }
            _ if indices.dtype() == DType::U8 => {
                let is_half = self.columns.count.is_multiple_of(most / 2) && tensors[0].is_aligned();
                (Kernel::MaxPoolHalveBackward, if is_half { most / 2 } else { 1 }, most)
            }
            _ => (Kernel::MaxPoolBackward, most, most),
        };
        let (grid, numbers) = (Grid::Threads(x.elem_count() / each), &self.numbers(x.shape(), vector));
        kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals: &[] })?;
        Ok(dx.into_tensor())
    }

    fn backward<T: Element>(&self, dy: &[T], indices: &[u32], planes: usize) -> Vec<T> {
        let (input, output) = (self.rows.size * self.columns.size, self.rows.count * self.columns.count);
        let zero = T::Real::from_f64(0.0);
        let mut dx = vec![T::from_f64(0.0); planes * input];
        let each = dx.par_chunks_exact_mut(input).zip(dy.par_chunks_exact(output));
        let each = each.zip(indices.par_chunks_exact(output)).with_min_len(self.blocks());
        each.each_with(
            || vec![zero; input],
            |sums, ((dx, dy), indices)| {
                sums.fill(zero);
                dy.iter().zip(indices).for_each(|(dy, index)| sums[*index as usize] += dy.widen());
                dx.iter_mut().zip(&*sums).for_each(|(dx, sum)| *dx = T::narrow(*sum));
            },
        );
        dx
    }
}

/// Compares the elements of a row, which begins at `start` of its plane, with their windows' maxima so far.
fn compare_row<T: Element>(columns: &Windows, x: &[T], start: usize, best: &mut [T::Real], indices: &mut [u32]) {
    vectorise!(move || {
        let Windows { count, size, kernel, stride, padding } = *columns;
        for tap in 0..kernel {
            // The windows for which this tap lies in the row.
            let first = padding.saturating_sub(tap).div_ceil(stride).min(count);
            let last = (size + padding).saturating_sub(tap).div_ceil(stride).min(count).max(first);
            let offset = first * stride + tap - if first < last { padding } else { 0 };
            let windows = (&mut best[first..last], &mut indices[first..last]);
            match stride {
                1 => compare_every::<T, 1>(x, offset, start, windows),
                2 => compare_every::<T, 2>(x, offset, start, windows),
                3 => compare_every::<T, 3>(x, offset, start, windows),
                _ => {
                    for (index, (best, indices)) in windows.0.iter_mut().zip(windows.1).enumerate() {
                        compare_one(x[offset + index * stride], start + offset + index * stride, best, indices);
                    }
                }
            }
        }
    })
}

/// [`compare_one`] for every `STRIDE`th element of `x` from `offset` on.
#[inline(always)]
fn compare_every<T: Element, const STRIDE: usize>(
    x: &[T],
    offset: usize,
    start: usize,
    (best, indices): (&mut [T::Real], &mut [u32]),
) {
    let count = best.len();
    let (Some((last_best, best)), Some((last_index, indices))) = (best.split_last_mut(), indices.split_last_mut())
    else {
        return;
    };
    let (groups, _) = x[offset..].as_chunks::<STRIDE>();
    for (number, (group, (best, index))) in groups.iter().zip(best.iter_mut().zip(indices)).enumerate() {
        compare_one(group[0], start + offset + number * STRIDE, best, index);
    }
    let last = offset + (count - 1) * STRIDE;
    compare_one(x[last], start + last, last_best, last_index);
}

#[inline(always)]
fn compare_one<T: Element>(x: T, position: usize, best: &mut T::Real, index: &mut u32) {
    let x = x.widen();
    #[expect(clippy::eq_op)] // asks for NaN
    let wins = (x > *best) | (x != x);
    *best = if wins { x } else { *best };
    *index = if wins { position as u32 } else { *index };
}

impl CustomOp1 for MaxPool {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = with_planes(self.format, layout.shape(), self.rows.count, self.columns.count);
        let mut indices = vec![0; shape.elem_count()];
        let y = dispatch!(x.dtype(), self.name(), T => {
            let mut y = vec![T::from_f64(0.0); shape.elem_count()];
            self.forward(slice::<T>(x, layout)?, &mut y, &mut indices);
            Ok(T::to_cpu_storage_owned(y))
        })?;
        let _ = self.indices.set(Indices::OnCpu(indices));
        Ok((y, shape))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        kernels::supported(x.dtype(), self.name())?;
        let y = self.forward_on_cuda(kernels::storage_address(x, layout)?, layout.shape(), x.device(), x.dtype())?;
        Ok(y.into_parts())
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        let indices = match self.indices.get() {
            Some(Indices::OnCpu(indices)) => indices,
            Some(Indices::OnCuda(indices)) => return self.backward_on_cuda(x, &dy, indices).map(Some),
            None => candle_core::bail!("max_pool2d's forward pass did not run"),
        };
        let planes = x.elem_count() / (self.rows.size * self.columns.size);
        dispatch!(x.dtype(), self.name(), T => {
            let dx = with_slice::<T, _>(&dy, |dy| Ok(self.backward(dy, indices, planes)))?;
            Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
        })
    }
}
