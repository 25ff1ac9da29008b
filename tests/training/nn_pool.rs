//! Pooling and interpolation against PyTorch's.
use crate::golden_layers::{Parameters, check};
use candle_core::{DType, Device, Result, Tensor};
use candle_ddp::nn::{
    AvgPool2dOptions, InterpolateMode, MaxPool2dOptions, adaptive_avg_pool2d, avg_pool2d, interpolate, max_pool2d,
};

#[test]
fn max_pool2d_is_pytorchs() {
    check("max_pool2d", |case: &Parameters, x| {
        let (stride, padding) = (Some(case.pair("stride")), case.pair("padding"));
        max_pool2d(&x[0], case.pair("kernel"), MaxPool2dOptions { stride, padding, ceil_mode: case.flag("ceil") })
    });
}

#[test]
fn avg_pool2d_is_pytorchs() {
    check("avg_pool2d", |case, x| {
        let (stride, padding) = (Some(case.pair("stride")), case.pair("padding"));
        let (ceil_mode, count_include_pad) = (case.flag("ceil"), case.flag("count"));
        avg_pool2d(&x[0], case.pair("kernel"), AvgPool2dOptions { stride, padding, ceil_mode, count_include_pad })
    });
}

#[test]
fn adaptive_avg_pool2d_is_pytorchs() {
    check("adaptive_avg_pool2d", |case, x| adaptive_avg_pool2d(&x[0], case.pair("size")));
}

#[test]
fn interpolate_is_pytorchs() {
    check("nearest", |case, x| interpolate(&x[0], case.pair("size"), InterpolateMode::Nearest));
    check("bilinear", |case, x| {
        interpolate(&x[0], case.pair("size"), InterpolateMode::Bilinear { align_corners: case.flag("align") })
    });
}

/// A NaN is the maximum of its window, and gets the gradient.
#[test]
fn nan_is_the_maximum() {
    let x = candle_core::Var::new(&[[[[1f32, f32::NAN, 5.0], [f32::NAN, 2.0, 3.0]]]], &Device::Cpu).unwrap();
    let y = max_pool2d(&x, 2, MaxPool2dOptions { stride: Some((1, 1)), ..Default::default() }).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|y| y.is_nan()));
    // The last of several, as in PyTorch.
    let dx = grads.get(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(dx, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
}

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

    let refused = |result: Result<Tensor>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let x = zeros(&[1, 2, 4, 4], DType::F32);
    refused(max(&zeros(&[4, 4], DType::F32), (2, 2), (2, 2), (0, 0)), "f32[4, 4], where (N, C, H, W)");
    refused(max(&zeros(&[1, 2, 0, 4], DType::F32), (2, 2), (2, 2), (0, 0)), "are not 0");
    refused(max(&x, (0, 2), (2, 2), (0, 0)), "kernel 0");
    refused(max(&x, (2, 2), (2, 0), (0, 0)), "stride 0");
    refused(max(&x, (3, 3), (1, 1), (2, 1)), "more than half");
    refused(max(&x, (7, 7), (1, 1), (1, 1)), "no window of 7");
    refused(max(&zeros(&[1, 2, 4, 4], DType::U8), (2, 2), (2, 2), (0, 0)), "U8");
    refused(adaptive_avg_pool2d(&x, (0, 1)), "must not be 0");
    refused(interpolate(&x, (1, 0), InterpolateMode::Nearest), "must not be 0");
    refused(avg_pool2d(&zeros(&[1, 2, 4, 4], DType::U32), 2, AvgPool2dOptions::default()), "U32");
}
