//! Linear maps of planes along height and width: average pooling and interpolation. Each row of the output is a
//! weighted sum of rows of the input, each column of columns; the backward pass is the transpose.
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, WithDType,
};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::function::op1_in;
use candle_ddp_tensor::kernels::{self, Address, Constants, Grid, Kernel, Launch, Output};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, MemoryFormat, dispatch, vectorise};
use rayon::prelude::*;

/// The approximate number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;

/// The dependence of the outputs along one dimension on the inputs.
#[derive(Debug)]
pub(super) struct Axis {
    /// The number of inputs.
    input: usize,
    /// For each output: the first input that it depends on, and the weights of that input and the following ones.
    outputs: Vec<(usize, Vec<f64>)>,
}

impl Axis {
    /// `output(i)` returns the first input that output `i` depends on, and the weights of that input and the
    /// following ones, all of which must exist.
    pub(super) fn new(input: usize, outputs: usize, output: impl FnMut(usize) -> (usize, Vec<f64>)) -> Self {
        Self { input, outputs: (0..outputs).map(output).collect() }
    }

    fn output(&self) -> usize {
        self.outputs.len()
    }

    /// The outputs, with weights of another type.
    fn outputs<R: WithDType>(&self) -> Vec<(usize, Vec<R>)> {
        let convert = |weights: &Vec<f64>| weights.iter().map(|weight| R::from_f64(*weight)).collect();
        self.outputs.iter().map(|(start, weights)| (*start, convert(weights))).collect()
    }

    /// For each output, or with `is_transposed` for each input, the terms of its sum: inputs (or outputs) with their
    /// weights.
    fn terms(&self, is_transposed: bool) -> Vec<Vec<(usize, f64)>> {
        let mut terms = vec![Vec::new(); if is_transposed { self.input } else { self.output() }];
        for (output, (start, weights)) in self.outputs.iter().enumerate() {
            for (input, weight) in (*start..).zip(weights) {
                let (to, from) = if is_transposed { (input, output) } else { (output, input) };
                terms[to].push((from, *weight));
            }
        }
        terms
    }

    /// The terms as the kernel `resample` reads them.
    fn table(&self, is_transposed: bool, device: &CudaDevice) -> Result<Constants> {
        let terms = self.terms(is_transposed);
        let mut table = vec![0.0];
        for terms in &terms {
            table.push(table[table.len() - 1] + terms.len() as f64);
        }
        table.extend(terms.iter().flatten().flat_map(|(index, weight)| [*index as f64, *weight]));
        Ok(Constants::new(device, &table)?)
    }
}

/// The planes of an input: (C, H, W) or (N, C, H, W).
///
/// # Errors
/// [`InvalidArgument`](Error::Base) for another rank, and for planes without elements.
pub(super) fn plane(x: &Tensor, argument: &'static str) -> Result<(usize, usize)> {
    let is = candle_ddp_tensor::error::describe(x.dtype(), x.shape());
    match *x.dims() {
        [.., height, width] if matches!(x.rank(), 3 | 4) && height > 0 && width > 0 => Ok((height, width)),
        _ => {
            let reason = format!("it must be (N, C, H, W) or (C, H, W) with H and W at least 1, not {is}");
            Err(Error::invalid(argument, reason).into())
        }
    }
}

/// The shape of what is stored of `x` with planes of another size.
pub(super) fn with_planes(format: MemoryFormat, shape: &Shape, height: usize, width: usize) -> Shape {
    let mut dims = shape.dims().to_vec();
    let row = match format {
        MemoryFormat::Contiguous => dims.len() - 2,
        MemoryFormat::ChannelsLast => 1,
    };
    (dims[row], dims[row + 1]) = (height, width);
    Shape::from(dims)
}

/// The memory format in which planes are mapped.
pub(super) fn format_of(x: &Tensor) -> MemoryFormat {
    if x.device().is_cuda() { MemoryFormat::of(x) } else { MemoryFormat::Contiguous }
}

/// Maps the planes of `x`, which [`plane`] has checked.
pub(super) fn resample(x: &Tensor, name: &'static str, rows: Axis, columns: Axis) -> Result<Tensor> {
    let format = format_of(x);
    op1_in(format, x, Resample { name, format, rows, columns })
}

struct Resample {
    name: &'static str,
    format: MemoryFormat,
    rows: Axis,
    columns: Axis,
}

impl Resample {
    /// The map, or with `is_transposed` its transpose, of the planes of a tensor of `shape`.
    fn on_cuda(
        &self,
        device: &CudaDevice,
        (x, dtype): (Address, DType),
        shape: &Shape,
        is_transposed: bool,
    ) -> Result<Output> {
        let Self { name, format, rows, columns } = self;
        kernels::supported(dtype, name)?;
        let (mut from, mut to) = ([rows.input, columns.input], [rows.output(), columns.output()]);
        if is_transposed {
            (from, to) = (to, from);
        }
        let y = Output::new(device, dtype, with_planes(*format, shape, to[0], to[1]))?;
        let tables = [rows.table(is_transposed, device)?, columns.table(is_transposed, device)?];
        let tensors = &[x, y.address()?, tables[0].address(), tables[1].address()];
        let (kernel, planes, channels, vector) = match (format, shape.dims()) {
            (MemoryFormat::ChannelsLast, &[n, .., channels]) => {
                (Kernel::ResamplePixels, n, channels, Address::vector(&tensors[..2], channels, dtype))
            }
            _ => {
                let planes = shape.elem_count() / (from[0] * from[1]);
                (Kernel::Resample, planes, 1, Address::vector(&tensors[1..2], to[1], dtype))
            }
        };
        let grid = Grid::Threads(planes * to[0] * to[1] * channels / vector);
        let numbers = &[planes, from[0], from[1], to[0], to[1], vector, channels];
        kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals: &[] })?;
        Ok(y)
    }

    fn blocks(&self) -> usize {
        let elements = self.rows.input * self.columns.input + self.rows.output() * self.columns.output();
        (BLOCK_ELEMENTS / elements).max(1)
    }

    /// Whether columns come first, while there are fewer rows: sums over columns are slower than those over rows, which fill vectors.
    fn columns_first(&self) -> bool {
        self.rows.input < self.rows.output()
    }

    /// The number of elements between the two steps, in all rows if columns come first, or else in one.
    fn intermediate(&self) -> usize {
        if self.columns_first() { self.rows.input * self.columns.output() } else { self.columns.input }
    }

    fn forward<T: Element>(&self, x: &[T], planes: usize) -> Vec<T> {
        let (rows, columns) = (self.rows.outputs::<T::Real>(), self.columns.outputs::<T::Real>());
        let zeros = |count| vec![T::Real::from_f64(0.0); count];
        let (plane, input) = (rows.len() * columns.len(), self.rows.input * self.columns.input);
        let mut y = vec![T::from_f64(0.0); planes * plane];
        let each = y.par_chunks_exact_mut(plane).zip(x.par_chunks_exact(input)).with_min_len(self.blocks());
        if self.columns_first() {
            each.each_with(
                || (zeros(self.intermediate()), zeros(columns.len())),
                |(wide, sum), (y, x)| forward_columns_first(y, x, wide, sum, &rows, &columns),
            );
        } else {
            each.each_with(|| zeros(self.intermediate()), |sum, (y, x)| forward_plane(y, x, sum, &rows, &columns));
        }
        y
    }

    fn backward<T: Element>(&self, dy: &[T], planes: usize) -> Vec<T> {
        let (rows, columns) = (self.rows.outputs::<T::Real>(), self.columns.outputs::<T::Real>());
        let zeros = |count| vec![T::Real::from_f64(0.0); count];
        let (plane, input) = (rows.len() * columns.len(), self.rows.input * self.columns.input);
        let mut dx = vec![T::from_f64(0.0); planes * input];
        let each = dx.par_chunks_exact_mut(input).zip(dy.par_chunks_exact(plane)).with_min_len(self.blocks());
        let work = match self.columns_first() {
            true => backward_columns_last,
            false => backward_plane,
        };
        each.each_with(
            || (zeros(self.intermediate()), zeros(input)),
            |(between, total), (dx, dy)| work(dx, dy, between, total, &rows, &columns),
        );
        dx
    }
}

/// Outputs, as in [`Axis`].
type Outputs<R> = [(usize, Vec<R>)];

/// Adds rows of `from` to `sum`, times their weights.
#[inline(always)]
fn add_rows<T: Element>(sum: &mut [T::Real], from: &[T], (start, weights): &(usize, Vec<T::Real>)) {
    for (row, weight) in from.chunks_exact(sum.len()).skip(*start).zip(weights) {
        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.widen() * *weight);
    }
}

/// Adds `row` to rows of `sums`, times their weights: the transpose of [`add_rows`].
#[inline(always)]
fn add_to_rows<T: Element>(sums: &mut [T::Real], row: &[T], (start, weights): &(usize, Vec<T::Real>)) {
    for (sums, weight) in sums.chunks_exact_mut(row.len()).skip(*start).zip(weights) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.widen() * *weight);
    }
}

/// The weighted sums of columns of a row.
#[inline(always)]
fn along<'a, T: Element>(row: &'a [T], columns: &'a Outputs<T::Real>) -> impl Iterator<Item = T::Real> {
    columns.iter().map(|(start, weights)| {
        let mut total = T::Real::from_f64(0.0);
        row[*start..].iter().zip(weights).for_each(|(value, weight)| total += value.widen() * *weight);
        total
    })
}

/// Adds a row of outputs to the row of inputs that they depend on: the transpose of [`along`].
#[inline(always)]
fn add_along<T: Element>(sums: &mut [T::Real], row: &[T], columns: &Outputs<T::Real>) {
    for (value, (start, weights)) in row.iter().zip(columns) {
        let value = value.widen();
        sums[*start..].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += value * *weight);
    }
}

#[inline(always)]
fn narrow<T: Element>(to: &mut [T], from: impl Iterator<Item = T::Real>) {
    to.iter_mut().zip(from).for_each(|(to, value)| *to = T::narrow(value));
}

fn forward_plane<T: Element>(
    y: &mut [T],
    x: &[T],
    sum: &mut [T::Real],
    rows: &Outputs<T::Real>,
    columns: &Outputs<T::Real>,
) {
    vectorise!(move || {
        for (y, row) in y.chunks_exact_mut(columns.len()).zip(rows) {
            sum.fill(T::Real::from_f64(0.0));
            add_rows(sum, x, row);
            narrow(y, along(&*sum, columns));
        }
    })
}

fn forward_columns_first<T: Element>(
    y: &mut [T],
    x: &[T],
    wide: &mut [T::Real],
    sum: &mut [T::Real],
    rows: &Outputs<T::Real>,
    columns: &Outputs<T::Real>,
) {
    vectorise!(move || {
        let width = x.len() * columns.len() / wide.len();
        for (wide, x) in wide.chunks_exact_mut(columns.len()).zip(x.chunks_exact(width)) {
            narrow(wide, along(x, columns));
        }
        for (y, row) in y.chunks_exact_mut(columns.len()).zip(rows) {
            sum.fill(T::Real::from_f64(0.0));
            add_rows(sum, &*wide, row);
            narrow(y, sum.iter().copied());
        }
    })
}

fn backward_plane<T: Element>(
    dx: &mut [T],
    dy: &[T],
    spread: &mut [T::Real],
    total: &mut [T::Real],
    rows: &Outputs<T::Real>,
    columns: &Outputs<T::Real>,
) {
    vectorise!(move || {
        let zero = T::Real::from_f64(0.0);
        total.fill(zero);
        for (dy, row) in dy.chunks_exact(columns.len()).zip(rows) {
            spread.fill(zero);
            add_along(spread, dy, columns);
            add_to_rows(total, &*spread, row);
        }
        narrow(dx, total.iter().copied());
    })
}

fn backward_columns_last<T: Element>(
    dx: &mut [T],
    dy: &[T],
    wide: &mut [T::Real],
    total: &mut [T::Real],
    rows: &Outputs<T::Real>,
    columns: &Outputs<T::Real>,
) {
    vectorise!(move || {
        let zero = T::Real::from_f64(0.0);
        wide.fill(zero);
        for (dy, row) in dy.chunks_exact(columns.len()).zip(rows) {
            add_to_rows(wide, dy, row);
        }
        total.fill(zero);
        let width = total.len() * columns.len() / wide.len();
        for (total, wide) in total.chunks_exact_mut(width).zip(wide.chunks_exact(columns.len())) {
            add_along(total, wide, columns);
        }
        narrow(dx, total.iter().copied());
    })
}

impl CustomOp1 for Resample {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let planes = layout.shape().elem_count() / (self.rows.input * self.columns.input);
        let y = dispatch!(x.dtype(), self.name, T => {
            Ok(T::to_cpu_storage_owned(self.forward(slice::<T>(x, layout)?, planes)))
        })?;
        Ok((y, with_planes(self.format, layout.shape(), self.rows.output(), self.columns.output())))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let input = (kernels::storage_address(x, layout)?, x.dtype());
        Ok(self.on_cuda(x.device(), input, layout.shape(), false)?.into_parts())
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dy = dy.contiguous()?;
        if let Device::Cuda(device) = dy.device() {
            let dx = self.on_cuda(device, (kernels::address(&dy)?, dy.dtype()), dy.shape(), true)?;
            return Ok(Some(dx.into_tensor()));
        }
        let planes = x.elem_count() / (self.rows.input * self.columns.input);
        dispatch!(x.dtype(), self.name, T => {
            let dx = with_slice::<T, _>(&dy, |dy| Ok(self.backward(dy, planes)))?;
            Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Planes share a thread's memory, and the backward pass is the transpose.
    #[test]
    fn planes_do_not_depend_on_each_other() {
        let axis = |(input, output)| Axis::new(input, output, |i| (i * (input - 1) / output, vec![0.25, 0.75]));
        for (rows, columns) in [((3, 7), (4, 9)), ((7, 3), (9, 4)), ((3, 7), (9, 4))] {
            let format = MemoryFormat::Contiguous;
            let map = Resample { name: "test", format, rows: axis(rows), columns: axis(columns) };
            let (input, output) = (rows.0 * columns.0, rows.1 * columns.1);
            let numbers = |count: usize| (0..count).map(|i| (i as f64 * 0.7).sin()).collect::<Vec<_>>();
            let (x, dy) = (numbers(5 * input), numbers(5 * output));
            let (y, dx) = (map.forward(&x, 5), map.backward(&dy, 5));
            assert_eq!(y, x.chunks(input).flat_map(|x| map.forward(x, 1)).collect::<Vec<_>>());
            assert_eq!(dx, dy.chunks(output).flat_map(|dy| map.backward(dy, 1)).collect::<Vec<_>>());
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            assert!((dot(&y, &dy) - dot(&x, &dx)).abs() < 1e-12);
        }
    }
}
