//! Layers against PyTorch's, on any device: [`layer_tests`](crate::layer_tests) makes a test of each function, which has its name.
#![allow(missing_docs)] // the names say it
mod functions;
mod golden;
mod heads;
mod norms;
mod recurrent;
mod views;

/// Tests of all functions of [`layers`](crate::layers), for the programs of tests for CPUs and for GPUs. `$on_device` gets a test's name and
/// the function, and calls the function with its device.
#[macro_export]
macro_rules! layer_tests {
    ($on_device:ident) => {
        $crate::layer_tests! {
            $on_device:
            linear_matches_pytorch
            convolutions_match_pytorch
            batch_norm_matches_pytorch
            group_norm_matches_pytorch
            instance_norm_matches_pytorch
            max_pool2d_matches_pytorch
            avg_pool2d_matches_pytorch
            adaptive_avg_pool2d_matches_pytorch
            interpolate_matches_pytorch
            nan_is_the_maximum
            activations_match_pytorch
            tanh_takes_the_place_of_candles
            embedding_matches_pytorch
            attention_matches_pytorch
            softmax_matches_pytorch
            cross_entropy_matches_pytorch
            ctc_loss_matches_pytorch
            heads_match_linear_and_cross_entropy
            large_heads_match_linear_and_cross_entropy
            heads_may_be_frozen
            small_gradients_survive_in_f16
            heads_without_samples
            layer_norm_matches_pytorch
            rms_norm_matches_pytorch
            add_norm_is_add_and_norm
            embedding_adds_in_f32
            embeddings_of_any_size
            rope_takes_the_place_of_candles
            large_logits_stay_finite
            without_samples_the_mean_is_nan
            gradients_have_the_mask_of_the_forward_pass
            masks_are_the_generators_numbers
            views_are_candles
            products_match_the_definition
            recurrent_layers_match_pytorch
        }
    };
    ($on_device:ident: $($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                $on_device(stringify!($test), $crate::layers::$test);
            }
        )*
    };
}

pub use functions::*;
pub use heads::*;
pub use norms::{add_norm_is_add_and_norm, layer_norm_matches_pytorch, rms_norm_matches_pytorch};
pub use recurrent::recurrent_layers_match_pytorch;
pub use views::{products_match_the_definition, views_are_candles};

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp_nn::{
    AttentionOptions, AvgPool2dOptions, BatchNorm, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d,
    CrossEntropyOptions, CtcLossOptions, Embedding, GroupNorm, InstanceNorm, InterpolateMode, Linear, MaxPool2dOptions,
    Reduction, adaptive_avg_pool2d, avg_pool2d, cross_entropy_with, ctc_loss, gelu, gelu_erf, interpolate, log_softmax,
    max_pool2d, relu, scaled_dot_product_attention, silu, softmax,
};
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};
use golden::{Parameters, check};

pub fn linear_matches_pytorch(device: &Device) {
    check(device, "linear", |_, x| Linear::new(x[1].clone(), x.get(2).cloned()).forward(&x[0]));
}

pub fn convolutions_match_pytorch(device: &Device) {
    let number = |case: &Parameters, name| case.numbers(name)[0];
    check(device, "conv2d", |case, x| {
        let [stride, padding, dilation, groups] =
            ["stride", "padding", "dilation", "groups"].map(|name| number(case, name));
        let config = Conv2dConfig { stride, padding, dilation, groups, cudnn_fwd_algo: None };
        Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0])
    });
    check(device, "conv1d", |case, x| {
        let [stride, padding, dilation, groups] =
            ["stride", "padding", "dilation", "groups"].map(|name| number(case, name));
        let config = Conv1dConfig { stride, padding, dilation, groups, cudnn_fwd_algo: None };
        Conv1d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0])
    });
    check(device, "conv_transpose2d", |case, x| {
        let [stride, padding, output_padding, dilation] =
            ["stride", "padding", "output_padding", "dilation"].map(|name| number(case, name));
        let config = ConvTranspose2dConfig { stride, padding, output_padding, dilation };
        ConvTranspose2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0])
    });
    check(device, "conv_transpose1d", |case, x| {
        let [stride, padding, output_padding, groups] =
            ["stride", "padding", "output_padding", "groups"].map(|name| number(case, name));
        let config = ConvTranspose1dConfig { stride, padding, output_padding, groups, dilation: 1 };
        ConvTranspose1d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0])
    });
}

pub fn batch_norm_matches_pytorch(device: &Device) {
    let layer = |x: &[Tensor]| {
        let features = x[1].elem_count();
        let statistic = |value: f64| (Tensor::ones(features, DType::F64, device)? * value)?.to_dtype(x[0].dtype());
        BatchNorm::new(features, statistic(0.0)?, statistic(1.0)?, x[1].clone(), x[2].clone(), 1e-3)
    };
    check(device, "batch_norm", |case, x| layer(x)?.forward_t(&x[0], case.flag("train")));
    check(device, "batch_norm_relu", |case, x| layer(x)?.forward_relu_t(&x[0], case.flag("train")));
    check(device, "batch_norm_add_relu", |case, x| layer(x)?.forward_add_relu_t(&x[0], &x[3], case.flag("train")));
}

pub fn group_norm_matches_pytorch(device: &Device) {
    check(device, "group_norm", |case, x| {
        let channels = x[1].elem_count();
        GroupNorm::new(x[1].clone(), x[2].clone(), channels, case.numbers("groups")[0], 1e-3)?.forward(&x[0])
    });
}

pub fn instance_norm_matches_pytorch(device: &Device) {
    check(device, "instance_norm", |_, x| {
        let parameters = x.get(1).cloned().zip(x.get(2).cloned());
        InstanceNorm::new(x[0].dim(1)?, parameters, 1e-3)?.forward(&x[0])
    });
}

pub fn max_pool2d_matches_pytorch(device: &Device) {
    check(device, "max_pool2d", |case: &Parameters, x| {
        let (stride, padding) = (Some(case.pair("stride")), case.pair("padding"));
        max_pool2d(&x[0], case.pair("kernel"), MaxPool2dOptions { stride, padding, ceil_mode: case.flag("ceil") })
    });
}

pub fn avg_pool2d_matches_pytorch(device: &Device) {
    check(device, "avg_pool2d", |case, x| {
        let (stride, padding) = (Some(case.pair("stride")), case.pair("padding"));
        let (ceil_mode, count_include_pad) = (case.flag("ceil"), case.flag("count"));
        avg_pool2d(&x[0], case.pair("kernel"), AvgPool2dOptions { stride, padding, ceil_mode, count_include_pad })
    });
}

pub fn adaptive_avg_pool2d_matches_pytorch(device: &Device) {
    check(device, "adaptive_avg_pool2d", |case, x| adaptive_avg_pool2d(&x[0], case.pair("size")));
}

pub fn interpolate_matches_pytorch(device: &Device) {
    check(device, "nearest", |case, x| interpolate(&x[0], case.pair("size"), InterpolateMode::Nearest));
    check(device, "bilinear", |case, x| {
        interpolate(&x[0], case.pair("size"), InterpolateMode::Bilinear { align_corners: case.flag("align") })
    });
}

/// A NaN counts as its window's maximum and receives the gradient.
pub fn nan_is_the_maximum(device: &Device) {
    let x = Var::new(&[[[[1f32, f32::NAN, 5.0], [f32::NAN, 2.0, 3.0]]]], device).unwrap();
    let y = max_pool2d(&x, 2, MaxPool2dOptions { stride: Some((1, 1)), ..Default::default() }).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|y| y.is_nan()));
    // The last of several NaNs, as in PyTorch.
    let dx = grads.get(&x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(dx, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
}

pub fn activations_match_pytorch(device: &Device) {
    check(device, "relu", |_, x| relu(&x[0]));
    check(device, "gelu", |_, x| gelu(&x[0]));
    check(device, "gelu_erf", |_, x| gelu_erf(&x[0]));
    check(device, "silu", |_, x| silu(&x[0]));
}

pub fn embedding_matches_pytorch(device: &Device) {
    check(device, "embedding", |_, x| {
        let indices: Vec<i64> = (0..12).map(|i| i * i % 7).collect();
        let indices = Tensor::from_vec(indices, (3, 4), device)?;
        Embedding::new(x[0].clone(), 5).forward(&indices)
    });
}

pub fn attention_matches_pytorch(device: &Device) {
    check(device, "attention", |case, qkv| {
        let (queries, keys) = (qkv[0].dim(2)?, qkv[1].dim(2)?);
        let pairs = (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j)));
        let shape = (queries, keys);
        let mask = match case.text("mask") {
            "bool" => {
                let seen = pairs.map(|(i, j)| u8::from((i * 5 + j * 3) % 4 != 0 && i != 2));
                Some(Tensor::from_vec(seen.collect(), shape, device)?)
            }
            "float" => {
                let values = pairs.map(|(i, j)| (i as f64 + 2.0 * j as f64).sin());
                Some(Tensor::from_vec(values.collect(), shape, device)?)
            }
            _ => None,
        };
        let scale = case.text("scale").parse().ok();
        let documents = case.0.contains_key("cu_seq").then(|| case.numbers("cu_seq"));
        let cu_seq =
            documents.map(|ends| Tensor::from_iter(ends.into_iter().map(|end| end as u32), device)).transpose()?;
        let options = AttentionOptions { mask, is_causal: case.flag("causal"), scale, cu_seq };
        scaled_dot_product_attention(&qkv[0], &qkv[1], &qkv[2], options)
    });
}

pub fn softmax_matches_pytorch(device: &Device) {
    check(device, "softmax", |case, x| softmax(&x[0], case.numbers("dim")[0]));
    check(device, "log_softmax", |case, x| log_softmax(&x[0], case.numbers("dim")[0]));
}

pub fn cross_entropy_matches_pytorch(device: &Device) {
    check(device, "cross_entropy", |case, x| {
        let (shape, dtype) = (x[0].dims(), x[0].dtype());
        let classes = shape[1] as i64;
        let targets: Vec<i64> = (0..(x[0].elem_count() / shape[1]) as i64).map(|i| i * i % classes).collect();
        let targets = Tensor::from_vec(targets, [&shape[..1], &shape[2..]].concat(), device)?;
        let weight = || Tensor::arange(0f64, classes as f64, device)?.affine(1.0, 0.5)?.to_dtype(dtype);
        let options = CrossEntropyOptions {
            weight: case.flag("weighted").then(weight).transpose()?,
            ignore_index: case.float("ignore") as i64,
            label_smoothing: case.float("smoothing"),
            reduction: if case.flag("mean") { Reduction::Mean } else { Reduction::Sum },
        };
        let loss = cross_entropy_with(&x[0], &targets, options.clone())?;
        if targets.min_all()?.to_scalar::<i64>()? >= 0 {
            for targets in [targets.to_dtype(DType::U32)?, targets.to_dtype(DType::U8)?] {
                let again = cross_entropy_with(&x[0], &targets, options.clone())?;
                let [loss, again] = [&loss, &again].map(|loss| loss.to_dtype(DType::F64)?.to_scalar::<f64>());
                assert_eq!(loss?, again?);
            }
        }
        // The loss of 16 bits is in f32, and is compared with the others in 16 bits.
        assert_eq!(loss.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
        loss.to_dtype(dtype)
    });
}

pub fn ctc_loss_matches_pytorch(device: &Device) {
    let loss = |case: &Parameters, log_probs: &Tensor| {
        let shape = log_probs.dims();
        let (inputs, lengths, blank) = (case.numbers("inputs"), case.numbers("targets"), case.numbers("blank")[0]);
        let labels: Vec<i64> =
            (0..shape[shape.len() - 1]).filter(|class| *class != blank).map(|class| class as i64).collect();
        let sample = |(sample, length): (usize, &usize)| -> Vec<i64> {
            (0..*length).map(|place| labels[(place * place + sample) % labels.len()]).collect()
        };
        let samples: Vec<Vec<i64>> = lengths.iter().enumerate().map(sample).collect();
        let targets = if case.flag("concatenated") {
            Tensor::from_iter(samples.into_iter().flatten(), device)?
        } else {
            let longest = lengths.iter().max().copied().unwrap_or(0);
            let padded = samples.into_iter().map(|mut sample| {
                sample.resize(longest, -1);
                sample
            });
            Tensor::from_iter(padded.flatten(), device)?.reshape((lengths.len(), longest))?
        };
        let reduction = match case.text("reduction") {
            "mean" => Some(Reduction::Mean),
            "sum" => Some(Reduction::Sum),
            _ => None,
        };
        let options = CtcLossOptions { blank, reduction, zero_infinity: case.flag("zero") };
        let dtype = log_probs.dtype();
        let loss = ctc_loss(log_probs, &targets, &inputs, &lengths, options)?;
        // The loss of 16 bits is in f32, and is compared with the others in 16 bits.
        assert_eq!(loss.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
        loss.to_dtype(dtype)
    };
    check(device, "ctc_loss", |case, x| loss(case, &log_softmax(&x[0], x[0].rank() - 1)?));
    check(device, "ctc_loss of log_probs", |case, x| loss(case, &x[0]));
}
