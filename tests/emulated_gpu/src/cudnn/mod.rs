//! The convolutions of cuDNN, over images in the formats NCHW and NHWC, and the graphs of attention.
mod calculate;
mod descriptors;
mod graph;

use crate::blas::DType;
use crate::count::count;
use crate::driver::context_device;
use crate::memory::check;
use crate::object::{create, destroyers, give};
use crate::stream::push;
use calculate::calculate;
use descriptors::{Convolution, Tensor};
use std::ffi::{c_float, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A `cudnnStatus_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1001;
const BAD_PARAM: Status = 2000;
const NOT_SUPPORTED: Status = 3000;
const EXECUTION_FAILED: Status = 5000;

const FMA_MATH: c_int = 3;

/// A `cudnnHandle_t`: holds the handle of its stream.
struct Handle(AtomicUsize);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Forward,
    BackwardData,
    BackwardFilter,
}

destroyers!(cudnnDestroy: Handle);

#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    92_100
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreate(handle: *mut *mut c_void) -> Status {
    if context_device().is_none() {
        return NOT_INITIALIZED;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, Handle(AtomicUsize::new(0))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetStream(handle: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: the handle came from `cudnnCreate`.
    unsafe { &*handle.cast::<Handle>() }.0.store(stream as usize, Ordering::Relaxed);
    SUCCESS
}

/// The descriptors of a convolution.
#[derive(Clone, Copy)]
struct Problem {
    x: Tensor,
    w: Tensor,
    y: Tensor,
    convolution: Convolution,
}

impl Problem {
    /// # Safety
    /// These must be descriptors of their kinds.
    unsafe fn read(x: *mut c_void, w: *mut c_void, y: *mut c_void, convolution: *mut c_void) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            Self {
                x: *x.cast::<Tensor>(),
                w: *w.cast::<Tensor>(),
                y: *y.cast::<Tensor>(),
                convolution: *convolution.cast::<Convolution>(),
            }
        }
    }

    /// Whether the extents belong together.
    fn fits(&self) -> bool {
        let (Self { x, w, y, .. }, Convolution { padding, stride, dilation, groups, .. }) = (self, self.convolution);
        let is_seen = (0..2).all(|axis| {
            let span = dilation[axis] * (w.sizes[2 + axis] - 1) + 1;
            let free = (x.sizes[2 + axis] + 2 * padding[axis]).checked_sub(span);
            free.is_some_and(|free| free / stride[axis] + 1 == y.sizes[2 + axis])
        });
        x.dtype.is_some()
            && x.dtype == w.dtype
            && x.dtype == y.dtype
            && x.is_nhwc == w.is_nhwc
            && x.is_nhwc == y.is_nhwc
            && x.sizes[0] == y.sizes[0]
            && x.sizes[1] == w.sizes[1] * groups
            && y.sizes[1] == w.sizes[0]
            && y.sizes[1] % groups == 0
            && is_seen
    }

    /// The workspace that the algorithms here ask for. They overwrite it, to see that it exists.
    fn workspace(&self, kind: Kind) -> usize {
        match kind {
            Kind::Forward => 0,
            Kind::BackwardData => 256,
            Kind::BackwardFilter => self.w.bytes() + 12,
        }
    }
}

/// A `cudnnConvolutionFwdAlgoPerf_t`, or one of the other two.
#[repr(C)]
pub struct Performance {
    algorithm: c_int,
    status: Status,
    time: c_float,
    memory: usize,
    determinism: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// An algorithm of each kind, and one that should not be chosen.
const GOOD: c_int = 1;
const BAD: c_int = 0;

/// # Safety
/// There must be room for `requested` candidates, and these must be descriptors of their kinds.
unsafe fn candidates(
    kind: Kind,
    problem: Problem,
    requested: c_int,
    returned: *mut c_int,
    results: *mut Performance,
) -> Status {
    if !problem.fits() {
        return BAD_PARAM;
    }
    // The kernels of a shape are loaded when it is first asked for.
    crate::module::await_gpu();
    // As cuDNN may, this refuses some convolutions in one format: of odd channels all in f64, and the weights' gradient in f16.
    let is_odd = problem.x.is_nhwc && problem.x.sizes[1] % 2 == 1;
    match problem.x.dtype {
        Some(DType::F64) if is_odd => return NOT_SUPPORTED,
        Some(DType::F16) if is_odd && kind == Kind::BackwardFilter => return NOT_SUPPORTED,
        _ => {}
    }
    let math = problem.convolution.math;
    let candidate = |algorithm, status, memory, determinism, math| Performance {
        algorithm,
        status,
        time: 1.0,
        memory,
        determinism,
        math,
        reserved: [0; 3],
    };
    let memory = problem.workspace(kind);
    let found = [
        // Not there, too large, different from run to run, and less precise than asked for.
        candidate(BAD, NOT_SUPPORTED, 0, 1, math),
        candidate(BAD, SUCCESS, 8 << 30, 1, math),
        candidate(BAD, SUCCESS, 0, 0, math),
        candidate(if math == FMA_MATH { BAD } else { GOOD }, SUCCESS, memory, 1, 1),
        candidate(GOOD, SUCCESS, memory, 1, math),
    ];
    let count = found.len().min(requested.max(0) as usize);
    for (index, candidate) in found.into_iter().take(count).enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { results.add(index).write(candidate) };
    }
    // SAFETY: guaranteed by the caller.
    unsafe { give(returned, count as c_int) }
}

/// Data, and the factors of the new result and of the old one.
#[derive(Clone, Copy)]
struct Operands {
    x: u64,
    w: u64,
    y: u64,
    alpha: f64,
    beta: f64,
}

/// Runs `kind` on the stream of `handle`.
///
/// # Safety
/// The requirements are those of cuDNN's convolutions.
#[allow(clippy::too_many_arguments)]
unsafe fn convolve(
    handle: *mut c_void,
    kind: Kind,
    problem: Problem,
    algorithm: c_int,
    (workspace, bytes): (*mut c_void, usize),
    [x, w, y]: [u64; 3],
    alpha: *const c_void,
    beta: *const c_void,
) -> Status {
    let needed = problem.workspace(kind);
    if !problem.fits() || bytes < needed || (needed > 0 && workspace.is_null()) {
        return BAD_PARAM;
    }
    if algorithm != GOOD {
        return NOT_SUPPORTED;
    }
    // cuDNN's kernels load 16 bytes at once; a GPU reports this only when the kernel has failed.
    if [x, w, y, workspace as u64].iter().any(|address| !address.is_multiple_of(16)) {
        return EXECUTION_FAILED;
    }
    let scalars = if problem.x.dtype == Some(DType::F64) { DType::F64 } else { DType::F32 };
    // SAFETY: the scalars are on the host.
    let (alpha, beta) = unsafe { (scalars.read(alpha as u64, 0), scalars.read(beta as u64, 0)) };
    // SAFETY: the handle came from `cudnnCreate`.
    let stream = unsafe { &*handle.cast::<Handle>() }.0.load(Ordering::Relaxed);
    let (operands, workspace) = (Operands { x, w, y, alpha, beta }, workspace as u64);
    count("convolution", 1);
    let pushed = push(stream as *mut c_void, move || {
        check(workspace, needed, "the workspace of a convolution");
        check(operands.x, problem.x.bytes(), "x of a convolution");
        check(operands.w, problem.w.bytes(), "w of a convolution");
        check(operands.y, problem.y.bytes(), "y of a convolution");
        // SAFETY: all of it is allocated; the program guarantees to cuDNN that nothing else uses it.
        unsafe {
            (workspace as *mut u8).write_bytes(0xFF, needed);
            calculate(kind, &problem, &operands);
        }
    });
    if pushed == 0 { SUCCESS } else { EXECUTION_FAILED }
}

/// The three functions of a kind of convolution. The first list names the operands and their descriptors, for the other two:
/// the order of descriptors in cuDNN's queries, and the order of two operands and the result in the convolution itself.
macro_rules! convolution {
    (
        |$x:ident, $w:ident, $y:ident, $x_desc:ident, $w_desc:ident, $y_desc:ident, $convolution:ident|
        $kind:expr, $algorithms:ident, $workspace:ident, $run:ident, [$a:ident, $b:ident, $c:ident, $d:ident],
        ($first:ident $first_desc:ident, $second:ident $second_desc:ident, $result:ident $result_desc:ident)
    ) => {
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)] // cuDNN's
        pub unsafe extern "C" fn $algorithms(
            _handle: *mut c_void,
            $a: *mut c_void,
            $b: *mut c_void,
            $c: *mut c_void,
            $d: *mut c_void,
            requested: c_int,
            returned: *mut c_int,
            results: *mut Performance,
        ) -> Status {
            // SAFETY: guaranteed by the caller.
            unsafe {
                candidates($kind, Problem::read($x_desc, $w_desc, $y_desc, $convolution), requested, returned, results)
            }
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $workspace(
            _handle: *mut c_void,
            $a: *mut c_void,
            $b: *mut c_void,
            $c: *mut c_void,
            $d: *mut c_void,
            _algorithm: c_int,
            bytes: *mut usize,
        ) -> Status {
            // SAFETY: guaranteed by the caller.
            unsafe { give(bytes, Problem::read($x_desc, $w_desc, $y_desc, $convolution).workspace($kind)) }
        }

        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)] // cuDNN's
        pub unsafe extern "C" fn $run(
            handle: *mut c_void,
            alpha: *const c_void,
            $first_desc: *mut c_void,
            $first: *const c_void,
            $second_desc: *mut c_void,
            $second: *const c_void,
            $convolution: *mut c_void,
            algorithm: c_int,
            workspace: *mut c_void,
            bytes: usize,
            beta: *const c_void,
            $result_desc: *mut c_void,
            $result: *mut c_void,
        ) -> Status {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let problem = Problem::read($x_desc, $w_desc, $y_desc, $convolution);
                let operands = [$x as u64, $w as u64, $y as u64];
                convolve(handle, $kind, problem, algorithm, (workspace, bytes), operands, alpha, beta)
            }
        }
    };
}

convolution!(
    |x, w, y, x_desc, w_desc, y_desc, convolution| Kind::Forward,
    cudnnGetConvolutionForwardAlgorithm_v7,
    cudnnGetConvolutionForwardWorkspaceSize,
    cudnnConvolutionForward,
    [x_desc, w_desc, convolution, y_desc],
    (x x_desc, w w_desc, y y_desc)
);
convolution!(
    |x, w, y, x_desc, w_desc, y_desc, convolution| Kind::BackwardData,
    cudnnGetConvolutionBackwardDataAlgorithm_v7,
    cudnnGetConvolutionBackwardDataWorkspaceSize,
    cudnnConvolutionBackwardData,
    [w_desc, y_desc, convolution, x_desc],
    (w w_desc, y y_desc, x x_desc)
);
convolution!(
    |x, w, y, x_desc, w_desc, y_desc, convolution| Kind::BackwardFilter,
    cudnnGetConvolutionBackwardFilterAlgorithm_v7,
    cudnnGetConvolutionBackwardFilterWorkspaceSize,
    cudnnConvolutionBackwardFilter,
    [x_desc, y_desc, convolution, w_desc],
    (x x_desc, y y_desc, w w_desc)
);
