//! cuDNN's descriptions of tensors and convolutions.
use crate::kernels::launches::ConvShape;
use crate::{Error, MemoryFormat, Result};
use candle_core::DType;
use cudarc::cudnn::result::{self, CudnnError};
use cudarc::cudnn::sys::{
    cudnnConvolutionDescriptor_t, cudnnConvolutionMode_t, cudnnDataType_t, cudnnFilterDescriptor_t, cudnnMathType_t,
    cudnnTensorDescriptor_t, cudnnTensorFormat_t,
};

pub(super) fn failure(operation: impl Into<String>, error: CudnnError) -> Error {
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
            result::set_tensor4d_descriptor(this.x, format, dtype, x)
                .and_then(|()| result::set_tensor4d_descriptor(this.y, format, dtype, y))
                .and_then(|()| result::set_filter4d_descriptor(this.w, dtype, format, w))
                .and_then(|()| {
                    let [pads, strides, dilations] = [(pad_y, pad_x), (stride_y, stride_x), (dilation_y, dilation_x)];
                    result::set_convolution2d_descriptor(
                        this.convolution,
                        pads.0,
                        pads.1,
                        strides.0,
                        strides.1,
                        dilations.0,
                        dilations.1,
                        mode,
                        arithmetic,
                    )
                })
                .and_then(|()| result::set_convolution_group_count(this.convolution, groups))
                .and_then(|()| result::set_convolution_math_type(this.convolution, math))
        };
        set.map_err(|error| failure(format!("describing {shape:?}"), error))?;
        Ok(Some(this))
    }

    fn create() -> std::result::Result<Self, CudnnError> {
        let none = std::ptr::null_mut();
        let mut this = Self { x: none, y: none, w: std::ptr::null_mut(), convolution: std::ptr::null_mut() };
        this.x = result::create_tensor_descriptor()?;
        this.y = result::create_tensor_descriptor()?;
        this.w = result::create_filter_descriptor()?;
        this.convolution = result::create_convolution_descriptor()?;
        Ok(this)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each was created, unless it is null, and is destroyed only here. Nobody is left to handle an error.
        unsafe {
            for tensor in [self.x, self.y] {
                if !tensor.is_null() {
                    let _ = result::destroy_tensor_descriptor(tensor);
                }
            }
            if !self.w.is_null() {
                let _ = result::destroy_filter_descriptor(self.w);
            }
            if !self.convolution.is_null() {
                let _ = result::destroy_convolution_descriptor(self.convolution);
            }
        }
    }
}
