//! Products of contiguous matrices on CUDA.
use candle_core::{CudaDevice, DType, Result};
use candle_ddp_tensor::kernels::{self, Address, Epilogue, Factor, Product, Target};

/// Rows, inputs and outputs.
pub(crate) type Extents = (usize, usize, usize);

/// A contiguous matrix.
pub(crate) fn factor(address: Address, transposed: bool) -> Factor {
    Factor { address, transposed, stride: None, row: None }
}

/// A contiguous matrix, which is overwritten.
pub(crate) fn target(address: Address, dtype: DType) -> Target {
    Target { address, dtype, stride: None, row: None, accumulate: false }
}

pub(crate) fn product(
    device: &CudaDevice,
    [m, n, k]: [usize; 3],
    dtype: DType,
    [a, b]: [Factor; 2],
    c: Target,
) -> Result<()> {
    if k == 0 {
        return Ok(()); // nothing to add, which cuBLAS is not asked for
    }
    Ok(kernels::product(device, Product { batch: 1, m, n, k, dtype, a, b, c })?)
}

/// A product that overwrites `c`, with more; false, and nothing is done, if cuBLASLt does not offer it.
pub(super) fn with_epilogue(
    device: &CudaDevice,
    [m, n, k]: [usize; 3],
    [a, b]: [Factor; 2],
    c: Target,
    epilogue: Epilogue,
) -> Result<bool> {
    Ok(kernels::product_with(device, Product { batch: 1, m, n, k, dtype: c.dtype, a, b, c }, epilogue)?)
}
