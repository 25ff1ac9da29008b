//! Layers on a GPU against PyTorch's:
//!
//! ```text
//! cargo test --release --features cuda --test gpu_layers
//! cargo test --release --features cudnn --test gpu_layers
//! ```
//!
//! Without a GPU every test reports that it is skipped, or fails if CANDLE_DDP_REQUIRE_GPU is set.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // a failed test may panic
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/layers/mod.rs"]
mod layers;
mod operations;

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{
    AttentionOptions, AvgPool2dOptions, BatchNorm, Conv2d, ConvTranspose2d, Embedding, InterpolateMode, Linear,
    MaxPool2dOptions, add, avg_pool2d, cross_entropy, gelu, interpolate, max_pool2d, relu,
    scaled_dot_product_attention, scaled_dot_product_attention_qkvpacked, softmax,
};
use candle_nn::{Conv2dConfig, ConvTranspose2dConfig};
use common::{assert_close, floats, skip_unless, tensor};

/// Runs `test` on a GPU, if there is one.
fn on_gpu(name: &str, test: impl FnOnce(&Device)) {
    match Device::new_cuda(0) {
        Ok(device) => test(&device),
        Err(error) => skip_unless("CANDLE_DDP_REQUIRE_GPU", name, error),
    }
}

/// Tests of `layers` with the same names.
macro_rules! on_gpu {
    ($($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                on_gpu(stringify!($test), layers::$test);
            }
        )*
    };
}

on_gpu! {
    linear_matches_pytorch
    convolutions_match_pytorch
    batch_norm_matches_pytorch
    max_pool2d_matches_pytorch
    avg_pool2d_matches_pytorch
    adaptive_avg_pool2d_matches_pytorch
    interpolate_matches_pytorch
    nan_is_the_maximum
    activations_match_pytorch
    embedding_matches_pytorch
    attention_matches_pytorch
    softmax_matches_pytorch
    cross_entropy_matches_pytorch
    layer_norm_matches_pytorch
    rms_norm_matches_pytorch
    embedding_adds_in_f32
    embeddings_of_any_size
    rope_takes_the_place_of_candles
    large_logits_stay_finite
    without_samples_the_mean_is_nan
    gradients_have_the_mask_of_the_forward_pass
    masks_are_the_generators_numbers
}

/// More images than the workspace of a product takes, with groups and without, and output padding, which cuDNN refuses.
#[test]
fn many_images_match_the_cpu() {
    on_gpu("many_images_match_the_cpu", |gpu| {
        let run = |device: &Device| {
            let var = |shape: &[usize], seed| {
                let values = tensor(shape, seed).to_dtype(DType::F64).unwrap().to_device(device).unwrap();
                Var::from_tensor(&values).unwrap()
            };
            let (x, weight, bias) = (var(&[6, 2, 184, 184], 1), var(&[1, 2, 5, 5], 2), var(&[1], 3));
            // Another stride than dilation, so that one of the two may be as large as the output padding.
            let config = ConvTranspose2dConfig { dilation: 3, output_padding: 2, ..Default::default() };
            let (small, transposed) = (var(&[2, 4, 5, 5], 4), var(&[4, 3, 2, 2], 5));
            let y = Conv2d::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), Conv2dConfig::default())
                .forward(&x)
                .unwrap();
            let z = ConvTranspose2d::new(transposed.as_tensor().clone(), None, config).forward(&small).unwrap();
            let loss = (y.sqr().unwrap().mean_all().unwrap() + z.sqr().unwrap().mean_all().unwrap()).unwrap();
            let grads = loss.backward().unwrap();
            let gradients = [&x, &weight, &bias, &small, &transposed].map(|var| floats(grads.get(var).unwrap()));
            [floats(&y), floats(&z)].into_iter().chain(gradients).collect::<Vec<_>>()
        };
        for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
            assert_close(there, &here, 1e-5, &format!("result {index}"));
        }
    });
}

/// Channels that several blocks share, whose mean is far from zero.
#[test]
fn large_batches_match_the_cpu() {
    on_gpu("large_batches_match_the_cpu", |gpu| {
        let run = |device: &Device| {
            let var = |values: Tensor| Var::from_tensor(&values.to_device(device).unwrap()).unwrap();
            let x = var((tensor(&[5, 3, 37, 41], 1) + 30.0).unwrap());
            let (weight, bias) = (var(tensor(&[3], 2)), var(tensor(&[3], 3)));
            let statistic = |value: f32| Tensor::full(value, 3, device).unwrap();
            let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
            let layer = BatchNorm::new(3, statistic(0.0), statistic(1.0), w, b, 1e-5).unwrap();
            let y = layer.forward_relu_t(&x, true).unwrap();
            let grads =
                (&y * var(tensor(&[5, 3, 37, 41], 4)).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
            let gradients = [&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap()));
            let statistics = [layer.running_mean(), layer.running_var()].map(floats);
            [floats(&y)].into_iter().chain(statistics).chain(gradients).collect::<Vec<_>>()
        };
        for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
            assert_close(there, &here, 2e-5, &format!("result {index}"));
        }
    });
}

/// Planes that are whole vectors, and others, whose vectors hold elements of two channels; views that begin between vectors; parts
/// of a channel that end in a plane.
#[test]
fn channels_of_any_size_match_the_cpu() {
    on_gpu("channels_of_any_size_match_the_cpu", |gpu| {
        let shapes =
            [[2, 4, 4, 4], [3, 8, 7, 7], [2, 8, 3, 3], [5, 6, 14, 14], [1, 2, 100, 99], [4, 3, 5, 1], [7, 16, 1, 1]];
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 3e-3), (DType::BF16, 2e-2)] {
            for (shape, skipped) in shapes.into_iter().flat_map(|shape| [(shape, 0), (shape, 1)]) {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| {
                        let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        Var::from_tensor(&values).unwrap()
                    };
                    let elements = shape.iter().product::<usize>();
                    // Contiguous, from element `skipped` on.
                    let view = |var: &Var| var.narrow(0, skipped, elements).unwrap().reshape(&shape).unwrap();
                    let batch = |seed| var(&[skipped + elements], seed);
                    let (x, z, dy) = (batch(1), batch(2), batch(3));
                    let (weight, bias) = (var(&[shape[1]], 4), var(&[shape[1]], 5));
                    let statistic =
                        |value: f64| Tensor::full(value, shape[1], device).unwrap().to_dtype(dtype).unwrap();
                    let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
                    let layer = BatchNorm::new(shape[1], statistic(0.0), statistic(1.0), w, b, 1e-5).unwrap();
                    let mut found = Vec::new();
                    for kind in 0..3 {
                        let (x_view, z_view) = (view(&x), view(&z));
                        let y = match kind {
                            0 => layer.forward_t(&x_view, true),
                            1 => layer.forward_relu_t(&x_view, true),
                            _ => layer.forward_add_relu_t(&x_view, &z_view, true),
                        };
                        let y = y.unwrap();
                        let grads = (&y * view(&dy)).unwrap().sum_all().unwrap().backward().unwrap();
                        found.push(floats(&y));
                        found.extend([&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap())));
                        found.extend(grads.get(&z).map(floats));
                    }
                    found.extend([layer.running_mean(), layer.running_var()].map(floats));
                    found
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    let case = format!("result {index} of {shape:?} from {skipped} on in {dtype:?}");
                    assert_close(there, &here, tolerance, &case);
                }
            }
        }
    });
}

/// Rows that are whole vectors and others, in all passes of convolutions with groups, without, and per channel, and resampled.
#[test]
fn convolutions_of_any_width_match_the_cpu() {
    on_gpu("convolutions_of_any_width_match_the_cpu", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 3e-3), (DType::BF16, 2e-2)] {
            for (width, stride, groups) in [(8, 1, 1), (16, 1, 4), (16, 2, 2), (9, 1, 4), (7, 2, 1), (32, 2, 4)] {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| {
                        let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        Var::from_tensor(&values).unwrap()
                    };
                    let (x, small) = (var(&[2, 4, 6, width], 1), var(&[2, 4, 5, width], 2));
                    let (weight, bias) = (var(&[8, 4 / groups, 3, 3], 3), var(&[8], 4));
                    let (transposed, of_transposed) = (var(&[4, 8, 3, 3], 5), var(&[8], 6));
                    let of = |var: &Var| var.as_tensor().clone();
                    let config = Conv2dConfig { padding: 1, stride, groups, ..Default::default() };
                    let y = Conv2d::new(of(&weight), Some(of(&bias)), config).forward(&x).unwrap();
                    let config = ConvTranspose2dConfig { padding: 1, stride, ..Default::default() };
                    let layer = ConvTranspose2d::new(of(&transposed), Some(of(&of_transposed)), config);
                    let z = layer.forward(&small).unwrap();
                    let w =
                        interpolate(&x, (12, 2 * width), InterpolateMode::Bilinear { align_corners: false }).unwrap();
                    let parts = [&y, &z, &w].map(|y| {
                        let factors = tensor(y.dims(), 7).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        (y * factors).unwrap().sum_all().unwrap()
                    });
                    let loss = ((&parts[0] + &parts[1]).unwrap() + &parts[2]).unwrap();
                    let grads = loss.backward().unwrap();
                    let vars = [&x, &small, &weight, &bias, &transposed, &of_transposed];
                    let gradients = vars.map(|var| floats(grads.get(var).unwrap()));
                    [floats(&y), floats(&z), floats(&w)].into_iter().chain(gradients).collect::<Vec<_>>()
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    let case =
                        format!("result {index} of width {width}, stride {stride}, {groups} groups in {dtype:?}");
                    assert_close(there, &here, tolerance, &case);
                }
            }
        }
    });
}

/// The numbers are close to each other, and far from zero, except for the first of each plane or of the batch.
#[test]
fn variances_far_from_zero_are_right() {
    on_gpu("variances_far_from_zero_are_right", |gpu| {
        for (dtype, odd, every, tolerance) in [
            (DType::F32, 1e4, 1 << 20, 1e-4),
            (DType::F32, 0.0, 1 << 20, 1e-5),
            (DType::F32, 0.0, 784, 1e-5),
            (DType::F64, 0.0, 784, 1e-7),
            (DType::F16, 1000.0, 784, 1e-5),
        ] {
            let size = if dtype == DType::F16 { 1000.0 } else { 1e4 };
            let noise = tensor(&[16 * 2 * 784], 1).to_vec1::<f32>().unwrap();
            let value = |(index, noise): (usize, f32)| match index % every {
                0 => odd,
                _ => size + f64::from(noise),
            };
            let values: Vec<f64> = noise.into_iter().enumerate().map(value).collect();
            let x = Tensor::from_vec(values, (16, 2, 28, 28), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let of_channels = x.to_dtype(DType::F64).unwrap().transpose(0, 1).unwrap().flatten_from(1).unwrap();
            let variances = floats(&of_channels.var(1).unwrap());
            let statistic = |value: f64| Tensor::full(value, 2, gpu).unwrap().to_dtype(DType::F64).unwrap();
            let layer = BatchNorm::new_no_bias_with_momentum(2, statistic(0.0), statistic(1.0), 1e-5, 1.0).unwrap();
            layer.forward_t(&x.to_device(gpu).unwrap(), true).unwrap();
            let case = format!("{dtype:?}, {odd} every {every}");
            assert_close(&floats(layer.running_var()), &variances, tolerance, &case);
            assert_close(&floats(layer.running_mean()), &floats(&of_channels.mean(1).unwrap()), 1e-6, &case);
        }
    });
}

/// Rows that are whole vectors, and others; the usual windows, and others.
#[test]
fn maxima_of_any_size_match_the_cpu() {
    on_gpu("maxima_of_any_size_match_the_cpu", |gpu| {
        let windows =
            [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 3), (1, 1), (1, 0)), ((2, 5), (3, 1), (1, 2))];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for ((kernel, stride, padding), shape) in
                windows.into_iter().flat_map(|windows| [(windows, [2, 3, 9, 24]), (windows, [3, 1, 8, 11])])
            {
                let run = |device: &Device| {
                    // Many are equal.
                    let x = (tensor(&shape, 1) * 4.0).unwrap().round().unwrap().to_dtype(dtype).unwrap();
                    let x = Var::from_tensor(&x.to_device(device).unwrap()).unwrap();
                    let options = MaxPool2dOptions { stride: Some(stride), padding, ceil_mode: true };
                    let y = max_pool2d(&x, kernel, options).unwrap();
                    let dy = (tensor(y.dims(), 2) * 8.0).unwrap().round().unwrap().to_dtype(dtype).unwrap();
                    let grads = (&y * dy.to_device(device).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
                    [floats(&y), floats(grads.get(&x).unwrap())]
                };
                assert_eq!(run(gpu), run(&Device::Cpu), "{dtype:?} {shape:?} {kernel:?} {stride:?} {padding:?}");
            }
        }
    });
}

/// More rows than one block of the kernel sums, and columns that do not fill its last block: one by one, and in vectors.
#[test]
fn linear_layers_of_many_rows_match_the_cpu() {
    on_gpu("linear_layers_of_many_rows_match_the_cpu", |gpu| {
        let dtypes = [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)];
        for ((dtype, tolerance), out) in dtypes.into_iter().flat_map(|dtype| [70, 272].map(|out| (dtype, out))) {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| {
                    let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    Var::from_tensor(&values).unwrap()
                };
                let (x, weight, bias) = (var(&[3, 301, 5], 1), var(&[out, 5], 2), var(&[out], 3));
                let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
                let y = layer.forward(&x).unwrap();
                // Gradients whose sums are as large as they are.
                let dy = (var(&[3, 301, out], 4).as_tensor() / 30.0).unwrap();
                let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("result {index} of {out} columns in {dtype:?}"));
            }
        }
    });
}

/// Outputs whose rows begin at no multiples of 16 bytes, and which are large enough to be multiplied in a copy, with any rest of
/// columns.
#[test]
fn linear_layers_with_uneven_outputs_match_the_cpu() {
    on_gpu("linear_layers_with_uneven_outputs_match_the_cpu", |gpu| {
        let dtypes = [(DType::F16, 2e-3), (DType::BF16, 1.6e-2)];
        for ((dtype, tolerance), out) in dtypes.into_iter().flat_map(|dtype| (1025..1032).map(move |out| (dtype, out)))
        {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| {
                    let values = (tensor(shape, seed) / 8.0).unwrap().to_dtype(dtype).unwrap();
                    Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
                };
                let (x, weight, dy) = (var(&[66, 256], 1), var(&[out, 256], 2), var(&[66, out], 3));
                let y = Linear::new(weight.as_tensor().clone(), None).forward(&x).unwrap();
                let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&x, &weight].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("result {index} of {out} columns in {dtype:?}"));
            }
        }
    });
}

/// Positions of a batch: few and many sequences, in vectors and one by one.
#[test]
fn repeated_sums_match_the_cpu() {
    on_gpu("repeated_sums_match_the_cpu", |gpu| {
        let dtypes = [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)];
        let shapes = [[3, 10, 24], [3, 5, 7], [301, 1, 5]];
        for ((dtype, tolerance), shape) in dtypes.into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape))) {
            for skipped in 1..4 {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| {
                        let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        Var::from_tensor(&values).unwrap()
                    };
                    let (a, b, dy) = (var(&shape, 1), var(&shape[skipped..], 2), var(&shape, 3));
                    let sum = add(&a, &b).unwrap();
                    let grads = (&sum * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                    [&sum, grads.get(&a).unwrap(), grads.get(&b).unwrap()].map(floats)
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    let what = format!("result {index} of {shape:?} in {dtype:?}, repeated over {skipped}");
                    assert_close(there, &here, tolerance, &what);
                }
            }
        }
    });
}

/// More heads, and a longer sequence, than one block of scores holds: parts of the heads, and of one head.
#[test]
fn attention_in_blocks_matches_the_cpu() {
    on_gpu("attention_in_blocks_matches_the_cpu", |gpu| {
        for (heads, length, dtype, tolerance) in
            [(5, 1500, DType::F32, 1e-5), (1, 4600, DType::F32, 1e-5), (1, 3400, DType::BF16, 1.6e-2)]
        {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| {
                    let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    Var::from_tensor(&values).unwrap()
                };
                let (q, k) = (var(&[1, heads, length, 2], 1), var(&[1, heads, length, 2], 2));
                let (v, dy) = (var(&[1, heads, length, 1], 3), var(&[1, heads, length, 1], 4));
                let options = AttentionOptions { is_causal: true, ..Default::default() };
                let y = scaled_dot_product_attention(&q, &k, &v, options).unwrap();
                let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&q, &k, &v].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("result {index} of {heads} × {length} in {dtype:?}"));
            }
        }
    });
}

/// What cuDNN has kernels for: rows of 16 bytes, and heads side by side or apart, as many of keys as of queries or fewer. It has
/// none for the backward pass of the longest rows, nor for masks.
#[test]
fn attention_by_cudnn_matches_the_cpu() {
    on_gpu("attention_by_cudnn_matches_the_cpu", |gpu| {
        let cases = [
            // Heads of queries and of keys, queries, keys, and the lengths of queries and of values.
            (3, 3, 70, 70, 16, 16),
            (4, 2, 33, 50, 8, 24),
            (6, 1, 50, 33, 24, 8),
            (2, 2, 1, 1, 8, 8),
            (1, 1, 9, 9, 136, 8),
        ];
        for ((dtype, tolerance), (heads, key_heads, queries, keys, size, value_size)) in
            [(DType::F16, 3e-3), (DType::BF16, 2e-2)].into_iter().flat_map(|dtype| cases.map(|case| (dtype, case)))
        {
            for (is_causal, is_masked, scale) in [(true, false, None), (false, false, Some(0.4)), (false, true, None)] {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| {
                        let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        Var::from_tensor(&values).unwrap()
                    };
                    let q = var(&[2, heads, queries, size], 1);
                    let (k, v) = (var(&[2, key_heads, keys, size], 2), var(&[2, key_heads, keys, value_size], 3));
                    let dy = var(&[2, heads, queries, value_size], 4);
                    let mask = is_masked.then(|| tensor(&[queries, keys], 5).to_device(device).unwrap());
                    let options = AttentionOptions { mask, is_causal, scale };
                    let y = scaled_dot_product_attention(&q, &k, &v, options.clone()).unwrap();
                    let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                    let mut found = vec![floats(&y)];
                    found.extend([&q, &k, &v].map(|var| floats(grads.get(var).unwrap())));

                    let qkv = var(&[2, queries, 3 * heads * size], 6);
                    let dy = var(&[2, queries, heads * size], 7);
                    if !is_masked {
                        let y = scaled_dot_product_attention_qkvpacked(&qkv, heads, options).unwrap();
                        let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                        found.extend([floats(&y), floats(grads.get(&qkv).unwrap())]);
                    }
                    found
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    let case =
                        format!("result {index} of {heads} / {key_heads} × {queries} × {keys}, {size}, {value_size}");
                    assert_close(
                        there,
                        &here,
                        tolerance,
                        &format!("{case} in {dtype:?}, causal: {is_causal}, {scale:?}"),
                    );
                }
            }
        }
    });
}

/// cuDNN loads 16 bytes at once, so images and weights that begin between such addresses are copied for it.
#[test]
fn convolutions_take_views_at_any_address() {
    on_gpu("convolutions_take_views_at_any_address", |gpu| {
        for dtype in [DType::F32, DType::BF16] {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| {
                    let values = tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    Var::from_tensor(&values).unwrap()
                };
                // All but the first image, of 25 elements; the weights and the gradient likewise.
                let (x, weight, dy) = (var(&[3, 1, 5, 5], 1), var(&[3, 1, 3, 3], 2), var(&[3, 2, 3, 3], 3));
                let rest = |var: &Var| var.narrow(0, 1, 2).unwrap();
                let y = Conv2d::new(rest(&weight), None, Conv2dConfig::default()).forward(&rest(&x)).unwrap();
                let first = y.flatten_all().unwrap().narrow(0, 0, 1).unwrap();
                let shifted = Tensor::cat(&[&first, &y.flatten_all().unwrap()], 0).unwrap();
                let dy = dy.flatten_all().unwrap().narrow(0, 0, 37).unwrap();
                let grads = (shifted * dy).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&x, &weight].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 1.6e-2 };
            for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                assert_close(there, &here, tolerance, &format!("result {index} in {dtype:?}"));
            }
        }
    });
}

/// Sums and activations of tensors that a thread loads in vectors, and of others, and their gradients.
#[test]
fn elementwise_layers_of_any_size_match_the_cpu() {
    on_gpu("elementwise_layers_of_any_size_match_the_cpu", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            for (skipped, size) in [(0, 4096), (0, 1001), (1, 512), (0, 1)] {
                let run = |device: &Device| {
                    let var = |seed| {
                        let values = tensor(&[skipped + size], seed).to_dtype(dtype).unwrap();
                        Var::from_tensor(&values.to_device(device).unwrap()).unwrap()
                    };
                    let (a, b) = (var(1), var(2));
                    let [x, y] = [&a, &b].map(|var| var.narrow(0, skipped, size).unwrap());
                    // The gradients of x and of the sum are sums as well.
                    let sum = add(&add(&x, &y).unwrap(), &gelu(&x).unwrap()).unwrap();
                    let loss =
                        (relu(&sum).unwrap().sum_all().unwrap() + sum.sqr().unwrap().sum_all().unwrap()).unwrap();
                    let grads = loss.backward().unwrap();
                    [&sum, grads.get(&a).unwrap(), grads.get(&b).unwrap()].map(floats)
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    assert_close(there, &here, tolerance, &format!("result {index} of {size} in {dtype:?}"));
                }
            }
        }
    });
}

/// Rows that begin at any address, with some values of −∞ and one row of nothing else.
#[test]
fn rows_of_any_length_match_the_cpu() {
    on_gpu("rows_of_any_length_match_the_cpu", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            for count in [1, 3, 9, 264, 1003, 4101, 8304] {
                let run = |device: &Device| {
                    let mut values = floats(&(tensor(&[5, count], 1) * 8.0).unwrap());
                    values.iter_mut().step_by(7).for_each(|value| *value = f32::NEG_INFINITY);
                    values[count] = 0.5;
                    values[2 * count..3 * count].fill(f32::NEG_INFINITY);
                    let x = Tensor::from_vec(values, (5, count), device).unwrap().to_dtype(dtype).unwrap();
                    let x = Var::from_tensor(&x).unwrap();
                    let weights = tensor(&[5, count], 2).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    let y = softmax(&x, 1).unwrap();
                    let of_y = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
                    let finite = x.as_tensor().narrow(0, 0, 2).unwrap();
                    let finite = Var::from_tensor(&finite.clamp(-30.0, 30.0).unwrap()).unwrap();
                    let targets = Tensor::new(&[0u32, count as u32 - 1], device).unwrap();
                    let loss = cross_entropy(&finite, &targets).unwrap();
                    let of_loss = loss.backward().unwrap();
                    let gradients = [of_y.get(&x).unwrap(), of_loss.get(&finite).unwrap()];
                    [&y, &loss, gradients[0], gradients[1]].map(floats)
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    let nans = |values: &[f32]| values.iter().map(|value| value.is_nan()).collect::<Vec<_>>();
                    assert_eq!(nans(there), nans(&here), "result {index} of {count} in {dtype:?}");
                    let numbers = |values: &[f32]| values.iter().map(|value| value.max(-1e30)).collect::<Vec<_>>();
                    assert_close(
                        &numbers(there),
                        &numbers(&here),
                        tolerance,
                        &format!("result {index} of {count} in {dtype:?}"),
                    );
                }
            }
        }
    });
}

/// More products than one call of cuBLAS takes.
#[test]
fn attention_of_many_heads_matches_the_cpu() {
    on_gpu("attention_of_many_heads_matches_the_cpu", |gpu| {
        let run = |device: &Device| {
            let var = |seed| Var::from_tensor(&tensor(&[65_540, 1, 2, 1], seed).to_device(device).unwrap()).unwrap();
            let [q, k, v] = [1, 2, 3].map(var);
            let y = scaled_dot_product_attention(&q, &k, &v, AttentionOptions::default()).unwrap();
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            let gradients = [&q, &k, &v].map(|var| floats(grads.get(var).unwrap()));
            [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
        };
        for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
            assert_close(there, &here, 1e-5, &format!("result {index}"));
        }
    });
}

/// More lookups than a block sorts, indices of several digits, and rows that fill no tile, one, or many.
#[test]
fn gradients_of_many_lookups_match_the_cpu() {
    on_gpu("gradients_of_many_lookups_match_the_cpu", |gpu| {
        for (rows, count, often) in [(300, 9000, 3), (5, 64, 1), (70_000, 4097, 100), (2, 8192, 1), (17, 1, 2)] {
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1.6e-2)] {
                // Every `often`th is the same.
                let index = |i: i64| if i % often == 0 { 1 } else { i * i % rows };
                let indices: Vec<i64> = (0..count).map(index).collect();
                let run = |device: &Device| {
                    let values =
                        |shape: &[usize], seed| tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    let table = Var::from_tensor(&values(&[rows as usize, 3], 1)).unwrap();
                    let indices = Tensor::new(indices.as_slice(), device).unwrap();
                    let y = Embedding::new(table.as_tensor().clone(), 3).forward(&indices).unwrap();
                    let grads = (y * values(&[count as usize, 3], 2)).unwrap().sum_all().unwrap().backward().unwrap();
                    floats(grads.get(&table).unwrap())
                };
                assert_close(&run(gpu), &run(&Device::Cpu), tolerance, &format!("{count} of {rows} in {dtype:?}"));
            }
        }
    });
}

/// Errors that are not checked on a GPU, since that would mean waiting for it.
#[test]
fn indices_and_targets_that_do_not_exist_give_nan() {
    on_gpu("indices_and_targets_that_do_not_exist_give_nan", |gpu| {
        let table = Var::from_tensor(&tensor(&[3, 2], 1).to_device(gpu).unwrap()).unwrap();
        let indices = Tensor::new(&[1i64, 3, -1], gpu).unwrap();
        let y = Embedding::new(table.as_tensor().clone(), 2).forward(&indices).unwrap();
        let is_nan: Vec<bool> = floats(&y).iter().map(|y| y.is_nan()).collect();
        assert_eq!(is_nan, [false, false, true, true, true, true]);
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(floats(grads.get(&table).unwrap()), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);

        for logits in [tensor(&[2, 3], 1), tensor(&[1, 3, 2], 1)] {
            let targets =
                Tensor::new(&[0i64, 3], gpu).unwrap().reshape(if logits.rank() == 2 { vec![2] } else { vec![1, 2] });
            let loss = cross_entropy(&logits.to_device(gpu).unwrap(), &targets.unwrap()).unwrap();
            assert!(loss.to_scalar::<f32>().unwrap().is_nan());
        }
    });
}

#[test]
fn batches_without_samples() {
    on_gpu("batches_without_samples", |gpu| {
        let var = |shape: &[usize]| Var::zeros(shape, DType::F32, gpu).unwrap();
        let (weight, bias) = (var(&[4, 3, 3, 3]), var(&[4]));
        let conv = Conv2d::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), Conv2dConfig::default());
        let y = conv.forward(&Tensor::zeros((0, 3, 8, 8), DType::F32, gpu).unwrap()).unwrap();
        assert_eq!(y.dims(), [0, 4, 6, 6]);
        let y = max_pool2d(&y, 2, MaxPool2dOptions::default()).unwrap();
        let y = avg_pool2d(&y, 3, AvgPool2dOptions::default()).unwrap();
        assert_eq!(y.dims(), [0, 4, 1, 1]);
        assert_eq!(softmax(&relu(&y).unwrap(), 1).unwrap().dims(), [0, 4, 1, 1]);

        let (weight, bias) = (var(&[5, 4]), var(&[5]));
        let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let x = var(&[0, 4]);
        let grads = layer.forward(&x).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().dims(), [0, 4]);
        assert_eq!(floats(grads.get(&weight).unwrap()), [0.0; 20]);
        assert_eq!(floats(grads.get(&bias).unwrap()), [0.0; 5]);
        let grads = add(&x, &weight.get(0).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(floats(grads.get(&weight).unwrap()), [0.0; 20]);
    });
}

#[test]
fn dtypes_without_kernels_are_refused() {
    on_gpu("dtypes_without_kernels_are_refused", |gpu| {
        let x = Tensor::zeros((1, 2, 4, 4), DType::U32, gpu).unwrap();
        let pooled = [max_pool2d(&x, 2, MaxPool2dOptions::default()), avg_pool2d(&x, 2, AvgPool2dOptions::default())];
        for result in pooled.into_iter().chain([relu(&x), softmax(&x, 1)]) {
            assert!(result.unwrap_err().to_string().contains("U32"));
        }
    });
}
