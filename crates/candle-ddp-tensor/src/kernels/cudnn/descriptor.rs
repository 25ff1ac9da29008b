//! cuDNN's descriptions of tensors and convolutions.
use super::ffi::{self, Status};
use crate::kernels::launches::ConvShape;
use crate::{Error, MemoryFormat, Result};
use candle_core::DType;
use cudarc::cudnn::sys::{
    cudnnConvolutionDescriptor_t, cudnnConvolutionMode_t, cudnnDataType_t, cudnnFilterDescriptor_t, cudnnMathType_t,
    cudnnTensorDescriptor_t, cudnnTensorFormat_t,
};

pub(super) fn failure(operation: impl Into<String>, error: Status) -> Error {
    Error::Kernel { file: "cuDNN", operation: operation.into(), reason: error.to_string() }
}

/// The descriptors of a convolution's x, y and weights, all in one memory format, and of the convolution itself.
#[derive(Debug)]
pub(super) struct Descriptors {
    pub(super) x: cudnnTensorDescriptor_t,
    pub(super) y: cudnnTensorDescriptor_t,
    pub(super) w: cudnnFilterDescriptor_t,
    pub(super) convolution: cudnnConvolutionDescriptor_t,
}

impl Descriptors {
    /// Returns `None` for extents that cuDNN's numbers cannot hold, and for a dtype that it does not have.
    pub(super) fn new(dtype: DType, math: cudnnMathType_t, shape: &ConvShape) -> Result<Option<Self>> {
        let ConvShape { n, ci, co, groups, input, output, kernel, stride, padding, dilation, format } = *shape;
        let (dtype, arithmetic) = match dtype {
            DType::F32 => (cudnnDataType_t::CUDNN_DATA_FLOAT, cudnnDataType_t::CUDNN_DATA_FLOAT),
            DType::F64 => (cudnnDataType_t::CUDNN_DATA_DOUBLE, cudnnDataType_t::CUDNN_DATA_DOUBLE),
            DType::F16 => (cudnnDataType_t::CUDNN_DATA_HALF, cudnnDataType_t::CUDNN_DATA_FLOAT),
            DType::BF16 => (cudnnDataType_t::CUDNN_DATA_BFLOAT16, cudnnDataType_t::CUDNN_DATA_FLOAT),
            _ => return Ok(None),
        };
        let four = |sizes: [usize; 4]| -> Option<[i32; 4]> {
            // cuDNN numbers the elements of a tensor with 31 bits.
            i32::try_from(sizes.iter().product::<usize>()).ok()?;
            let [a, b, c, d] = sizes.map(|size| i32::try_from(size).ok());
            Some([a?, b?, c?, d?])
        };
        let sizes = (
            four([n, ci, input[0], input[1]]),
            four([n, co, output[0], output[1]]),
            four([co, ci / groups, kernel[0], kernel[1]]),
            four([padding[0], padding[1], stride[0], stride[1]]),
            four([dilation[0], dilation[1], groups, 1]),
        );
        let (
            Some(x),
            Some(y),
            Some(w),
            Some([pad_y, pad_x, stride_y, stride_x]),
            Some([dilation_y, dilation_x, groups, _]),
        ) = sizes
        else {
            return Ok(None);
        };
        let format = match format {
            MemoryFormat::Contiguous => cudnnTensorFormat_t::CUDNN_TENSOR_NCHW,
            MemoryFormat::ChannelsLast => cudnnTensorFormat_t::CUDNN_TENSOR_NHWC,
        };
        let mode = cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
        let this = Self::create().map_err(|error| failure("creating descriptors", error))?;
        // SAFETY: the descriptors were just created.
        let set = unsafe {
            let tensor = |tensor, [n, c, h, w]: [i32; 4]| {
                ffi::cudnnSetTensor4dDescriptor(tensor, format, dtype, n, c, h, w).result()
            };
            let weights =
                |[k, c, h, w]: [i32; 4]| ffi::cudnnSetFilter4dDescriptor(this.w, dtype, format, k, c, h, w).result();
            let convolution = || {
                ffi::cudnnSetConvolution2dDescriptor(
                    this.convolution,
                    pad_y,
                    pad_x,
                    stride_y,
                    stride_x,
                    dilation_y,
                    dilation_x,
                    mode,
                    arithmetic,
                )
                .result()
            };
            tensor(this.x, x)
                .and_then(|()| tensor(this.y, y))
                .and_then(|()| weights(w))
                .and_then(|()| convolution())
                .and_then(|()| ffi::cudnnSetConvolutionGroupCount(this.convolution, groups).result())
                .and_then(|()| ffi::cudnnSetConvolutionMathType(this.convolution, math).result())
        };
        set.map_err(|error| failure(format!("describing {shape:?}"), error))?;
        Ok(Some(this))
    }

    fn create() -> std::result::Result<Self, Status> {
        let none = std::ptr::null_mut();
        let mut this = Self { x: none, y: none, w: std::ptr::null_mut(), convolution: std::ptr::null_mut() };
        // SAFETY: there is room for each descriptor.
        unsafe {
            ffi::cudnnCreateTensorDescriptor(&raw mut this.x).result()?;
            ffi::cudnnCreateTensorDescriptor(&raw mut this.y).result()?;
            ffi::cudnnCreateFilterDescriptor(&raw mut this.w).result()?;
            ffi::cudnnCreateConvolutionDescriptor(&raw mut this.convolution).result()?;
        }
        Ok(this)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each was created, unless it is null, and is destroyed only here. Nobody is left to handle an error.
        unsafe {
            for tensor in [self.x, self.y] {
                if !tensor.is_null() {
                    let _ = ffi::cudnnDestroyTensorDescriptor(tensor);
                }
            }
            if !self.w.is_null() {
                let _ = ffi::cudnnDestroyFilterDescriptor(self.w);
            }
            if !self.convolution.is_null() {
                let _ = ffi::cudnnDestroyConvolutionDescriptor(self.convolution);
            }
        }
    }
}
