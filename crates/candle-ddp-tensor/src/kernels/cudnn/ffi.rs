//! cuDNN's functions, as far as they are called here. cudarc's declarations return an enum, and structs of enums, for which a number that
//! they do not have, such as one of a newer cuDNN, is undefined behaviour.
use cudarc::cudnn::sys::{
    cudaStream_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t, cudnnConvolutionDescriptor_t, cudnnConvolutionMode_t, cudnnDataType_t,
    cudnnFilterDescriptor_t, cudnnHandle_t, cudnnMathType_t, cudnnTensorDescriptor_t, cudnnTensorFormat_t,
};
use std::ffi::{c_int, c_void};
use std::fmt;

/// cuDNN's `cudnnStatus_t`: newer versions have further numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(pub(super) u32);

impl Status {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const NOT_SUPPORTED: Self = Self(3000);

    /// The status as an error, if it is none of success.
    pub(super) fn result(self) -> Result<(), Self> {
        if self == Self::SUCCESS { Ok(()) } else { Err(self) }
    }

    /// The statuses from NOT_SUPPORTED to below INTERNAL_ERROR are the reasons why something is not supported.
    pub(super) fn is_not_supported(self) -> bool {
        self.0 / 1000 == Self::NOT_SUPPORTED.0 / 1000
    }
}

/// The kind of the status, and its number, which cuDNN's headers name.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0 {
            0 => "CUDNN_STATUS_SUCCESS",
            1000..2000 => "CUDNN_STATUS_NOT_INITIALIZED",
            2000..3000 => "CUDNN_STATUS_BAD_PARAM",
            3000..4000 => "CUDNN_STATUS_NOT_SUPPORTED",
            4000..5000 => "CUDNN_STATUS_INTERNAL_ERROR",
            5000..6000 => "CUDNN_STATUS_EXECUTION_FAILED",
            _ => "an unknown status",
        };
        write!(f, "{kind}, cudnnStatus_t {}", self.0)
    }
}

/// An algorithm that cuDNN proposes: its `cudnnConvolution…AlgoPerf_t`, which has the same fields for all three convolutions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Candidate {
    pub(super) algorithm: u32,
    pub(super) status: Status,
    pub(super) time: f32,
    pub(super) memory: usize,
    pub(super) determinism: u32,
    pub(super) math: u32,
    pub(super) reserved: [c_int; 3],
}

// The signatures are those of cuDNN 9's headers, where statuses and algorithms are enums: 32 bits.
unsafe extern "C" {
    pub(super) fn cudnnBackendCreateDescriptor(
        descriptor_type: cudnnBackendDescriptorType_t,
        descriptor: *mut cudnnBackendDescriptor_t,
    ) -> Status;
    pub(super) fn cudnnBackendDestroyDescriptor(descriptor: cudnnBackendDescriptor_t) -> Status;
    pub(super) fn cudnnBackendSetAttribute(
        descriptor: cudnnBackendDescriptor_t,
        attribute_name: cudnnBackendAttributeName_t,
        attribute_type: cudnnBackendAttributeType_t,
        element_count: i64,
        array_of_elements: *const c_void,
    ) -> Status;
    pub(super) fn cudnnBackendGetAttribute(
        descriptor: cudnnBackendDescriptor_t,
        attribute_name: cudnnBackendAttributeName_t,
        attribute_type: cudnnBackendAttributeType_t,
        requested_element_count: i64,
        element_count: *mut i64,
        array_of_elements: *mut c_void,
    ) -> Status;
    pub(super) fn cudnnBackendFinalize(descriptor: cudnnBackendDescriptor_t) -> Status;
    pub(super) fn cudnnBackendExecute(
        handle: cudnnHandle_t,
        execution_plan: cudnnBackendDescriptor_t,
        variant_pack: cudnnBackendDescriptor_t,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionForwardAlgorithm_v7(
        handle: cudnnHandle_t,
        src_desc: cudnnTensorDescriptor_t,
        filter_desc: cudnnFilterDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        dest_desc: cudnnTensorDescriptor_t,
        requested_algo_count: c_int,
        returned_algo_count: *mut c_int,
        perf_results: *mut Candidate,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
        handle: cudnnHandle_t,
        filter_desc: cudnnFilterDescriptor_t,
        diff_desc: cudnnTensorDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        grad_desc: cudnnTensorDescriptor_t,
        requested_algo_count: c_int,
        returned_algo_count: *mut c_int,
        perf_results: *mut Candidate,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
        handle: cudnnHandle_t,
        src_desc: cudnnTensorDescriptor_t,
        diff_desc: cudnnTensorDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        grad_desc: cudnnFilterDescriptor_t,
        requested_algo_count: c_int,
        returned_algo_count: *mut c_int,
        perf_results: *mut Candidate,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionForwardWorkspaceSize(
        handle: cudnnHandle_t,
        x_desc: cudnnTensorDescriptor_t,
        w_desc: cudnnFilterDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        y_desc: cudnnTensorDescriptor_t,
        algo: u32,
        size_in_bytes: *mut usize,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionBackwardDataWorkspaceSize(
        handle: cudnnHandle_t,
        w_desc: cudnnFilterDescriptor_t,
        dy_desc: cudnnTensorDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        dx_desc: cudnnTensorDescriptor_t,
        algo: u32,
        size_in_bytes: *mut usize,
    ) -> Status;
    pub(super) fn cudnnGetConvolutionBackwardFilterWorkspaceSize(
        handle: cudnnHandle_t,
        x_desc: cudnnTensorDescriptor_t,
        dy_desc: cudnnTensorDescriptor_t,
        conv_desc: cudnnConvolutionDescriptor_t,
        grad_desc: cudnnFilterDescriptor_t,
        algo: u32,
        size_in_bytes: *mut usize,
    ) -> Status;
    pub(super) fn cudnnConvolutionForward(
        handle: cudnnHandle_t,
        alpha: *const c_void,
        x_desc: cudnnTensorDescriptor_t,
        x: *const c_void,
        w_desc: cudnnFilterDescriptor_t,
        w: *const c_void,
        conv_desc: cudnnConvolutionDescriptor_t,
        algo: u32,
        work_space: *mut c_void,
        work_space_size_in_bytes: usize,
        beta: *const c_void,
        y_desc: cudnnTensorDescriptor_t,
        y: *mut c_void,
    ) -> Status;
    pub(super) fn cudnnConvolutionBackwardData(
        handle: cudnnHandle_t,
        alpha: *const c_void,
        w_desc: cudnnFilterDescriptor_t,
        w: *const c_void,
        dy_desc: cudnnTensorDescriptor_t,
        dy: *const c_void,
        conv_desc: cudnnConvolutionDescriptor_t,
        algo: u32,
        work_space: *mut c_void,
        work_space_size_in_bytes: usize,
        beta: *const c_void,
        dx_desc: cudnnTensorDescriptor_t,
        dx: *mut c_void,
    ) -> Status;
    pub(super) fn cudnnConvolutionBackwardFilter(
        handle: cudnnHandle_t,
        alpha: *const c_void,
        x_desc: cudnnTensorDescriptor_t,
        x: *const c_void,
        dy_desc: cudnnTensorDescriptor_t,
        dy: *const c_void,
        conv_desc: cudnnConvolutionDescriptor_t,
        algo: u32,
        work_space: *mut c_void,
        work_space_size_in_bytes: usize,
        beta: *const c_void,
        dw_desc: cudnnFilterDescriptor_t,
        dw: *mut c_void,
    ) -> Status;
    pub(super) fn cudnnCreateTensorDescriptor(tensor_desc: *mut cudnnTensorDescriptor_t) -> Status;
    pub(super) fn cudnnCreateFilterDescriptor(filter_desc: *mut cudnnFilterDescriptor_t) -> Status;
    pub(super) fn cudnnCreateConvolutionDescriptor(conv_desc: *mut cudnnConvolutionDescriptor_t) -> Status;
    pub(super) fn cudnnDestroyTensorDescriptor(tensor_desc: cudnnTensorDescriptor_t) -> Status;
    pub(super) fn cudnnDestroyFilterDescriptor(filter_desc: cudnnFilterDescriptor_t) -> Status;
    pub(super) fn cudnnDestroyConvolutionDescriptor(conv_desc: cudnnConvolutionDescriptor_t) -> Status;
    pub(super) fn cudnnSetTensor4dDescriptor(
        tensor_desc: cudnnTensorDescriptor_t,
        format: cudnnTensorFormat_t,
        data_type: cudnnDataType_t,
        n: c_int,
        c: c_int,
        h: c_int,
        w: c_int,
    ) -> Status;
    pub(super) fn cudnnSetFilter4dDescriptor(
        filter_desc: cudnnFilterDescriptor_t,
        data_type: cudnnDataType_t,
        format: cudnnTensorFormat_t,
        k: c_int,
        c: c_int,
        h: c_int,
        w: c_int,
    ) -> Status;
    pub(super) fn cudnnSetConvolution2dDescriptor(
        conv_desc: cudnnConvolutionDescriptor_t,
        pad_h: c_int,
        pad_w: c_int,
        u: c_int,
        v: c_int,
        dilation_h: c_int,
        dilation_w: c_int,
        mode: cudnnConvolutionMode_t,
        compute_type: cudnnDataType_t,
    ) -> Status;
    pub(super) fn cudnnSetConvolutionGroupCount(conv_desc: cudnnConvolutionDescriptor_t, group_count: c_int) -> Status;
    pub(super) fn cudnnSetConvolutionMathType(
        conv_desc: cudnnConvolutionDescriptor_t,
        math_type: cudnnMathType_t,
    ) -> Status;
    pub(super) fn cudnnCreate(handle: *mut cudnnHandle_t) -> Status;
    pub(super) fn cudnnDestroy(handle: cudnnHandle_t) -> Status;
    pub(super) fn cudnnSetStream(handle: cudnnHandle_t, stream_id: cudaStream_t) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::cudnn::sys::{
        cudnnConvolutionBwdDataAlgoPerf_t, cudnnConvolutionBwdFilterAlgoPerf_t, cudnnConvolutionFwdAlgoPerf_t,
        cudnnStatus_t,
    };
    use std::mem::offset_of;

    #[test]
    fn candidates_and_statuses_are_those_of_the_bindings() {
        type Known = cudnnConvolutionFwdAlgoPerf_t;
        let known = [
            size_of::<Known>(),
            size_of::<cudnnConvolutionBwdDataAlgoPerf_t>(),
            size_of::<cudnnConvolutionBwdFilterAlgoPerf_t>(),
        ];
        assert_eq!(known, [size_of::<Candidate>(); 3]);
        assert_eq!(offset_of!(Candidate, status), offset_of!(Known, status));
        assert_eq!(offset_of!(Candidate, memory), offset_of!(Known, memory));
        assert_eq!(offset_of!(Candidate, determinism), offset_of!(Known, determinism));
        assert_eq!(offset_of!(Candidate, math), offset_of!(Known, mathType));
        assert_eq!(Status::NOT_SUPPORTED.0, cudnnStatus_t::CUDNN_STATUS_NOT_SUPPORTED as u32);
    }

    /// As of a newer version.
    #[test]
    fn an_unknown_status_is_an_error_with_its_number() {
        let error = Status(4777).result().unwrap_err();
        assert!(error.to_string().ends_with("cudnnStatus_t 4777"), "{error}");
        assert!(!error.is_not_supported() && Status(3777).is_not_supported());
    }
}
