//! Products of matrices by cuBLAS, on candle's handle and stream.
use super::launches::{Address, Factor, Product};
use crate::{Error, Result};
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{CudaDevice, DType};
use cudarc::cublas::result::gemm_strided_batched_ex;
use cudarc::cublas::sys::{cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cudaDataType};
use std::ffi::c_void;

/// The number of products in a call. cuBLAS refuses more than 65535 on some GPUs; after a power of two, the next matrices begin at an
/// address that is as aligned as the first.
const MOST: usize = 1 << 15;

/// Enqueues a product after all work that candle has enqueued on `device`. Does not wait. f16 and bf16 are multiplied and
/// added up in f32; f32 in TF32 only if candle was asked for it (`set_gemm_reduced_precision_f32`).
pub fn product(device: &CudaDevice, product: Product) -> Result<()> {
    use cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_64F};
    let Product { batch, m, n, k, dtype, a, b, c } = product;
    if batch == 0 || m == 0 || n == 0 {
        return Ok(());
    }
    let int = |size: usize| {
        i32::try_from(size).map_err(|_| {
            Error::invalid("the tensors of a layer", format!("{m} × {k} × {n}: a matrix is too large for cuBLAS"))
        })
    };
    let compute = match dtype {
        DType::F64 => CUBLAS_COMPUTE_64F,
        DType::F32 if gemm_reduced_precision_f32() => CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => CUBLAS_COMPUTE_32F,
    };
    let (factors, result, wide) = (data_type(dtype), data_type(c.dtype), dtype == DType::F64);
    let beta = f64::from(u8::from(c.accumulate));
    let (scalars, wide_scalars) = ([1f32, beta as f32], [1f64, beta]);
    let [alpha, beta]: [*const c_void; 2] = if wide {
        [0, 1].map(|index| (&raw const wide_scalars[index]).cast())
    } else {
        [0, 1].map(|index| (&raw const scalars[index]).cast())
    };
    // cuBLAS is column-major, so it computes cᵀ = bᵀ · aᵀ.
    let operation = |factor: Factor| match factor.transposed {
        true => cublasOperation_t::CUBLAS_OP_T,
        false => cublasOperation_t::CUBLAS_OP_N,
    };
    let a_leading = a.row.unwrap_or(if a.transposed { m } else { k });
    let b_leading = b.row.unwrap_or(if b.transposed { k } else { n });
    let [a_stride, b_stride, c_stride] =
        [(a.stride, m * k), (b.stride, k * n), (c.stride, m * n)].map(|(stride, dense)| stride.unwrap_or(dense) as i64);
    let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
    let failed = |error: &dyn std::fmt::Display| Error::Kernel {
        file: "cuBLAS",
        operation: format!("a product of {m} × {k} and {k} × {n} in {}", dtype.as_str()),
        reason: error.to_string(),
    };
    stream.context().bind_to_thread().map_err(|error| failed(&error))?;
    for first in (0..batch).step_by(MOST) {
        let address = |address: Address, stride: i64, dtype| address.skip(first * stride as usize, dtype).0;
        // SAFETY: the matrices are on this device, and live until the call returns; memory that is freed later is freed
        // after the product, on the same stream. The scalars are on the host, from which the call reads them.
        unsafe {
            gemm_strided_batched_ex(
                *blas.handle(),
                operation(b),
                operation(a),
                int(n)?,
                int(m)?,
                int(k)?,
                alpha,
                address(b.address, b_stride, dtype) as *const c_void,
                factors,
                int(b_leading)?,
                b_stride,
                address(a.address, a_stride, dtype) as *const c_void,
                factors,
                int(a_leading)?,
                a_stride,
                beta,
                address(c.address, c_stride, c.dtype) as *mut c_void,
                result,
                int(c.row.unwrap_or(n))?,
                c_stride,
                int(MOST.min(batch - first))?,
                compute,
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .map_err(|error| failed(&error))?;
    }
    Ok(())
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F64 => cudaDataType::CUDA_R_64F,
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::BF16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}
