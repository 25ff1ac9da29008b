//! How much memory an algorithm of cuDNN may use.
use crate::Result;
use candle_ddp_env::PROCESS;
use cudarc::driver::CudaContext;

/// The part of the GPU's memory without `CANDLE_DDP_CUDNN_WORKSPACE` in the environment. The algorithms, and so the results' last bits, depend on the memory that is free
/// only where it is short.
const SHARE: usize = 32;
/// The part of the memory that is free when a thread first needs cuDNN.
const SHARE_OF_FREE: usize = 4;
/// The least, which small GPUs grant as well.
const LEAST: usize = 64 << 20;

/// The largest workspace of an algorithm, in bytes.
pub(super) fn limit(context: &CudaContext) -> Result<usize> {
    match PROCESS.number("CANDLE_DDP_CUDNN_WORKSPACE")? {
        Some(bytes) => Ok(bytes),
        None => Ok(context.mem_get_info().map_or(LEAST, |(free, total)| share(free, total))),
    }
}

fn share(free: usize, total: usize) -> usize {
    (total / SHARE).min(free / SHARE_OF_FREE).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_memory() {
        assert_eq!([1 << 30, 16 << 30, 80 << 30].map(|total| share(total, total)), [64 << 20, 512 << 20, 2560 << 20]);
        assert_eq!([0, 4 << 30].map(|free| share(free, 80 << 30)), [64 << 20, 1 << 30]);
    }
}
