//! Launching the kernels that normalise rows: the programs for `norm.cu`.
use super::launches::{Address, Arguments};
use super::program::Machine;
use super::source::Kernel;
use super::table::THREADS;
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
}

/// The minimum number of blocks for sums over columns, if there are enough rows.
const BLOCKS: usize = 256;
/// The minimum number of rows that a block sums.
const MIN_ROWS: usize = 32;

impl Rows {
    /// How many elements of a row a thread loads at once.
    fn vector(&self, tensors: &[u64]) -> usize {
        let addresses: Vec<Address> = tensors.iter().map(|address| Address::new(*address)).collect();
        Address::vector(&addresses, self.size, self.dtype)
    }

    fn arguments(&self, tensors: &[u64]) -> Result<Arguments> {
        let numbers = [self.rows, self.size, usize::from(self.centred), self.group(), self.vector(tensors)];
        Arguments::new(tensors.iter().copied(), &numbers, &[self.eps])
    }

    fn blocks(&self, count: usize) -> Result<u32> {
        i32::try_from(count).map(i32::unsigned_abs).map_err(|_| {
            let reason = format!("{} rows of {} elements exceed the limits of one launch", self.rows, self.size);
            Error::invalid("the input of a norm", reason)
        })
    }

    /// Returns the number of blocks that share the columns of a group of rows, if a thread has `vector` of them.
    fn tiles(&self, vector: usize) -> usize {
        self.size.div_ceil(THREADS as usize * vector)
    }

    /// Returns the number of rows in a group.
    fn group(&self) -> usize {
        let most = Address::vector(&[], 0, self.dtype);
        self.rows.div_ceil(BLOCKS.div_ceil(self.tiles(most))).max(MIN_ROWS)
    }

    fn groups(&self) -> usize {
        self.rows.div_ceil(self.group())
    }

    /// The numbers that [`backward`] keeps for a moment.
    pub fn sums(&self) -> usize {
        2 * self.groups() * self.size
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
    let arguments = rows.arguments(&[x, y, weight, bias, machine.address(&statistics)])?;
    machine.launch_by_value((Kernel::NormForward, rows.dtype), rows.blocks(rows.rows)?, &arguments)?;
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
    /// Memory for as many numbers (f64) as [`Rows::sums`] says.
    pub sums: u64,
}

/// Writes dx and the gradients of weight and bias. There must be at least one row.
pub fn backward<M: Machine>(machine: &M, rows: Rows, statistics: &M::Numbers, addresses: Backward) -> Result<()> {
    let Backward { x, weight, dy, dx, d_weight, d_bias, sums } = addresses;
    let statistics = machine.address(statistics);
    let launch = |kernel, blocks, tensors: &[u64]| {
        machine.launch_by_value((kernel, rows.dtype), rows.blocks(blocks)?, &rows.arguments(tensors)?)
    };
    launch(Kernel::NormBackward, rows.rows, &[x, dx, weight, dy, statistics])?;
    let tensors = [x, dy, statistics, sums];
    launch(Kernel::NormColumns, rows.groups() * rows.tiles(rows.vector(&tensors)), &tensors)?;
    launch(Kernel::NormTotals, rows.tiles(1), &[sums, d_weight, d_bias])
}
