//! The matrix products of cuBLASLt whose epilogues linear layers need.
use crate::blas::{DType, Epilogue, Matrices, Product, SUCCESS, Scalar, Status};
use crate::memory::check;
use crate::object::{create, destroyers};
use std::ffi::{c_int, c_void};

const INVALID_VALUE: Status = 7;
const NOT_SUPPORTED: Status = 15;

/// `CUBLAS_COMPUTE_32F` and `CUBLAS_COMPUTE_32F_FAST_TF32`.
const COMPUTE_32F: [c_int; 2] = [68, 77];
/// `CUBLASLT_EPILOGUE_BIAS` and `CUBLASLT_EPILOGUE_BGRADB`.
const BIAS: u32 = 4;
const BGRADB: u32 = 512;
/// `CUBLASLT_REDUCTION_SCHEME_INPLACE`: by atomic additions, in any order.
const IN_PLACE: u32 = 1;
/// What every algorithm asks for.
const WORKSPACE: usize = 4096;
const MAGIC: u64 = 0x6c74_616c_676f;

/// A `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy)]
struct Layout {
    dtype: DType,
    rows: usize,
    columns: usize,
    leading: usize,
}

/// A `cublasLtMatmulDesc_t`.
#[derive(Clone, Copy)]
struct Description {
    compute: c_int,
    /// Of A and B.
    transposed: [bool; 2],
    epilogue: u32,
    bias: u64,
}

/// A `cublasLtMatmulPreference_t`.
#[derive(Clone, Copy)]
struct Preference {
    workspace: usize,
    reductions: u32,
    /// Of A, B, C and D.
    alignments: [u32; 4],
}

/// A `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Algorithm {
    data: [u64; 8],
}

/// A `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

destroyers!(
    cublasLtDestroy: u64,
    cublasLtMatrixLayoutDestroy: Layout,
    cublasLtMatmulDescDestroy: Description,
    cublasLtMatmulPreferenceDestroy: Preference
);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut *mut c_void) -> Status {
    if crate::driver::context_device().is_none() {
        return 1; // NOT_INITIALIZED
    }
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, 0u64) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut *mut c_void,
    dtype: c_int,
    rows: u64,
    columns: u64,
    leading: i64,
) -> Status {
    let Some(dtype) = DType::new(dtype) else { return NOT_SUPPORTED };
    let (rows, columns, leading) = (rows as usize, columns as usize, leading.max(0) as usize);
    // SAFETY: guaranteed by the caller.
    unsafe { create(layout, Layout { dtype, rows, columns, leading }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    description: *mut *mut c_void,
    compute: c_int,
    scale: c_int,
) -> Status {
    if DType::new(scale) != Some(DType::F32) {
        return NOT_SUPPORTED;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { create(description, Description { compute, transposed: [false; 2], epilogue: 1, bias: 0 }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    size: usize,
) -> Status {
    // SAFETY: guaranteed by the caller.
    let description = unsafe { &mut *description.cast::<Description>() };
    // SAFETY: the caller guarantees that the value has this size.
    let read = |expected: usize| (size == expected).then(|| unsafe { read(value, size) });
    match attribute {
        3 | 4 => match read(4) {
            Some(operation) => description.transposed[(attribute - 3) as usize] = operation != 0,
            None => return INVALID_VALUE,
        },
        7 => match read(4) {
            Some(epilogue) => description.epilogue = epilogue as u32,
            None => return INVALID_VALUE,
        },
        8 => match read(8) {
            Some(bias) => description.bias = bias,
            None => return INVALID_VALUE,
        },
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// # Safety
/// The number must have 4 or 8 bytes.
unsafe fn read(value: *const c_void, size: usize) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if size == 4 { value.cast::<u32>().read_unaligned().into() } else { value.cast::<u64>().read_unaligned() }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut *mut c_void) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { create(preference, Preference { workspace: 0, reductions: 7, alignments: [256; 4] }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut c_void,
    attribute: c_int,
    value: *const c_void,
    size: usize,
) -> Status {
    // SAFETY: guaranteed by the caller.
    let preference = unsafe { &mut *preference.cast::<Preference>() };
    if size != if attribute == 1 { 8 } else { 4 } {
        return INVALID_VALUE;
    }
    // SAFETY: the caller guarantees that the value has this size.
    let number = unsafe { read(value, size) };
    match attribute {
        1 => preference.workspace = number as usize,
        3 => preference.reductions = number as u32,
        5..=8 => preference.alignments[(attribute - 5) as usize] = number as u32,
        _ => return NOT_SUPPORTED,
    }
    SUCCESS
}

/// Offers one algorithm, which needs a workspace and the alignments that were promised.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // cuBLASLt's
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    description: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    preference: *mut c_void,
    requested: c_int,
    found: *mut Found,
    count: *mut c_int,
) -> Status {
    // SAFETY: guaranteed by the caller.
    let (description, preference, layouts) = unsafe {
        (
            *description.cast::<Description>(),
            *preference.cast::<Preference>(),
            [a, b, c, d].map(|layout| *layout.cast::<Layout>()),
        )
    };
    // SAFETY: guaranteed by the caller.
    unsafe { *count = 0 };
    if requested < 1 {
        return INVALID_VALUE;
    }
    if preference.reductions & IN_PLACE != 0 {
        crate::driver::fatal("cuBLASLt may choose an algorithm whose results differ between runs");
    }
    let is_known = [1, BIAS, BGRADB].contains(&description.epilogue) && COMPUTE_32F.contains(&description.compute);
    let has_bias = description.epilogue == 1 || description.bias != 0;
    let fits = shapes(&description, &layouts).is_some() && preference.workspace >= WORKSPACE;
    // As with some kernels for 16 bits.
    let narrow = layouts[0].dtype.bytes() == 2;
    let is_even = !narrow
        || layouts.iter().all(|layout| layout.leading.is_multiple_of(8))
            && preference.alignments.iter().all(|alignment| *alignment >= 16);
    if !(is_known && has_bias && fits && is_even) {
        return NOT_SUPPORTED;
    }
    let [a, b, c, d] = preference.alignments.map(u64::from);
    let algorithm = Algorithm { data: [MAGIC, a, b, c, d, u64::from(description.epilogue), 0, 0] };
    // SAFETY: guaranteed by the caller.
    unsafe {
        found.write(Found { algorithm, workspace: WORKSPACE, state: SUCCESS, waves: 1.0, reserved: [0; 4] });
        *count = 1;
    }
    SUCCESS
}

/// The extents m, n and k, if the matrices fit each other.
fn shapes(description: &Description, [a, b, c, d]: &[Layout; 4]) -> Option<[usize; 3]> {
    let shape = |layout: &Layout, is_transposed: bool| match is_transposed {
        true => [layout.columns, layout.rows],
        false => [layout.rows, layout.columns],
    };
    let ([m, k], [other_k, n]) = (shape(a, description.transposed[0]), shape(b, description.transposed[1]));
    let is_right = |layout: &Layout| [layout.rows, layout.columns] == [m, n] && layout.dtype == a.dtype;
    let leads = [a, b, c, d].iter().all(|layout| layout.leading >= layout.rows);
    (k == other_k && b.dtype == a.dtype && is_right(c) && is_right(d) && leads).then_some([m, n, k])
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // cuBLASLt's
pub unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    description: *mut c_void,
    alpha: *const f32,
    a: *const c_void,
    of_a: *mut c_void,
    b: *const c_void,
    of_b: *mut c_void,
    beta: *const f32,
    c: *const c_void,
    of_c: *mut c_void,
    d: *mut c_void,
    of_d: *mut c_void,
    algorithm: *const Algorithm,
    workspace: *mut c_void,
    workspace_size: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: guaranteed by the caller.
    let (description, layouts, [magic, aligned @ .., epilogue, _, _], alpha, beta) = unsafe {
        let layouts = [of_a, of_b, of_c, of_d].map(|layout| *layout.cast::<Layout>());
        (*description.cast::<Description>(), layouts, (*algorithm).data, *alpha, *beta)
    };
    let Some([m, n, k]) = shapes(&description, &layouts) else { return INVALID_VALUE };
    let addresses = [a as u64, b as u64, c as u64, d as u64];
    let are_aligned = addresses.iter().zip(aligned).all(|(address, by)| address.is_multiple_of(by));
    let is_chosen = magic == MAGIC && epilogue == u64::from(description.epilogue) && workspace_size >= WORKSPACE;
    if !are_aligned || !is_chosen || addresses[2] != addresses[3] {
        return INVALID_VALUE;
    }
    let matrices = |index: usize, transposed| {
        let Layout { dtype, rows, columns, leading } = layouts[index];
        Matrices { address: addresses[index], dtype, rows, columns, leading, stride: 0, transposed }
    };
    let epilogue = match description.epilogue {
        BIAS => Some(Epilogue::Bias(description.bias)),
        BGRADB => Some(Epilogue::RowSums(description.bias)),
        _ => None,
    };
    let product = Product {
        m,
        n,
        k,
        batch: 1,
        alpha: Scalar::Host(alpha.into()),
        beta: Scalar::Host(beta.into()),
        a: matrices(0, description.transposed[0]),
        b: matrices(1, description.transposed[1]),
        c: matrices(3, false),
        epilogue,
    };
    let workspace = workspace as u64;
    product.put_on(stream, move || {
        check(workspace, workspace_size, "the workspace of a product");
        // SAFETY: the memory is allocated, and the program guarantees to cuBLASLt that nothing else uses it.
        unsafe { (workspace as *mut u8).write_bytes(0xff, workspace_size) };
    })
}
