//! How much memory an algorithm of cuDNN may use.
use crate::{Error, Result};
use cudarc::driver::CudaContext;

/// The environment variable with the largest workspace of an algorithm, in bytes.
const VARIABLE: &str = "CANDLE_DDP_CUDNN_WORKSPACE";
/// The part of the GPU's memory without the variable. The algorithms, and so the results' last bits, depend on the memory that is free
/// only where it is short.
const SHARE: usize = 32;
/// The part of the memory that is free when a thread first needs cuDNN.
const SHARE_OF_FREE: usize = 4;
/// What small GPUs grant as well.
const LEAST: usize = 64 << 20;

/// The largest workspace of an algorithm, in bytes.
pub(super) fn limit(context: &CudaContext) -> Result<usize> {
    match std::env::var_os(VARIABLE) {
        Some(value) => parse(&value.to_string_lossy()),
        None => Ok(context.mem_get_info().map_or(LEAST, |(free, total)| share(free, total))),
    }
}

fn share(free: usize, total: usize) -> usize {
    (total / SHARE).min(free / SHARE_OF_FREE).max(LEAST)
}

fn parse(value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| Error::invalid(VARIABLE, format!("{value:?}: it must be a number of bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_memory_unless_the_variable_says_otherwise() {
        assert_eq!([1 << 30, 16 << 30, 80 << 30].map(|total| share(total, total)), [64 << 20, 512 << 20, 2560 << 20]);
        assert_eq!([0, 4 << 30].map(|free| share(free, 80 << 30)), [64 << 20, 1 << 30]);
        assert_eq!([" 0", "1048576"].map(|value| parse(value).unwrap()), [0, 1 << 20]);
        let error = parse("64M").unwrap_err().to_string();
        assert!(error.contains("CANDLE_DDP_CUDNN_WORKSPACE") && error.contains("64M"), "{error}");
    }
}
