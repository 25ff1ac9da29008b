//! Lookups on CUDA, by the kernels of `lookup.cu`.
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output, THREADS, Temporary};

/// `lookup.cu`'s sizes: the lookups of a tile, and the bits of a digit.
const TILE: usize = 32;
const BITS: usize = 8;
/// A thread of a pass that sorts has at least so many lookups, and more if there were more blocks otherwise: each block reads the counts
/// of all.
const LEAST: usize = 4;
const MOST_BLOCKS: usize = 512;

pub(super) struct LookupOnCuda {
    /// i64
    pub(super) indices: Tensor,
    pub(super) size: usize,
}

/// A table's device, its dtype, and its number of vectors.
type Table<'a> = (&'a CudaDevice, DType, usize);

impl LookupOnCuda {
    fn launch(
        &self,
        (device, dtype, rows): Table,
        kernel: Kernel,
        grid: Grid,
        [shift, vector]: [usize; 2],
        tensors: &[Address],
    ) -> Result<()> {
        let count = self.indices.elem_count();
        let each = self.each();
        let numbers = &[count, rows, self.size, shift, count.div_ceil(each * THREADS as usize), each, vector];
        Ok(kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals: &[] })?)
    }

    /// The lookups of a thread of a pass that sorts.
    fn each(&self) -> usize {
        self.indices.elem_count().div_ceil(MOST_BLOCKS * THREADS as usize).max(LEAST)
    }

    /// The lookups' rows and positions, sorted by row, in pairs of u32.
    fn sorted(&self, table: Table) -> Result<Temporary> {
        let (device, _, rows) = table;
        let count = self.indices.elem_count();
        let blocks = count.div_ceil(self.each() * THREADS as usize);
        let counts = Temporary::new(device, DType::U32, blocks << BITS)?;
        let indices = kernels::address(&self.indices)?;
        let mut items: Option<Temporary> = None;
        // Rows, and one more for indices outside the table.
        let bits = usize::BITS - rows.leading_zeros();
        for shift in (0..bits.max(1) as usize).step_by(BITS) {
            let old = items.as_ref().map_or(Ok(Address::NONE), Temporary::address)?;
            let new = Temporary::new(device, DType::U32, 2 * count)?;
            let tensors = [indices, old, counts.address()?, new.address()?];
            self.launch(table, Kernel::LookupCount, Grid::Blocks(blocks), [shift, 1], &tensors)?;
            self.launch(table, Kernel::LookupMove, Grid::Blocks(blocks), [shift, 1], &tensors)?;
            items = Some(new);
        }
        items.ok_or_else(|| candle_core::Error::Msg("embedding: sorting has at least one pass".to_string()))
    }
}

impl CustomOp1 for LookupOnCuda {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("the table of Embedding was on CUDA")
    }

    fn cuda_fwd(&self, table: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (device, dtype, count) = (table.device(), table.dtype(), self.indices.elem_count());
        kernels::supported(dtype, self.name())?;
        if !self.indices.device().is_cuda() {
            let reason = "they must be on the device of the table, CUDA, not on the CPU".to_string();
            return Err(Error::invalid("the indices of Embedding", reason).into());
        }
        let y = Output::new(device, dtype, (count, self.size))?;
        let [from, to] = [kernels::storage_address(table, layout)?, y.address()?];
        let vector = Address::vector(&[from, to], self.size, dtype);
        let (grid, tensors) = (Grid::Threads(count * self.size / vector), [from, kernels::address(&self.indices)?, to]);
        self.launch((device, dtype, layout.dims()[0]), Kernel::Lookup, grid, [0, vector], &tensors)?;
        Ok(y.into_parts())
    }

    fn bwd(&self, table: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (dy, device, dtype) = (dy.contiguous()?, table.device().as_cuda_device()?, table.dtype());
        let (rows, count) = (table.dim(0)?, self.indices.elem_count());
        let d_table = Output::zeros(device, dtype, table.shape())?;
        if count == 0 {
            return Ok(Some(d_table.into_tensor()));
        }
        // The kernels count in u32.
        for (what, number) in [("the indices of Embedding", count), ("the table of Embedding", rows)] {
            if u32::try_from(number).is_err() {
                let reason = format!("for a gradient on CUDA there must be less than 2^32 rows, not {number}");
                return Err(Error::invalid(what, reason).into());
            }
        }
        let of = (device, dtype, rows);
        let items = self.sorted(of)?;
        let elements = count.div_ceil(TILE) * self.size;
        let sums = Temporary::new(device, accumulator(dtype), 2 * elements)?;
        let tensors = [items.address()?, kernels::address(&dy)?, d_table.address()?, sums.address()?];
        let vector = Address::vector(&tensors[1..], self.size, dtype);
        let grid = Grid::Threads(elements / vector);
        self.launch(of, Kernel::LookupSums, grid, [0, vector], &tensors)?;
        self.launch(of, Kernel::LookupTotals, grid, [0, vector], &tensors)?;
        Ok(Some(d_table.into_tensor()))
    }
}
