//! Pooling and interpolation, compared with PyTorch.
use candle_core::{DType, Device, Result, Tensor};
use candle_ddp_nn::{
    AvgPool2dOptions, InterpolateMode, MaxPool2dOptions, adaptive_avg_pool2d, avg_pool2d, interpolate, max_pool2d,
};
use candle_ddp_testing::assert_error;

#[test]
fn empty_batches_and_bad_inputs() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let max = |x: &Tensor, kernel, stride, padding| {
        max_pool2d(x, kernel, MaxPool2dOptions { stride: Some(stride), padding, ceil_mode: false })
    };
    let empty = zeros(&[0, 2, 4, 4], DType::F32);
    assert_eq!(max(&empty, (2, 2), (2, 2), (0, 0)).unwrap().dims(), [0, 2, 2, 2]);
    assert_eq!(avg_pool2d(&empty, 2, AvgPool2dOptions::default()).unwrap().dims(), [0, 2, 2, 2]);
    assert_eq!(interpolate(&empty, 3, InterpolateMode::Nearest).unwrap().dims(), [0, 2, 3, 3]);

    let refused = |result: Result<Tensor>, text: &str| assert_error(result, &[text]);
    let x = zeros(&[1, 2, 4, 4], DType::F32);
    refused(max(&zeros(&[4, 4], DType::F32), (2, 2), (2, 2), (0, 0)), "not f32[4, 4]");
    refused(max(&zeros(&[1, 2, 0, 4], DType::F32), (2, 2), (2, 2), (0, 0)), "with H and W at least 1");
    refused(max(&x, (0, 2), (2, 2), (0, 0)), "at least 1, not 0 and 2");
    refused(max(&x, (2, 2), (2, 0), (0, 0)), "at least 1, not 2 and 0");
    refused(max(&x, (3, 3), (1, 1), (2, 1)), "at most half");
    refused(max(&x, (7, 7), (1, 1), (1, 1)), "smaller than the kernel, 7");
    refused(max(&zeros(&[1, 2, 4, 4], DType::U8), (2, 2), (2, 2), (0, 0)), "U8");
    refused(adaptive_avg_pool2d(&x, (0, 1)), "must be at least 1 × 1");
    refused(interpolate(&x, (1, 0), InterpolateMode::Nearest), "must be at least 1 × 1");
    refused(avg_pool2d(&zeros(&[1, 2, 4, 4], DType::U32), 2, AvgPool2dOptions::default()), "U32");
}
