//! Launching the kernels that normalise rows: the programs for `norm.cu`.
use super::launches::{Address, Arguments, COLUMNS, blocks_of_rows, lanes};
use super::program::Machine;
use super::source::Kernel;
use crate::{Error, Result};
use candle_core::DType;

/// The rows of a tensor, and how they are normalised.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub dtype: DType,
    pub rows: usize,
    /// Elements in each row; not 0.
    pub size: usize,
    pub eps: f64,
    pub centred: bool,
    /// Whether weight, bias and their gradients have the dtype of the rows, not that of the arithmetic.
    pub is_narrow: bool,
}

/// Enough blocks for sums over columns, for every GPU.
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums, if there are enough.
const ROWS: usize = 32;

impl Rows {
    /// How many elements of a row a thread loads at once.
    fn vector(&self, tensors: &[u64]) -> usize {
        let addresses: Vec<Address> = tensors.iter().map(|address| Address::new(*address)).collect();
        Address::vector(&addresses, self.size, self.dtype)
    }

    fn arguments(&self, tensors: &[u64]) -> Result<Arguments> {
        let (vector, (parts, part)) = (self.vector(tensors), self.parts());
        let flags = [self.centred, self.is_narrow].map(usize::from);
        let numbers = [self.rows, self.size, flags[0], flags[1], vector, lanes(self.size, vector), part, parts];
        Arguments::new(tensors.iter().copied(), &numbers, &[self.eps])
    }

    fn blocks(&self, count: usize) -> Result<u32> {
        i32::try_from(count).map(i32::unsigned_abs).map_err(|_| {
            let reason = format!("{} rows of {} elements exceed the limits of one launch", self.rows, self.size);
            Error::invalid("the input of a norm", reason)
        })
    }

    /// The number of blocks for all rows.
    fn blocks_of_rows(&self, tensors: &[u64]) -> usize {
        blocks_of_rows(self.rows, lanes(self.size, self.vector(tensors)))
    }

    /// The number of blocks that share the columns of some rows, if a thread has `vector` of them.
    fn tiles(&self, vector: usize) -> usize {
        self.size.div_ceil(COLUMNS * vector)
    }

    /// The number of parts in which the rows are summed, and the number of rows in each.
    fn parts(&self) -> (usize, usize) {
        let most = Address::vector(&[], 0, self.dtype);
        let parts = (BLOCKS / self.tiles(most)).clamp(1, self.rows.div_ceil(ROWS).max(1));
        let part = self.rows.div_ceil(parts).max(1);
        (self.rows.div_ceil(part).max(1), part)
    }

    /// The number of sums that [`backward`] keeps for a moment, in the dtype of the arithmetic.
    pub fn sums(&self) -> usize {
        2 * self.parts().0 * self.size
    }
}

/// Addresses of contiguous tensors; `bias` is 0 if there is none.
#[derive(Debug)]
pub struct Forward {
    pub x: u64,
    pub weight: u64,
    pub bias: u64,
    pub y: u64,
}

/// Writes y and returns each row's statistics, which [`backward`] needs. There must be at least one row.
pub fn forward<M: Machine>(machine: &M, rows: Rows, addresses: Forward) -> Result<M::Numbers> {
    let Forward { x, weight, bias, y } = addresses;
    let statistics = machine.numbers(2 * rows.rows)?;
    let tensors = [x, y, weight, bias, machine.address(&statistics)];
    let blocks = rows.blocks(rows.blocks_of_rows(&tensors))?;
    machine.launch_by_value((Kernel::NormForward, rows.dtype), blocks, &rows.arguments(&tensors)?)?;
    Ok(statistics)
}

/// Addresses of contiguous tensors.
#[derive(Debug)]
pub struct Backward {
    pub x: u64,
    pub weight: u64,
    pub dy: u64,
    pub dx: u64,
    pub d_weight: u64,
    pub d_bias: u64,
    /// Memory for what [`Rows::sums`] counts.
    pub sums: u64,
}

/// Writes dx and the gradients of weight and bias. There must be at least one row.
pub fn backward<M: Machine>(machine: &M, rows: Rows, statistics: &M::Numbers, addresses: Backward) -> Result<()> {
    let Backward { x, weight, dy, dx, d_weight, d_bias, sums } = addresses;
    let statistics = machine.address(statistics);
    let launch = |kernel, blocks, tensors: &[u64]| {
        machine.launch_by_value((kernel, rows.dtype), rows.blocks(blocks)?, &rows.arguments(tensors)?)
    };
    let tensors = [x, dx, weight, dy, statistics];
    launch(Kernel::NormBackward, rows.blocks_of_rows(&tensors), &tensors)?;
    let tensors = [x, dy, statistics, sums];
    launch(Kernel::NormColumns, rows.parts().0 * rows.tiles(rows.vector(&tensors)), &tensors)?;
    launch(Kernel::NormTotals, rows.tiles(1), &[sums, d_weight, d_bias])
}
