//! cuDNN's algorithms: choosing one, and running it.
use super::descriptor::{Descriptors, failure};
use super::ffi::{self, Candidate, Status};
use crate::Result;
use crate::kernels::launches::{Address, Convolve};
use cudarc::cudnn::sys::{cudnnDeterminism_t, cudnnHandle_t, cudnnMathType_t};
use std::ffi::{c_int, c_void};

/// The number of algorithms that cuDNN is asked for: more than it has.
const CANDIDATES: usize = 16;

/// An algorithm, by cuDNN's number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    Forward(u32),
    BackwardData(u32),
    BackwardFilter(u32),
}

/// Returns the first suitable candidate, and the size of its workspace in bytes. cuDNN orders candidates by expected time. A
/// suitable one gives the same results in every run, has the precision asked for, and needs at most `limit` bytes.
macro_rules! first {
    ($limit:expr, $math:expr, $Algorithm:expr, |$count:ident, $candidates:ident| $query:expr, |$algorithm:ident, $size:ident| $ask:expr) => {{
        // SAFETY: zero is a value of all fields.
        let mut candidates = unsafe { std::mem::zeroed::<[Candidate; CANDIDATES]>() };
        let mut count: c_int = 0;
        let ($count, $candidates) = (&raw mut count, candidates.as_mut_ptr());
        // SAFETY: handle and descriptors exist, and there is room for as many candidates as asked for.
        match unsafe { $query }.result() {
            Ok(()) => {}
            Err(error) if error.is_not_supported() => return Ok(None),
            Err(error) => return Err(failure("querying algorithms", error)),
        }
        let usable = candidates.iter().take(count.unsigned_abs() as usize).filter(|candidate| {
            let is_precise = $math != cudnnMathType_t::CUDNN_FMA_MATH
                || [cudnnMathType_t::CUDNN_FMA_MATH, cudnnMathType_t::CUDNN_DEFAULT_MATH]
                    .iter()
                    .any(|math| *math as u32 == candidate.math);
            candidate.status == Status::SUCCESS
                && candidate.determinism == cudnnDeterminism_t::CUDNN_DETERMINISTIC as u32
                && candidate.memory <= $limit
                && is_precise
        });
        let mut sized = usable.filter_map(|candidate| {
            let mut size = 0;
            let ($algorithm, $size) = (candidate.algorithm, &raw mut size);
            // SAFETY: handle and descriptors exist, and there is room for the size.
            unsafe { $ask }.result().ok()?;
            (size <= $limit).then_some(($Algorithm($algorithm), size))
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
            |count, found| ffi::cudnnGetConvolutionForwardAlgorithm_v7(
                handle,
                x,
                w,
                convolution,
                y,
                most,
                count,
                found
            ),
            |algorithm, size| ffi::cudnnGetConvolutionForwardWorkspaceSize(
                handle,
                x,
                w,
                convolution,
                y,
                algorithm,
                size
            )
        ),
        Convolve::BackwardData => first!(
            limit,
            math,
            Algorithm::BackwardData,
            |count, found| ffi::cudnnGetConvolutionBackwardDataAlgorithm_v7(
                handle,
                w,
                y,
                convolution,
                x,
                most,
                count,
                found
            ),
            |algorithm, size| ffi::cudnnGetConvolutionBackwardDataWorkspaceSize(
                handle,
                w,
                y,
                convolution,
                x,
                algorithm,
                size
            )
        ),
        Convolve::BackwardFilter => first!(
            limit,
            math,
            Algorithm::BackwardFilter,
            |count, found| ffi::cudnnGetConvolutionBackwardFilterAlgorithm_v7(
                handle,
                x,
                y,
                convolution,
                w,
                most,
                count,
                found
            ),
            |algorithm, size| ffi::cudnnGetConvolutionBackwardFilterWorkspaceSize(
                handle,
                x,
                y,
                convolution,
                w,
                algorithm,
                size
            )
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
            Algorithm::Forward(algorithm) => ffi::cudnnConvolutionForward(
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
            Algorithm::BackwardData(algorithm) => ffi::cudnnConvolutionBackwardData(
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
            Algorithm::BackwardFilter(algorithm) => ffi::cudnnConvolutionBackwardFilter(
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
    match done.result() {
        Ok(()) => Ok(true),
        Err(error) if accumulate && error.is_not_supported() => Ok(false),
        Err(error) => Err(failure(format!("{algorithm:?}"), error)),
    }
}
