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
mod attention_parts;
mod autocast;
mod channels_last;
mod channels_last_models;
#[path = "../common/mod.rs"]
mod common;
mod masks;
mod narrow_gradients;
mod operations;
mod residual_sums;
mod sizes;
mod waits;

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{
    AttentionOptions, AvgPool2dOptions, BatchNorm, Conv2d, Embedding, Linear, MaxPool2dOptions, add, avg_pool2d,
    cross_entropy, max_pool2d, relu, scaled_dot_product_attention, scaled_dot_product_attention_qkvpacked, softmax,
};
use candle_nn::Conv2dConfig;
use common::{assert_close, floats, new_var, skip_unless, tensor};

/// Runs `test` on a GPU, if there is one.
fn on_gpu(name: &str, test: impl FnOnce(&Device)) {
    match Device::new_cuda(0) {
        Ok(device) => test(&device),
        Err(error) => {
            // The other lines are a backtrace.
            let error = error.to_string();
            skip_unless("CANDLE_DDP_REQUIRE_GPU", name, error.lines().next().unwrap_or_default());
        }
    }
}

/// Checks that `run` has the same results on the GPU as on the CPU.
fn assert_like_the_cpu<R: AsRef<[Vec<f32>]>>(gpu: &Device, run: impl Fn(&Device) -> R, tolerance: f32, case: &str) {
    let (there, here) = (run(gpu), run(&Device::Cpu));
    let (there, here) = (there.as_ref(), here.as_ref());
    assert_eq!(there.len(), here.len(), "{case}");
    for (index, (there, here)) in there.iter().zip(here).enumerate() {
        assert_close(there, here, tolerance, &format!("result {index} of {case}"));
    }
}

candle_ddp_testing::layer_tests!(on_gpu);

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

/// More heads, and a longer sequence, than one block of scores holds: parts of the heads, and of one head.
#[test]
fn attention_in_blocks_matches_the_cpu() {
    on_gpu("attention_in_blocks_matches_the_cpu", |gpu| {
        for (heads, length, dtype, tolerance) in
            [(5, 1500, DType::F32, 1e-5), (1, 4600, DType::F32, 1e-5), (1, 3400, DType::BF16, 1.6e-2)]
        {
            let run = |device: &Device| {
                let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                let (q, k) = (var(&[1, heads, length, 2], 1), var(&[1, heads, length, 2], 2));
                let (v, dy) = (var(&[1, heads, length, 1], 3), var(&[1, heads, length, 1], 4));
                let options = AttentionOptions { is_causal: true, ..Default::default() };
                let y = scaled_dot_product_attention(&q, &k, &v, options).unwrap();
                let grads = (&y * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&q, &k, &v].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            assert_like_the_cpu(gpu, run, tolerance, &format!("{heads} × {length} in {dtype:?}"));
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
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                    let q = var(&[2, heads, queries, size], 1);
                    let (k, v) = (var(&[2, key_heads, keys, size], 2), var(&[2, key_heads, keys, value_size], 3));
                    let dy = var(&[2, heads, queries, value_size], 4);
                    let mask = is_masked.then(|| tensor(&[queries, keys], 5).to_device(device).unwrap());
                    let options = AttentionOptions { mask, is_causal, scale, cu_seq: None };
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
                let case = format!("{heads} / {key_heads} × {queries} × {keys}, {size}, {value_size}");
                let case = format!("{case} in {dtype:?}, causal: {is_causal}, {scale:?}");
                assert_like_the_cpu(gpu, run, tolerance, &case);
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
                let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
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
            assert_like_the_cpu(gpu, run, tolerance, &format!("{dtype:?}"));
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
        assert_like_the_cpu(gpu, run, 1e-5, "many heads");
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
