//! Products on CUDA with outputs whose rows begin at addresses that are no multiples of 16 bytes, such as those of a vocabulary of
//! 50257 tokens. For them, cuBLAS has only kernels that load one element at a time, which take several times as long. So all columns
//! but the last few are multiplied in a copy with even rows, and the last few by themselves.
use super::product::{Extents, factor, product, target};
use candle_core::{CudaDevice, DType, Result};
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Temporary};

/// Products with fewer rows, features or outputs take less time than the copy saves.
const LARGE: [usize; 3] = [64, 256, 1024];

/// Whether the rows of a product's output begin at addresses that suit only slow kernels, and the product is large enough for a copy to help.
pub(crate) fn is_uneven(dtype: DType, (rows, features, out): Extents) -> bool {
    let vector = Address::vector(&[], 0, dtype);
    let is_large = [rows, features, out].iter().zip(LARGE).all(|(extent, large)| *extent >= large);
    is_large && features.is_multiple_of(vector) && !out.is_multiple_of(vector)
}

/// An output of `rows` × `out` elements. `even` of its columns are multiplied in a copy.
pub(super) struct Uneven<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    extents: Extents,
    even: usize,
}

impl<'a> Uneven<'a> {
    /// None if a copy would not help.
    pub(super) fn new(device: &'a CudaDevice, dtype: DType, extents: Extents) -> Option<Self> {
        let (out, vector) = (extents.2, Address::vector(&[], 0, dtype));
        let helps = dtype.size_in_bytes() == 2 && is_uneven(dtype, extents);
        helps.then_some(Self { device, dtype, extents, even: out - out % vector })
    }

    /// y = x · Wᵀ
    pub(super) fn forward(&self, x: Address, weight: Address, y: Address) -> Result<()> {
        let Self { device, dtype, extents: (rows, features, out), even } = *self;
        let copy = Temporary::new(device, dtype, rows * even)?;
        let (x, weights) = (factor(x, false), [weight, weight.skip(even * features, dtype)].map(|w| factor(w, true)));
        product(device, [rows, even, features], dtype, [x, weights[0]], target(copy.address()?, dtype))?;
        self.move_even((copy.address()?, even), (y, out))?;
        let rest = kernels::Target { row: Some(out), ..target(y.skip(even, dtype), dtype) };
        product(device, [rows, out - even, features], dtype, [x, weights[1]], rest)
    }

    /// dx = dy · W and dW = dyᵀ · x, as far as there is memory for them.
    pub(super) fn gradients(
        &self,
        [x, weight, dy]: [Address; 3],
        dx: Option<Address>,
        d_weight: Option<Address>,
    ) -> Result<()> {
        let Self { device, dtype, extents: (rows, features, out), even } = *self;
        let copy = Temporary::new(device, dtype, rows * even)?;
        self.move_even((dy, out), (copy.address()?, even))?;
        let rest = |transposed| kernels::Factor { row: Some(out), ..factor(dy.skip(even, dtype), transposed) };
        let before = even * features;
        if let Some(dx) = dx {
            // The few first: what the others are added to is rounded, so it had better be small.
            let [few, all] = [false, true].map(|accumulate| kernels::Target { accumulate, ..target(dx, dtype) });
            let weights = [weight, weight.skip(before, dtype)].map(|weight| factor(weight, false));
            product(device, [rows, features, out - even], dtype, [rest(false), weights[1]], few)?;
            product(device, [rows, features, even], dtype, [factor(copy.address()?, false), weights[0]], all)?;
        }
        if let Some(d_weight) = d_weight {
            let x = factor(x, false);
            let of_copy = factor(copy.address()?, true);
            product(device, [even, features, rows], dtype, [of_copy, x], target(d_weight, dtype))?;
            let rest_of_weight = target(d_weight.skip(before, dtype), dtype);
            product(device, [out - even, features, rows], dtype, [rest(true), x], rest_of_weight)?;
        }
        Ok(())
    }

    /// Copies the even columns between matrices, given with the elements of their rows.
    fn move_even(&self, (from, from_row): (Address, usize), (to, to_row): (Address, usize)) -> Result<()> {
        let Self { device, dtype, extents: (rows, ..), even } = *self;
        let grid = Grid::Threads(rows * (even / Address::vector(&[], 0, dtype) + 1));
        let (tensors, numbers) = (&[from, to], &[rows, even, from_row, to_row, from_row]);
        let launch = Launch { kernel: Kernel::MoveColumns, dtype, grid, tensors, numbers, reals: &[] };
        Ok(kernels::launch(device, launch)?)
    }
}
