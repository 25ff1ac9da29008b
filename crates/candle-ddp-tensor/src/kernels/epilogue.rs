//! Products of matrices by cuBLASLt, which adds the bias of a linear layer to the result while it is at hand, or sums the bias's gradient
//! while it reads the result's. The algorithm for each shape is chosen once, by its heuristics, and kept.
use super::handles::{Handles, with_handle};
use super::launches::{Address, Epilogue, Product};
use super::product::{leading, operation};
use super::temporary::Temporary;
use crate::{Error, Result};
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{CudaDevice, DType};
use candle_ddp_env::PROCESS;
use cudarc::cublaslt::result;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreferenceAttributes_t as Limit, cublasLtMatrixLayout_t,
    cublasStatus_t, cudaDataType,
};
use cudarc::driver::CudaStream;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

/// The workspace that cuBLASLt may use, in bytes: as much as cuBLAS uses on large GPUs.
const WORKSPACE: usize = 32 << 20;
/// The number of shapes for which a thread keeps algorithms.
const PLANS: usize = 4096;
/// The largest alignment that an algorithm may ask for, in bytes.
const ALIGNMENT: u64 = 256;
/// The ways to add up the parts of a divided sum that give the same bits in every run: in the dtype of the arithmetic, and in that of the
/// result, but not in place.
const REDUCTIONS: u32 = 2 | 4;

/// The fewest multiplications of a product for which cuBLASLt is used. Smaller ones gain nothing, and on an H100 a ResNet-50, with one such
/// product in each direction, spent half as much time again on the host's side of all its other calls.
const LARGE: usize = 1 << 30;

/// The fewest multiplications for which cuBLASLt is used; `CANDLE_DDP_CUBLASLT` in the environment says 0 for none and 1 for all products.
static FEWEST: LazyLock<candle_ddp_env::Result<Option<usize>>> = LazyLock::new(|| {
    Ok(match PROCESS.switch("CANDLE_DDP_CUBLASLT")? {
        Some(false) => None,
        Some(true) => Some(1),
        None => Some(LARGE),
    })
});

impl Epilogue<'_> {
    fn kind(self) -> cublasLtEpilogue_t {
        match self {
            Self::Bias(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            // cuBLAS is column-major, so its second factor is a.
            Self::RowSums(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
        }
    }

    fn address(self) -> u64 {
        let (Self::Bias(address) | Self::RowSums(address)) = self;
        address.0
    }
}

/// Enqueues a single product that overwrites c, of the factors' dtype, after all work that candle has enqueued on `device`. Does not wait.
/// Returns false, and does nothing, if cuBLASLt does not offer it. Precision is that of `product`.
pub fn product_with(device: &CudaDevice, product: Product, epilogue: Epilogue) -> Result<bool> {
    let Product { m, n, k, dtype, a, b, c, .. } = product;
    let is_large = FEWEST.clone()?.is_some_and(|fewest| m * n * k >= fewest);
    if !is_large || dtype == DType::F64 || c.dtype != dtype || c.accumulate || product.batch != 1 {
        return Ok(false);
    }
    let numbers = epilogue.address();
    let aligned = |address: u64| 1 << address.trailing_zeros().min(ALIGNMENT.trailing_zeros());
    let key = Key {
        extents: [m, n, k],
        transposed: [a.transposed, b.transposed],
        leading: [leading(a, m, k), leading(b, k, n), c.row.unwrap_or(n)],
        dtype,
        is_tf32: dtype == DType::F32 && gemm_reduced_precision_f32(),
        epilogue: epilogue.kind(),
        alignments: [a.address.0, b.address.0, c.address.0, numbers].map(aligned),
    };
    with_handle("cuBLASLt", &HANDLES, Handle::new, device, |handle| {
        let Some(plan) = handle.plan(key, numbers)? else { return Ok(false) };
        let workspace = Temporary::new(device, DType::U8, plan.workspace)?;
        plan.run(handle, [a.address, b.address, c.address], numbers, workspace.address()?)?;
        Ok(true)
    })
}

/// Everything on which the choice of an algorithm depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    extents: [usize; 3],
    transposed: [bool; 2],
    leading: [usize; 3],
    dtype: DType,
    is_tf32: bool,
    epilogue: cublasLtEpilogue_t,
    /// The alignments of a, b, c and the epilogue's numbers, in bytes.
    alignments: [u32; 4],
}

impl Key {
    /// cudarc's bindings of cuBLASLt have their own type for this.
    fn data_type(&self) -> cudaDataType {
        match self.dtype {
            DType::F16 => cudaDataType::CUDA_R_16F,
            DType::BF16 => cudaDataType::CUDA_R_16BF,
            _ => cudaDataType::CUDA_R_32F,
        }
    }

    fn compute_type(&self) -> cublasComputeType_t {
        match self.is_tf32 {
            true => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        }
    }
}

fn failure(operation: impl Into<String>, error: &dyn std::fmt::Display) -> Error {
    Error::Kernel { file: "cuBLASLt", operation: operation.into(), reason: error.to_string() }
}

/// An algorithm, and the descriptors of its product.
struct Plan {
    product: cublasLtMatmulDesc_t,
    /// The layouts of b, a and c, in the order of cuBLAS, which computes cᵀ = bᵀ · aᵀ.
    matrices: [cublasLtMatrixLayout_t; 3],
    algorithm: cublasLtMatmulAlgo_t,
    /// In bytes.
    workspace: usize,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // Nobody is left to handle an error.
        // SAFETY: what is not null was created, and is destroyed only here.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for matrix in self.matrices.into_iter().filter(|matrix| !matrix.is_null()) {
                let _ = result::destroy_matrix_layout(matrix);
            }
        }
    }
}

impl Plan {
    /// None if cuBLASLt has no algorithm.
    fn new(handle: cublasLtHandle_t, key: &Key, numbers: u64) -> Result<Option<Self>> {
        let failed = |error| failure(format!("describing {key:?}"), &error);
        let [m, n, k] = key.extents;
        let mut plan = Self {
            product: result::create_matmul_desc(key.compute_type(), cudaDataType::CUDA_R_32F).map_err(failed)?,
            matrices: [null_mut(); 3],
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        };
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, operation(key.transposed[1]))?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, operation(key.transposed[0]))?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, numbers)?;
        let in_memory = |rows, columns, is_transposed| if is_transposed { [columns, rows] } else { [rows, columns] };
        let matrices = [
            (in_memory(k, n, key.transposed[1]), key.leading[1]),
            (in_memory(m, k, key.transposed[0]), key.leading[0]),
            ([m, n], key.leading[2]),
        ];
        for (matrix, ([rows, columns], leading)) in plan.matrices.iter_mut().zip(matrices) {
            // Rows in memory are cuBLAS's columns.
            *matrix = result::create_matrix_layout(key.data_type(), columns as u64, rows as u64, leading as i64)
                .map_err(failed)?;
        }
        match plan.choose(handle, key) {
            Ok(()) => Ok(Some(plan)),
            Err(result::CublasError(
                cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
            )) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    fn set<T>(&self, attribute: Attribute, value: T) -> Result<()> {
        let value = (&raw const value).cast();
        // SAFETY: the descriptor exists, and the attribute has the type of the value.
        unsafe { result::set_matmul_desc_attribute(self.product, attribute, value, size_of::<T>()) }
            .map_err(|error| failure(format!("setting {attribute:?}"), &error))
    }

    /// Asks for the algorithm that is expected to take the least time.
    fn choose(&mut self, handle: cublasLtHandle_t, key: &Key) -> std::result::Result<(), result::CublasError> {
        let [a, b, c, _] = key.alignments;
        let limits = [
            (Limit::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCTIONS),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ];
        let (limit, [b, a, c]) = (result::create_matmul_pref()?, self.matrices);
        // SAFETY: the descriptors exist until they are destroyed, here and by `drop`, and each attribute has the type of its value.
        unsafe {
            let most = Limit::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let mut set = result::set_matmul_pref_attribute(
                limit,
                most,
                std::ptr::from_ref(&WORKSPACE).cast(),
                size_of::<usize>(),
            );
            for (attribute, value) in &limits {
                let value = std::ptr::from_ref(value).cast();
                set = set.and_then(|()| result::set_matmul_pref_attribute(limit, *attribute, value, size_of::<u32>()));
            }
            let found = set.and_then(|()| result::get_matmul_algo_heuristic(handle, self.product, b, a, c, c, limit));
            let _ = result::destroy_matmul_pref(limit);
            found.map(|found| (self.algorithm, self.workspace) = (found.algo, found.workspaceSize))
        }
    }

    /// Enqueues the product on the handle's stream.
    fn run(&self, handle: &Handle, [a, b, c]: [Address; 3], numbers: u64, workspace: Address) -> Result<()> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, numbers)?;
        let (one, zero, [of_b, of_a, of_c]) = (1f32, 0f32, self.matrices);
        let [a, b, c, workspace] = [a, b, c, workspace].map(|address| address.0 as *mut c_void);
        // SAFETY: handle and descriptors exist, and the matrices are as these describe them; they live until the call returns, and
        // memory that is freed later is freed after the product, on the same stream. The scalars are read before the call returns.
        // The workspace is as large as cuBLASLt asked for.
        unsafe {
            result::matmul(
                handle.raw,
                self.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                b,
                of_b,
                a,
                of_a,
                c,
                of_c,
                c,
                of_c,
                &raw const self.algorithm,
                workspace,
                self.workspace,
                handle.stream.cu_stream().cast(),
            )
        }
        .map_err(|error| failure("a product", &error))
    }
}

/// cuBLASLt's handle of a thread for a stream.
struct Handle {
    raw: cublasLtHandle_t,
    stream: Arc<CudaStream>,
    /// None where cuBLASLt has no algorithm.
    plans: HashMap<Key, Option<Rc<Plan>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody is left to handle an error.
        let _ = self.stream.context().bind_to_thread();
        // SAFETY: the handle was created, and is destroyed only here.
        let _ = unsafe { result::destroy_handle(self.raw) };
    }
}

impl Handle {
    fn new(stream: Arc<CudaStream>) -> Result<Self> {
        let raw = result::create_handle().map_err(|error| failure("creating a handle", &error))?;
        Ok(Self { raw, stream, plans: HashMap::new() })
    }

    fn plan(&mut self, key: Key, numbers: u64) -> Result<Option<Rc<Plan>>> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = Plan::new(self.raw, &key, numbers)?.map(Rc::new);
        log::debug!("{key:?} by {}", plan.as_ref().map_or("cuBLAS and kernels", |_| "cuBLASLt"));
        if self.plans.len() >= PLANS {
            self.plans.clear();
        }
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }
}

thread_local! {
    static HANDLES: Handles<Handle> = Handles::default();
}
