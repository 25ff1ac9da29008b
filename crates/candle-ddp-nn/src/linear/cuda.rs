//! Linear layers on CUDA: cuBLAS adds products to the bias, and a kernel computes the bias's gradient.
use crate::channels::accumulator;
use candle_core::{CudaDevice, DType, Result, Shape, Tensor};
use candle_ddp_tensor::kernels::{
    self, Address, Factor, Grid, Kernel, Launch, Output, Product, Target, Temporary, address, address_or_none,
    supported,
};

/// The number of columns, or of vectors of them, that a block of the kernel sums.
const COLUMNS: usize = 32;
/// Enough blocks for every GPU.
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums, if there are enough.
const ROWS: usize = 128;

/// Rows, inputs and outputs.
type Extents = (usize, usize, usize);

/// y = x · Wᵀ + b, of shape `shape`. All tensors are contiguous.
pub(super) fn forward(
    (rows, features, out): Extents,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: Shape,
) -> Result<Output> {
    supported(x.dtype(), "Linear")?;
    let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
    let y = if features == 0 { Output::zeros(device, dtype, shape) } else { Output::new(device, dtype, shape) }?;
    let bias = bias.map(Tensor::contiguous).transpose()?;
    if bias.is_some() {
        let tensors = [y.address()?, address_or_none(bias.as_ref())?];
        let vector = Address::vector(&tensors, out, dtype);
        let (grid, numbers) = (Grid::Threads(rows * (out / vector)), &[rows, out, vector]);
        let launch = Launch { kernel: Kernel::RepeatRow, dtype, grid, tensors: &tensors, numbers, reals: &[] };
        kernels::launch(device, launch)?;
    }
    let c = Target { address: y.address()?, dtype, stride: None, row: None, accumulate: bias.is_some() };
    product(device, [rows, out, features], dtype, [(address(x)?, false), (address(weight)?, true)], c)?;
    Ok(y)
}

/// The gradient of x, of shape `shape`: dy · W.
pub(super) fn input_gradient(
    (rows, features, out): Extents,
    dy: &Tensor,
    weight: &Tensor,
    shape: &Shape,
) -> Result<Tensor> {
    of_product([rows, features, out], (dy, false), (weight, false), shape)
}

/// The gradient of the weight, of shape (out, features): dyᵀ · x.
pub(super) fn weight_gradient((rows, features, out): Extents, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    of_product([out, features, rows], (dy, true), (x, false), &Shape::from((out, features)))
}

/// The gradient of the bias, of shape (out): the sums of dy's columns. Many rows are summed in parts, whose sums are
/// summed in turn.
pub(super) fn bias_gradient((rows, _, out): Extents, dy: &Tensor) -> Result<Tensor> {
    let (device, dtype) = (dy.device().as_cuda_device()?, dy.dtype());
    let sums = Output::new(device, dtype, out)?;
    let vector = |from: Address, to: Address| Address::vector(&[from, to], out, dtype);
    let tiles = |vector: usize| (out / vector).div_ceil(COLUMNS);
    let sum = |[rows, parts, part, from_sums, to_sums]: [usize; 5], from: Address, to: Address| {
        let vector = vector(from, to);
        let numbers = &[rows, out, part, from_sums, to_sums, vector];
        let (kernel, grid) = (Kernel::SumColumns, Grid::Blocks(tiles(vector) * parts));
        kernels::launch(device, Launch { kernel, dtype, grid, tensors: &[from, to], numbers, reals: &[] })
    };
    let (parts, part) = parts(rows, tiles(vector(address(dy)?, sums.address()?)));
    if parts == 1 {
        sum([rows, 1, rows, 0, 0], address(dy)?, sums.address()?)?;
    } else {
        let rest = Temporary::new(device, accumulator(dtype), parts * out)?;
        sum([rows, parts, part, 0, 1], address(dy)?, rest.address()?)?;
        sum([parts, 1, parts, 1, 0], rest.address()?, sums.address()?)?;
    }
    Ok(sums.into_tensor())
}

/// The number of parts in which the rows are summed, and the number of rows in each.
fn parts(rows: usize, tiles: usize) -> (usize, usize) {
    let parts = (BLOCKS / tiles.max(1)).clamp(1, rows.div_ceil(ROWS).max(1));
    let part = rows.div_ceil(parts).max(1);
    (rows.div_ceil(part).max(1), part)
}

/// The product of two contiguous tensors, each of which may be taken transposed.
fn of_product(extents: [usize; 3], a: (&Tensor, bool), b: (&Tensor, bool), shape: &Shape) -> Result<Tensor> {
    let (device, dtype) = (a.0.device().as_cuda_device()?, a.0.dtype());
    let is_empty = extents.contains(&0);
    let result = if is_empty { Output::zeros(device, dtype, shape) } else { Output::new(device, dtype, shape) }?;
    let c = Target { address: result.address()?, dtype, stride: None, row: None, accumulate: false };
    product(device, extents, dtype, [(address(a.0)?, a.1), (address(b.0)?, b.1)], c)?;
    Ok(result.into_tensor())
}

fn product(
    device: &CudaDevice,
    [m, n, k]: [usize; 3],
    dtype: DType,
    ab: [(Address, bool); 2],
    c: Target,
) -> Result<()> {
    if k == 0 {
        return Ok(()); // nothing to add, which cuBLAS is not asked for
    }
    let [a, b] = ab.map(|(address, transposed)| Factor { address, transposed, stride: None, row: None });
    Ok(kernels::product(device, Product { batch: 1, m, n, k, dtype, a, b, c })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_all_rows_and_none_is_empty() {
        for (rows, tiles) in [(0, 1), (1, 1), (128, 1), (129, 1), (8192, 32), (8193, 3), (1_000_000, 1), (5000, 4000)] {
            let (parts, part) = parts(rows, tiles);
            assert!(parts * part >= rows && (parts - 1) * part < rows.max(1), "{rows}, {tiles}: {parts} × {part}");
            assert!(parts == 1 || (parts * tiles <= BLOCKS && part >= ROWS / 2), "{rows}, {tiles}: {parts} × {part}");
        }
    }
}
