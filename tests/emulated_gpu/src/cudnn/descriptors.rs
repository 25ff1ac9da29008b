//! Descriptors of tensors, filters and convolutions.
use super::{BAD_PARAM, NOT_SUPPORTED, SUCCESS, Status};
use crate::blas::DType;
use crate::object::create;
use std::ffi::{c_int, c_void};

const NCHW: c_int = 0;
const NHWC: c_int = 1;
const CROSS_CORRELATION: c_int = 1;

/// A `cudnnTensorDescriptor_t` or `cudnnFilterDescriptor_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Tensor {
    pub(super) dtype: Option<DType>,
    /// Images, channels, height and width.
    pub(super) sizes: [usize; 4],
    /// Whether the channels of a pixel are neighbours.
    pub(super) is_nhwc: bool,
}

impl Tensor {
    pub(super) fn bytes(&self) -> usize {
        self.sizes.iter().product::<usize>() * self.dtype.map_or(0, DType::bytes)
    }

    /// The place of an element in memory.
    pub(super) fn place(&self, [image, channel, y, x]: [usize; 4]) -> usize {
        let [_, channels, height, width] = self.sizes;
        match self.is_nhwc {
            false => ((image * channels + channel) * height + y) * width + x,
            true => ((image * height + y) * width + x) * channels + channel,
        }
    }
}

/// A `cudnnConvolutionDescriptor_t`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Convolution {
    pub(super) padding: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) dilation: [usize; 2],
    pub(super) groups: usize,
    pub(super) math: c_int,
}

fn dtype(number: c_int) -> Option<DType> {
    match number {
        0 => Some(DType::F32),
        1 => Some(DType::F64),
        2 => Some(DType::F16),
        9 => Some(DType::BF16),
        _ => None,
    }
}

fn sizes<const N: usize>(values: [c_int; N], least: c_int) -> Option<[usize; N]> {
    values.iter().all(|value| *value >= least).then(|| values.map(|value| value as usize))
}

/// Functions that make and destroy descriptors.
macro_rules! descriptor {
    ($create:ident, $destroy:ident, $Type:ty, $initial:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $create(descriptor: *mut *mut c_void) -> Status {
            let initial: $Type = $initial;
            // SAFETY: guaranteed by the caller.
            unsafe { create(descriptor, initial) }
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $destroy(descriptor: *mut c_void) -> Status {
            // SAFETY: the descriptor came from the function that creates it.
            drop(unsafe { Box::from_raw(descriptor.cast::<$Type>()) });
            SUCCESS
        }
    };
}

descriptor!(cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor, Tensor, Tensor::default());
descriptor!(cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor, Tensor, Tensor::default());
descriptor!(
    cudnnCreateConvolutionDescriptor,
    cudnnDestroyConvolutionDescriptor,
    Convolution,
    Convolution { padding: [0; 2], stride: [1; 2], dilation: [1; 2], groups: 1, math: 0 }
);

/// # Safety
/// `descriptor` must be one of a tensor or a filter.
unsafe fn describe(descriptor: *mut c_void, format: c_int, number: c_int, values: [c_int; 4]) -> Status {
    let (Some(dtype), Some(sizes)) = (dtype(number), sizes(values, 1)) else { return BAD_PARAM };
    if ![NCHW, NHWC].contains(&format) {
        return NOT_SUPPORTED;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { *descriptor.cast::<Tensor>() = Tensor { dtype: Some(dtype), sizes, is_nhwc: format == NHWC } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetTensor4dDescriptor(
    descriptor: *mut c_void,
    format: c_int,
    dtype: c_int,
    n: c_int,
    c: c_int,
    h: c_int,
    w: c_int,
) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { describe(descriptor, format, dtype, [n, c, h, w]) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetFilter4dDescriptor(
    descriptor: *mut c_void,
    dtype: c_int,
    format: c_int,
    k: c_int,
    c: c_int,
    h: c_int,
    w: c_int,
) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { describe(descriptor, format, dtype, [k, c, h, w]) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // cuDNN's
pub unsafe extern "C" fn cudnnSetConvolution2dDescriptor(
    descriptor: *mut c_void,
    pad_h: c_int,
    pad_w: c_int,
    stride_h: c_int,
    stride_w: c_int,
    dilation_h: c_int,
    dilation_w: c_int,
    mode: c_int,
    _compute_type: c_int,
) -> Status {
    let padding = sizes([pad_h, pad_w], 0);
    let (stride, dilation) = (sizes([stride_h, stride_w], 1), sizes([dilation_h, dilation_w], 1));
    let (Some(padding), Some(stride), Some(dilation)) = (padding, stride, dilation) else { return BAD_PARAM };
    if mode != CROSS_CORRELATION {
        return NOT_SUPPORTED;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { *descriptor.cast::<Convolution>() = Convolution { padding, stride, dilation, groups: 1, math: 0 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetConvolutionGroupCount(descriptor: *mut c_void, groups: c_int) -> Status {
    let Some([groups]) = sizes([groups], 1) else { return BAD_PARAM };
    // SAFETY: guaranteed by the caller.
    unsafe { (*descriptor.cast::<Convolution>()).groups = groups };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetConvolutionMathType(descriptor: *mut c_void, math: c_int) -> Status {
    // SAFETY: guaranteed by the caller.
    unsafe { (*descriptor.cast::<Convolution>()).math = math };
    SUCCESS
}
