//! Sums of the columns of a matrix: the gradient of whatever was added to each of its rows.
use crate::borrow::{tensor, with_slice};
use crate::kernels::{self, Address, COLUMNS, Grid, Kernel, Launch, Output, Temporary, address, supported};
use crate::{Element, accumulator, dispatch, vectorise};
use candle_core::{CudaDevice, DType, Device, Result, Shape, Tensor};

/// Enough blocks for every GPU.
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums, if there are enough.
const ROWS: usize = 64;

/// The sums over all rows of a contiguous tensor, whose rows have the shape `shape`. f16 and bf16 are summed in f32.
pub fn column_sums(rows: &Tensor, shape: &Shape) -> Result<Tensor> {
    let columns = shape.elem_count();
    if let Device::Cuda(device) = rows.device() {
        return on_cuda(device, rows, columns, shape, rows.dtype());
    }
    dispatch!(rows.dtype(), "the sums of columns", T => {
        with_slice::<T, _>(rows, |rows| Ok(tensor::<T>(on_cpu(rows, columns), shape)))
    })
}

/// The sums of `each` neighbours in a contiguous tensor on CPUs, added up over all that belong to one element of the shape `shape`.
pub(crate) fn spread_sums(values: &Tensor, shape: &Shape, each: usize) -> Result<Tensor> {
    dispatch!(values.dtype(), "the sums of neighbours", T => with_slice::<T, _>(values, |values| {
        let mut sums = vec![<T as Element>::Real::default(); shape.elem_count()];
        add_neighbours(&mut sums, values, each);
        Ok(tensor::<T>(sums, shape))
    }))
}

fn add_neighbours<T: Element>(sums: &mut [T::Real], values: &[T], each: usize) {
    // Independent sums, so that the compiler can use vectors.
    const LANES: usize = 32;
    vectorise!(move || {
        for values in values.chunks_exact(sums.len() * each) {
            for (sum, values) in sums.iter_mut().zip(values.chunks_exact(each)) {
                let (blocks, rest) = values.as_chunks::<LANES>();
                let mut lanes = [T::Real::default(); LANES];
                for block in blocks {
                    lanes.iter_mut().zip(block).for_each(|(lane, value)| *lane += value.widen());
                }
                rest.iter().for_each(|value| *sum += value.widen());
                lanes.iter().for_each(|lane| *sum += *lane);
            }
        }
    });
}

/// [`column_sums`] on a GPU, in the dtype of the arithmetic.
pub fn wide_column_sums(device: &CudaDevice, rows: &Tensor, columns: usize) -> Result<Tensor> {
    on_cuda(device, rows, columns, &Shape::from(columns), accumulator(rows.dtype()))
}

fn on_cpu<T: Element>(rows: &[T], columns: usize) -> Vec<T::Real> {
    let mut sums = vec![T::Real::default(); columns];
    if columns > 0 {
        vectorise!(|| {
            for row in rows.chunks_exact(columns) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value.widen());
            }
        });
    }
    sums
}

/// Many rows are summed in parts, whose sums are summed in turn.
fn on_cuda(device: &CudaDevice, from: &Tensor, columns: usize, shape: &Shape, result: DType) -> Result<Tensor> {
    let dtype = from.dtype();
    supported(dtype, "the sums of columns")?;
    let sums = Output::new(device, result, shape.clone())?;
    let to_sums = usize::from(result != dtype);
    let rows = from.elem_count() / columns.max(1);
    let vector = |from: Address, to: Address| Address::vector(&[from, to], columns, dtype);
    let tiles = |vector: usize| (columns / vector).div_ceil(COLUMNS);
    let sum = |[rows, parts, part, from_sums, to_sums]: [usize; 5], from: Address, to: Address| {
        let vector = vector(from, to);
        let numbers = &[rows, columns, part, from_sums, to_sums, vector];
        let (kernel, grid) = (Kernel::SumColumns, Grid::Blocks(tiles(vector) * parts));
        kernels::launch(device, Launch { kernel, dtype, grid, tensors: &[from, to], numbers, reals: &[] })
    };
    let (parts, part) = parts(rows, tiles(vector(address(from)?, sums.address()?)));
    if parts == 1 {
        sum([rows, 1, rows, 0, to_sums], address(from)?, sums.address()?)?;
    } else {
        let rest = Temporary::new(device, accumulator(dtype), parts * columns)?;
        sum([rows, parts, part, 0, 1], address(from)?, rest.address()?)?;
        sum([parts, 1, parts, 1, to_sums], rest.address()?, sums.address()?)?;
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
