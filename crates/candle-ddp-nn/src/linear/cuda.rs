//! Linear layers on CUDA: cuBLAS adds products to the bias, and a kernel computes the bias's gradient.
use super::product::{Extents, factor, product, target};
use super::uneven::Uneven;
use crate::channels::accumulator;
use candle_core::{Result, Shape, Tensor};
use candle_ddp_tensor::kernels::{
    self, Address, Grid, Kernel, Launch, Output, Target, Temporary, address, address_or_none, supported,
};

/// The number of columns, or of vectors of them, that a block of the kernel sums.
const COLUMNS: usize = 32;
/// Enough blocks for every GPU.
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums, if there are enough.
const ROWS: usize = 64;

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
    let (x, weight) = (address(x)?, address(weight)?);
    match Uneven::new(device, dtype, (rows, features, out)).filter(|_| bias.is_none()) {
        Some(uneven) => uneven.forward(x, weight, y.address()?)?,
        None => {
            let c = Target { accumulate: bias.is_some(), ..target(y.address()?, dtype) };
            product(device, [rows, out, features], dtype, [factor(x, false), factor(weight, true)], c)?;
        }
    }
    Ok(y)
}

/// The gradients of x, dy · W, and of the weight, dyᵀ · x, as far as they are needed.
pub(super) fn gradients(
    (rows, features, out): Extents,
    [x, weight, dy]: [&Tensor; 3],
    needed: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let (device, dtype) = (dy.device().as_cuda_device()?, dy.dtype());
    let result = |is_needed: bool, summed: usize, shape: &Shape| {
        let new = if summed == 0 { Output::zeros } else { Output::new };
        is_needed.then(|| new(device, dtype, shape.clone())).transpose()
    };
    let (dx, d_weight) = (result(needed[0], out, x.shape())?, result(needed[1], rows, weight.shape())?);
    let [dx_address, d_weight_address] = [&dx, &d_weight].map(|of| of.as_ref().map(Output::address).transpose());
    let (dx_address, d_weight_address) = (dx_address?, d_weight_address?);
    let [x, weight, dy] = [address(x)?, address(weight)?, address(dy)?];
    if let Some(uneven) = Uneven::new(device, dtype, (rows, features, out)) {
        uneven.gradients([x, weight, dy], dx_address, d_weight_address)?;
    } else {
        if let Some(dx) = dx_address {
            let ab = [factor(dy, false), factor(weight, false)];
            product(device, [rows, features, out], dtype, ab, target(dx, dtype))?;
        }
        if let Some(d_weight) = d_weight_address {
            let ab = [factor(dy, true), factor(x, false)];
            product(device, [out, features, rows], dtype, ab, target(d_weight, dtype))?;
        }
    }
    Ok([dx, d_weight].map(|gradient| gradient.map(Output::into_tensor)))
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
