//! Launching the kernels that normalise rows: the programs for `norm.cu`.
use super::operands::Scalars;
use super::program::Machine;
use super::source::Kernel;
use super::table::{Entry, THREADS, Table};
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
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums.
const MIN_ROWS: usize = 32;

impl Rows {
    fn scalars(&self, rows: usize) -> Scalars {
        super::scalars([self.size as f64, self.eps, f64::from(u8::from(self.centred)), rows as f64])
    }

    fn upload<M: Machine>(&self, machine: &M, entry: Entry) -> Result<M::Words> {
        machine.upload(&Table::new(&[Entry { elements: self.rows * self.size, ..entry }])?.words)
    }

    fn blocks(&self, count: usize) -> Result<u32> {
        i32::try_from(count).map(i32::unsigned_abs).map_err(|_| {
            let reason = format!("{} rows of {} elements exceed the limits of one launch", self.rows, self.size);
            Error::invalid("the input of a norm", reason)
        })
    }

    /// Returns the number of blocks that share the columns of a group of rows.
    fn tiles(&self) -> usize {
        self.size.div_ceil(THREADS as usize)
    }

    /// Returns the number of rows in a group.
    fn group(&self) -> usize {
        self.rows.div_ceil(BLOCKS.div_ceil(self.tiles())).max(MIN_ROWS)
    }
}

/// Addresses of contiguous tensors; `bias` is 0 if there is none.
pub struct Forward {
    pub x: u64,
    pub weight: u64,
    pub bias: u64,
    pub y: u64,
}

/// Writes y and returns each row's statistics, which [`backward`] needs. There must be at least one row.
pub fn forward<M: Machine>(machine: &M, rows: Rows, addresses: Forward) -> Result<M::Numbers> {
    let Forward { x, weight, bias, y } = addresses;
    let scalars = rows.scalars(0);
    let words =
        rows.upload(machine, Entry { parameter: y, gradient: x, states: [weight, bias], scalars, elements: 0 })?;
    let mut statistics = machine.zeros(2 * rows.rows)?;
    let kernel = (Kernel::NormForward, rows.dtype);
    machine.launch(kernel, rows.blocks(rows.rows)?, &words, 1, Some(&mut statistics))?;
    Ok(statistics)
}

/// Addresses of contiguous tensors.
pub struct Backward {
    pub x: u64,
    pub weight: u64,
    pub dy: u64,
    pub dx: u64,
    pub d_weight: u64,
    pub d_bias: u64,
}

/// Writes dx and the gradients of weight and bias. There must be at least one row.
pub fn backward<M: Machine>(machine: &M, rows: Rows, statistics: &mut M::Numbers, addresses: Backward) -> Result<()> {
    let Backward { x, weight, dy, dx, d_weight, d_bias } = addresses;
    let (dtype, group) = (rows.dtype, rows.group());
    let (tiles, groups) = (rows.tiles(), rows.rows.div_ceil(group));
    let scalars = rows.scalars(group);
    let entry = Entry { parameter: dx, gradient: x, states: [dy, weight], scalars, elements: 0 };
    let words = rows.upload(machine, entry)?;
    machine.launch((Kernel::NormBackward, dtype), rows.blocks(rows.rows)?, &words, 1, Some(statistics))?;
    let entry = Entry { parameter: machine.address(statistics), states: [dy, 0], ..entry };
    let words = rows.upload(machine, entry)?;
    let mut sums = machine.zeros(2 * groups * rows.size)?;
    machine.launch((Kernel::NormColumns, dtype), rows.blocks(groups * tiles)?, &words, 1, Some(&mut sums))?;
    let words = rows.upload(machine, Entry { parameter: d_weight, gradient: 0, states: [d_bias, 0], ..entry })?;
    machine.launch((Kernel::NormTotals, dtype), rows.blocks(tiles)?, &words, 1, Some(&mut sums))
}
