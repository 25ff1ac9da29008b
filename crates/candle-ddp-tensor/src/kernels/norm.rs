//! Launching the kernels that normalise rows: the programs for `norm.cu` and `norm_rows.cu`.
use super::gpu::{Gpu, Numbers};
use super::launches::{Address, Arguments, COLUMNS, LOADS, THREADS, blocks_of_rows, lanes};
use super::source::Kernel;
use crate::{Error, Result};
use candle_core::DType;

/// The rows of a tensor, and how they are normalised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    /// Elements in each row; not 0.
    pub(super) size: usize,
    pub(super) eps: f64,
    pub(super) centred: bool,
    /// Whether weight, bias and their gradients have the dtype of the rows, not that of the arithmetic.
    pub(super) is_narrow: bool,
}

/// Enough blocks for sums over columns, for every GPU.
const BLOCKS: usize = 512;
/// The minimum number of rows that a block sums, if there are enough.
const ROWS: usize = 32;
/// The number of columns that a block of `norm_totals` sums, as in norm.cu.
const TOTALS: usize = 8;
/// The number of rows that a thread takes one after the other: forward at most so many, and backward at least 4 and, in the dtype of the
/// arithmetic, at most so many.
const FORWARD: usize = 8;
const BACKWARD: usize = 256;

impl Rows {
    /// How many elements of a row a thread loads at once.
    fn vector(&self, tensors: &[u64]) -> usize {
        let addresses: Vec<Address> = tensors.iter().map(|address| Address::new(*address)).collect();
        Address::vector(&addresses, self.size, self.dtype)
    }

    /// The arguments of a kernel whose threads load `vector` elements at once, and which has so many parts of so many rows.
    fn arguments(&self, tensors: &[u64], vector: usize, (parts, part): (usize, usize)) -> Result<Arguments> {
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
    fn blocks_of_rows(&self, vector: usize) -> usize {
        blocks_of_rows(self.rows, lanes(self.size, vector))
    }

    /// Whether the threads of a block can keep a row in registers.
    fn fits(&self, vector: usize) -> bool {
        vector > 1 && self.size <= THREADS as usize * LOADS * vector
    }

    /// The number of blocks whose threads keep rows, in the forward pass or the backward pass.
    fn kept(&self, is_backward: bool) -> usize {
        let most = Address::vector(&[], 0, self.dtype);
        let lanes = lanes(self.size, most);
        let (blocks, lines) = (blocks_of_rows(self.rows, lanes), THREADS as usize / lanes);
        // The sums of a block's rows take as much memory as a few of these.
        let least = if is_backward { (ROWS / lines).min(16) } else { 1 };
        blocks.div_ceil(blocks.div_ceil(BLOCKS).clamp(least, if is_backward { BACKWARD } else { FORWARD }))
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
    pub(super) fn sums(&self) -> usize {
        2 * self.parts().0.max(self.kept(true)) * self.size
    }
}

/// Addresses of contiguous tensors; `bias` is 0 if there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forward {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) bias: u64,
    pub(super) y: u64,
    /// The tensor that is added to x before, and the sum.
    pub(super) residual: Option<[u64; 2]>,
}

/// Writes y and returns each row's statistics, which [`backward`] needs. Does nothing, and returns `None`, if there is a residual, and
/// no kernel that could add it on the way. There must be at least one row.
pub(super) fn forward(gpu: &Gpu, rows: Rows, addresses: Forward) -> Result<Option<Numbers>> {
    let Forward { x, weight, bias, y, residual } = addresses;
    let others = residual.unwrap_or_default();
    let vector = rows.vector(&[x, y, weight, bias, others[0], others[1]]);
    let kept = rows.kept(false);
    let (kernel, blocks) = match (residual, rows.fits(vector)) {
        (None, true) => (Kernel::NormRows, kept),
        (Some(_), true) => (Kernel::AddNormRows, kept),
        (None, false) => (Kernel::NormForward, rows.blocks_of_rows(vector)),
        (Some(_), false) => return Ok(None),
    };
    let statistics = gpu.numbers(2 * rows.rows)?;
    let tensors = [x, y, weight, bias, gpu.address(&statistics), others[0], others[1]];
    gpu.launch_by_value((kernel, rows.dtype), rows.blocks(blocks)?, &rows.arguments(&tensors, vector, (kept, 0))?)?;
    Ok(Some(statistics))
}

/// Addresses of contiguous tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) dy: u64,
    pub(super) dx: u64,
    pub(super) d_weight: u64,
    pub(super) d_bias: u64,
    /// Memory for what [`Rows::sums`] counts.
    pub(super) sums: u64,
    /// A gradient to which dx is added, or 0.
    pub(super) earlier: u64,
}

/// Writes dx and the gradients of weight and bias. There must be at least one row. Returns whether dx was added to the earlier gradient,
/// if there is one.
pub(super) fn backward(gpu: &Gpu, rows: Rows, statistics: &Numbers, addresses: Backward) -> Result<bool> {
    let Backward { x, weight, dy, dx, d_weight, d_bias, sums, earlier } = addresses;
    let statistics = gpu.address(statistics);
    let launch = |kernel, blocks, tensors: &[u64], vector, parts| {
        gpu.launch_by_value((kernel, rows.dtype), rows.blocks(blocks)?, &rows.arguments(tensors, vector, parts)?)
    };
    let vector = rows.vector(&[x, dx, weight, dy, earlier]);
    let fits = rows.fits(vector);
    let parts = if fits { (rows.kept(true), 0) } else { rows.parts() };
    if fits {
        let kernel = if earlier == 0 { Kernel::NormGradients } else { Kernel::AddNormGradients };
        launch(kernel, parts.0, &[x, dx, weight, dy, statistics, sums, earlier], vector, parts)?;
    } else {
        let vector = rows.vector(&[x, dx, weight, dy]);
        launch(Kernel::NormBackward, rows.blocks_of_rows(vector), &[x, dx, weight, dy, statistics], vector, parts)?;
        let vector = rows.vector(&[x, dy, sums]);
        launch(Kernel::NormColumns, parts.0 * rows.tiles(vector), &[x, dy, statistics, sums], vector, parts)?;
    }
    launch(Kernel::NormTotals, rows.size.div_ceil(TOTALS), &[sums, d_weight, d_bias], 1, parts)?;
    Ok(fits && earlier != 0)
}
