//! How much memory an algorithm of cuDNN may use.
use crate::{Error, Result};
use cudarc::driver::CudaContext;

/// The environment variable with the largest workspace of an algorithm, in bytes.
const VARIABLE: &str = "CANDLE_DDP_CUDNN_WORKSPACE";
/// The part of the GPU's memory without the variable. It is no part of the memory that is free at the moment, with which the
/// algorithms, and so the results' last bits, would change from run to run.
const SHARE: usize = 32;
/// What small GPUs grant as well.
const LEAST: usize = 64 << 20;

/// The largest workspace of an algorithm, in bytes.
pub(super) fn limit(context: &CudaContext) -> Result<usize> {
    match std::env::var_os(VARIABLE) {
        Some(value) => parse(&value.to_string_lossy()),
        None => Ok(context.total_mem().map_or(LEAST, share)),
    }
}

fn share(memory: usize) -> usize {
    (memory / SHARE).max(LEAST)
}

fn parse(value: &str) -> Result<usize> {
    value.trim().parse().map_err(|_| Error::invalid(VARIABLE, format!("{value:?}: it must be a number of bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_memory_unless_the_variable_says_otherwise() {
        assert_eq!([1 << 30, 16 << 30, 80 << 30].map(share), [64 << 20, 512 << 20, 2560 << 20]);
        assert_eq!([" 0", "1048576"].map(|value| parse(value).unwrap()), [0, 1 << 20]);
        let error = parse("64M").unwrap_err().to_string();
        assert!(error.contains("CANDLE_DDP_CUDNN_WORKSPACE") && error.contains("64M"), "{error}");
    }
}
