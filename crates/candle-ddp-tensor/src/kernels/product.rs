//! Products of matrices by cuBLAS, on candle's handle and stream.
use super::address::stream_of;
use super::launches::{Address, Factor, Product};
use crate::{Error, Result};
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{CudaDevice, DType};
use cudarc::cublas::CudaBlas;
use cudarc::cublas::result::gemm_strided_batched_ex;
use cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cublasPointerMode_t, cudaDataType,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Display;
use std::sync::{Arc, LazyLock};

/// The number of products in a call. cuBLAS refuses more than 65535 on some GPUs; after a power of two, the next matrices begin at an
/// address that is as aligned as the first.
const MOST: usize = 1 << 15;

/// Enqueues a product after all work that candle has enqueued on `device`. Does not wait. f16 and bf16 are multiplied and
/// added up in f32; f32 in TF32 only if candle was asked for it (`set_gemm_reduced_precision_f32`).
pub fn product(device: &CudaDevice, product: Product) -> Result<()> {
    let (is_wide, beta) = (product.dtype == DType::F64, f64::from(u8::from(product.c.accumulate)));
    let (scalars, wide_scalars) = ([1f32, beta as f32], [1f64, beta]);
    let scalars = [0, 1].map(|index| match is_wide {
        true => (&raw const wide_scalars[index]).cast(),
        false => (&raw const scalars[index]).cast(),
    });
    enqueue(device, &device.cublas_handle(), product, scalars)
}

/// Handles that read scalars from the GPU, by context and stream, whose addresses stay taken. Candle's own handle, which all threads
/// share, must continue to read them from the host. They are never dropped: at the end of the process, cuBLAS may be gone.
static HANDLES: LazyLock<Mutex<Handles>> = LazyLock::new(Mutex::default);

type Handles = HashMap<(usize, usize), Arc<CudaBlas>>;

/// Like [`product`], of c = α · a · b + β · c, with the numbers α and β in the dtype of the arithmetic on the GPU.
pub fn scaled_product(device: &CudaDevice, product: Product, scalars: Address) -> Result<()> {
    let blas = {
        let mut handles = HANDLES.lock();
        match handles.get(&stream_of(device)) {
            Some(blas) => Arc::clone(blas),
            None => {
                let failed = |error| failure(&product, &error);
                let blas = CudaBlas::new(device.cuda_stream()).map_err(failed)?;
                blas.set_pointer_mode(cublasPointerMode_t::CUBLAS_POINTER_MODE_DEVICE).map_err(failed)?;
                Arc::clone(handles.entry(stream_of(device)).or_insert(Arc::new(blas)))
            }
        }
    };
    let of_arithmetic = if product.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let scalars = [0, 1].map(|index| scalars.skip(index, of_arithmetic).0 as *const c_void);
    enqueue(device, &blas, product, scalars)
}

fn failure(product: &Product, error: &dyn Display) -> Error {
    let Product { m, n, k, dtype, .. } = product;
    Error::Kernel {
        file: "cuBLAS",
        operation: format!("a product of {m} × {k} and {k} × {n} in {}", dtype.as_str()),
        reason: error.to_string(),
    }
}

/// The scalars are where the handle reads them: on the host until the call returns, or on the GPU.
fn enqueue(device: &CudaDevice, blas: &CudaBlas, product: Product, [alpha, beta]: [*const c_void; 2]) -> Result<()> {
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
    let (factors, result) = (data_type(dtype), data_type(c.dtype));
    // cuBLAS is column-major, so it computes cᵀ = bᵀ · aᵀ.
    let (a_leading, b_leading) = (leading(a, m, k), leading(b, k, n));
    let [a_stride, b_stride, c_stride] =
        [(a.stride, m * k), (b.stride, k * n), (c.stride, m * n)].map(|(stride, dense)| stride.unwrap_or(dense) as i64);
    let failed = |error: &dyn Display| failure(&product, error);
    device.cuda_stream().context().bind_to_thread().map_err(|error| failed(&error))?;
    for first in (0..batch).step_by(MOST) {
        let address = |address: Address, stride: i64, dtype| address.skip(first * stride as usize, dtype).0;
        // SAFETY: the matrices are on this device, and live until the call returns; memory that is freed later is freed
        // after the product, on the same stream. So do the scalars.
        unsafe {
            gemm_strided_batched_ex(
                *blas.handle(),
                operation(b.transposed),
                operation(a.transposed),
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

/// The distance from one row in memory of a factor of `rows` × `columns` to the next.
pub(super) fn leading(factor: Factor, rows: usize, columns: usize) -> usize {
    factor.row.unwrap_or(if factor.transposed { rows } else { columns })
}

pub(super) fn operation(is_transposed: bool) -> cublasOperation_t {
    match is_transposed {
        true => cublasOperation_t::CUBLAS_OP_T,
        false => cublasOperation_t::CUBLAS_OP_N,
    }
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F64 => cudaDataType::CUDA_R_64F,
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::BF16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}
