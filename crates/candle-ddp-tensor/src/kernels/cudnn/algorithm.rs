//! cuDNN's algorithms: choosing one, and running it.
use super::descriptor::{Descriptors, failure};
use crate::Result;
use crate::kernels::launches::{Address, Convolve};
use cudarc::cudnn::result;
use cudarc::cudnn::sys::{
    cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdFilterAlgo_t, cudnnConvolutionFwdAlgo_t, cudnnDeterminism_t,
    cudnnHandle_t, cudnnMathType_t, cudnnStatus_t,
};
use std::ffi::{c_int, c_void};

/// The number of algorithms that cuDNN is asked for: more than it has.
const CANDIDATES: usize = 16;

#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    Forward(cudnnConvolutionFwdAlgo_t),
    BackwardData(cudnnConvolutionBwdDataAlgo_t),
    BackwardFilter(cudnnConvolutionBwdFilterAlgo_t),
}

/// Returns the first suitable candidate, and the size of its workspace in bytes. cuDNN orders candidates by expected time. A
/// suitable one gives the same results in every run, has the precision asked for, and needs at most `limit` bytes.
macro_rules! first {
    ($limit:expr, $math:expr, $Algorithm:expr, |$count:ident, $candidates:ident| $query:expr, |$algorithm:ident| $size:expr) => {{
        // SAFETY: zero is a value of all fields.
        let mut candidates = unsafe { std::mem::zeroed::<[_; CANDIDATES]>() };
        let mut count: c_int = 0;
        let ($count, $candidates) = (&raw mut count, candidates.as_mut_ptr());
        // SAFETY: handle and descriptors exist, and there is room for as many candidates as asked for.
        match unsafe { $query } {
            Ok(()) => {}
            Err(result::CudnnError(cudnnStatus_t::CUDNN_STATUS_NOT_SUPPORTED)) => return Ok(None),
            Err(error) => return Err(failure("querying algorithms", error)),
        }
        let usable = candidates.iter().take(count.unsigned_abs() as usize).filter(|candidate| {
            let is_precise = $math != cudnnMathType_t::CUDNN_FMA_MATH
                || matches!(candidate.mathType, cudnnMathType_t::CUDNN_FMA_MATH | cudnnMathType_t::CUDNN_DEFAULT_MATH);
            candidate.status == cudnnStatus_t::CUDNN_STATUS_SUCCESS
                && candidate.determinism == cudnnDeterminism_t::CUDNN_DETERMINISTIC
                && candidate.memory <= $limit
                && is_precise
        });
        let mut sized = usable.filter_map(|candidate| {
            let $algorithm = candidate.algo;
            // SAFETY: handle and descriptors exist.
            let size = unsafe { $size }.ok().filter(|size| *size <= $limit)?;
            Some(($Algorithm($algorithm), size))
        });
        sized.next()
    }};
}

/// Chooses an algorithm; `None` if cuDNN has no suitable one.
pub(super) fn choose(
    handle: cudnnHandle_t,
    convolve: Convolve,
    descriptors: &Descriptors,
    limit: usize,
    math: cudnnMathType_t,
) -> Result<Option<(Algorithm, usize)>> {
    let Descriptors { x, y, w, convolution } = *descriptors;
    let most = CANDIDATES as c_int;
    Ok(match convolve {
        Convolve::Forward => first!(
            limit,
            math,
            Algorithm::Forward,
            |count, found| result::get_convolution_forward_algorithm(handle, x, w, convolution, y, most, count, found),
            |algorithm| result::get_convolution_forward_workspace_size(handle, x, w, convolution, y, algorithm)
        ),
        Convolve::BackwardData => first!(
            limit,
            math,
            Algorithm::BackwardData,
            |count, found| result::get_convolution_backward_data_algorithm(
                handle,
                w,
                y,
                convolution,
                x,
                most,
                count,
                found
            ),
            |algorithm| result::get_convolution_backward_data_workspace_size(handle, w, y, convolution, x, algorithm)
        ),
        Convolve::BackwardFilter => first!(
            limit,
            math,
            Algorithm::BackwardFilter,
            |count, found| result::get_convolution_backward_filter_algorithm(
                handle,
                x,
                y,
                convolution,
                w,
                most,
                count,
                found
            ),
            |algorithm| result::get_convolution_backward_filter_workspace_size(handle, x, y, convolution, w, algorithm)
        ),
    })
}

/// The factors of the result and of the earlier contents.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalars {
    /// Whether it calculates in f64.
    pub(super) is_wide: bool,
    /// Whether results are added to what is there.
    pub(super) accumulate: bool,
}

/// Enqueues a convolution on the handle's stream. Does not wait. Returns false if the algorithm cannot add to what is there.
pub(super) fn run(
    handle: cudnnHandle_t,
    descriptors: &Descriptors,
    algorithm: Algorithm,
    (workspace, bytes): (Address, usize),
    [x, w, y]: [Address; 3],
    Scalars { is_wide, accumulate }: Scalars,
) -> Result<bool> {
    let Descriptors { x: x_is, y: y_is, w: w_is, convolution } = *descriptors;
    let before = u8::from(accumulate);
    let ((one, before), (wide_one, wide_before)) = ((1f32, f32::from(before)), (1f64, f64::from(before)));
    // Of the dtype of the arithmetic.
    let (one, before): (*const c_void, *const c_void) = match is_wide {
        true => ((&raw const wide_one).cast(), (&raw const wide_before).cast()),
        false => ((&raw const one).cast(), (&raw const before).cast()),
    };
    let pointer = |address: Address| address.0 as *mut c_void;
    let ([x, w, y], workspace) =
        ([x, w, y].map(pointer), if bytes == 0 { std::ptr::null_mut() } else { pointer(workspace) });
    // SAFETY: handle and descriptors exist, and the tensors are as these describe them; they live until the call returns,
    // and memory that is freed later is freed after the kernels, on the same stream. The scalars are read before the call
    // returns. The workspace is as large as cuDNN asked for.
    let done = unsafe {
        match algorithm {
            Algorithm::Forward(algorithm) => result::convolution_forward(
                handle,
                one,
                x_is,
                x,
                w_is,
                w,
                convolution,
                algorithm,
                workspace,
                bytes,
                before,
                y_is,
                y,
            ),
            Algorithm::BackwardData(algorithm) => result::convolution_backward_data(
                handle,
                one,
                w_is,
                w,
                y_is,
                y,
                convolution,
                algorithm,
                workspace,
                bytes,
                before,
                x_is,
                x,
            ),
            Algorithm::BackwardFilter(algorithm) => result::convolution_backward_filter(
                handle,
                one,
                x_is,
                x,
                y_is,
                y,
                convolution,
                algorithm,
                workspace,
                bytes,
                before,
                w_is,
                w,
            ),
        }
    };
    match done {
        Ok(()) => Ok(true),
        Err(error) if accumulate && super::backend::is_not_supported(error.0) => Ok(false),
        Err(error) => Err(failure(format!("{algorithm:?}"), error)),
    }
}
