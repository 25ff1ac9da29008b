//! Images in channels_last: the layers' numbers, and which results have the format.
use super::on_gpu;
use crate::common::{assert_close, assert_error, floats, new_var, tensor};
use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_ddp::nn::{
    AvgPool2dOptions, BatchNorm, BatchNormGroup, Conv2d, ConvTranspose2d, InterpolateMode, MaxPool2dOptions,
    MemoryFormat, adaptive_avg_pool2d, add, avg_pool2d, checkpoint, interpolate, max_pool2d, no_grad, relu,
    to_memory_format,
};
use candle_nn::{Conv2dConfig, ConvTranspose2dConfig};
use std::sync::Arc;

pub(crate) fn has_cudnn() -> bool {
    cfg!(feature = "cudnn") && std::env::var_os("CANDLE_DDP_CUDNN").is_none_or(|value| value != "0")
}

pub(crate) fn channels_last(x: &Tensor) -> Tensor {
    to_memory_format(x, MemoryFormat::ChannelsLast).unwrap()
}

/// The layers of this file, by name, with the sizes of their weights for so many channels.
type Layer<'a> = (&'a str, Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>, Vec<Var>);

fn layers(channels: usize, dtype: DType, device: &Device) -> Vec<Layer<'static>> {
    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
    let of = |var: &Var| var.as_tensor().clone();
    let mut layers: Vec<Layer> = Vec::new();
    for (name, kernel, groups, stride) in
        [("3 × 3", 3, 1, 2), ("1 × 1", 1, 1, 1), ("depthwise", 3, channels, 1), ("2 groups", 3, 2, 1)]
    {
        if channels.is_multiple_of(groups) {
            let (weight, bias) =
                (var(&[2 * channels, channels / groups, kernel, kernel], 11), var(&[2 * channels], 12));
            let config = Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
            let conv = Conv2d::new(of(&weight), Some(of(&bias)), config);
            layers.push((name, Box::new(move |x| conv.forward(x)), vec![weight, bias]));
        }
    }
    let (weight, bias) = (var(&[channels, 5, 3, 3], 13), var(&[5], 14));
    let config = ConvTranspose2dConfig { stride: 2, padding: 1, ..Default::default() };
    let conv = ConvTranspose2d::new(of(&weight), Some(of(&bias)), config);
    layers.push(("transposed", Box::new(move |x| conv.forward(x)), vec![weight, bias]));
    for (name, kind) in [("norm", 0), ("norm and relu", 1), ("norm, add and relu", 2), ("norm in evaluation", 3)] {
        let (weight, bias) = (var(&[channels], 15), var(&[channels], 16));
        let statistic = |value: f64| Tensor::full(value, channels, device).unwrap().to_dtype(dtype).unwrap();
        let norm = BatchNorm::new(channels, statistic(0.1), statistic(1.5), of(&weight), of(&bias), 1e-5).unwrap();
        let layer = move |x: &Tensor| match kind {
            0 => norm.forward_t(x, true),
            1 => norm.forward_relu_t(x, true),
            2 => norm.forward_add_relu_t(x, &relu(x)?, true),
            _ => norm.forward_t(x, false),
        };
        layers.push((name, Box::new(layer), vec![weight, bias]));
    }
    let padded = MaxPool2dOptions { stride: Some((2, 2)), padding: (1, 1), ceil_mode: true };
    layers.push(("max pool", Box::new(move |x| max_pool2d(x, 3, padded)), vec![]));
    layers.push(("uneven max pool", Box::new(|x| max_pool2d(x, (2, 4), MaxPool2dOptions::default())), vec![]));
    let padded = AvgPool2dOptions { padding: (1, 1), count_include_pad: false, ..Default::default() };
    layers.push(("average pool", Box::new(move |x| avg_pool2d(x, 3, padded)), vec![]));
    layers.push(("adaptive average pool", Box::new(|x| adaptive_avg_pool2d(x, 2)), vec![]));
    let mode = InterpolateMode::Bilinear { align_corners: false };
    layers.push(("interpolate", Box::new(move |x| interpolate(x, (9, 13), mode)), vec![]));
    layers.push(("relu", Box::new(relu), vec![]));
    layers.push(("add", Box::new(|x| add(x, &relu(x)?)), vec![]));
    layers.push(("checkpoint", Box::new(|x| checkpoint(&[x], |x| relu(&add(&x[0], &x[0])?))), vec![]));
    layers.push(("everything without gradients", Box::new(|x| no_grad(|| relu(&add(x, x)?))), vec![]));
    layers
}

/// Each layer alone, with as many channels as there are in whole vectors and others, against its results of contiguous images on the
/// CPU; also from images that begin between vectors. The result has the format, and so has the gradient of the input.
#[test]
fn layers_keep_the_format_and_the_numbers() {
    on_gpu("layers_keep_the_format_and_the_numbers", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F64, 1e-6), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            for (channels, first) in [(16, 0), (3, 0), (1, 0), (8, 1)] {
                let results = |device: &Device, is_last: bool| {
                    let run = |(name, layer, vars): &Layer| {
                        // The images after the first ones, and with channels last a number of them that shifts the rest.
                        let all = new_var(&[2 + first, channels, 7, 10], 1, dtype, device);
                        let x = all.narrow(0, first, 2).unwrap();
                        let x = if is_last { channels_last(&x) } else { x };
                        let y = layer(&x).unwrap();
                        let has_format = MemoryFormat::of(&y) == MemoryFormat::ChannelsLast;
                        // What cuDNN lacks in this format goes by way of the other.
                        let expected = is_last && (has_cudnn() || vars.first().is_none_or(|var| var.rank() == 1));
                        assert_eq!(has_format, expected, "{name} of {channels} in {dtype:?}");
                        if !y.track_op() {
                            return vec![(format!("y of {name}"), floats(&y))];
                        }
                        let dy = tensor(y.dims(), 2).to_dtype(dtype).unwrap().to_device(device).unwrap();
                        let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
                        let gradients = std::iter::once(&all).chain(vars).enumerate().map(|(index, var)| {
                            (format!("gradient {index} of {name}"), floats(grads.get(var).unwrap()))
                        });
                        std::iter::once((format!("y of {name}"), floats(&y))).chain(gradients).collect()
                    };
                    layers(channels, dtype, device).iter().flat_map(run).collect::<Vec<_>>()
                };
                let (there, here) = (results(gpu, true), results(&Device::Cpu, false));
                assert_eq!(there.len(), here.len());
                for ((what, there), (_, here)) in there.iter().zip(&here) {
                    assert_close(there, here, tolerance, &format!("{what} with {channels} channels in {dtype:?}"));
                }
            }
        }
    });
}

/// Of NaNs and equal maxima, in the interior and at the border, the same one counts as in the other format.
#[test]
fn maxima_are_found_in_the_same_place() {
    on_gpu("maxima_are_found_in_the_same_place", |gpu| {
        let values = (0..2 * 8 * 9 * 6).map(|i| if i % 23 == 5 { f32::NAN } else { ((i * 7919) % 5) as f32 });
        let x = Var::from_vec(values.collect(), (2, 8, 9, 6), gpu).unwrap();
        for (kernel, stride, padding) in [(3, 2, 1), (2, 1, 1), (4, 3, 2)] {
            let options =
                MaxPool2dOptions { stride: Some((stride, stride)), padding: (padding, padding), ceil_mode: true };
            let run = |x: &Tensor, of: &Var| {
                let y = max_pool2d(x, kernel, options).unwrap();
                let dy = tensor(y.dims(), 2).to_device(gpu).unwrap();
                // NaN times anything is NaN, so that the gradient passes by another sum.
                let is_number = y.eq(&y).unwrap().to_dtype(DType::F32).unwrap();
                let grads = add(&y, &dy).unwrap().sum_all().unwrap().backward().unwrap();
                [floats(&is_number), floats(grads.get(of).unwrap())]
            };
            assert_eq!(run(&channels_last(&x), &x), run(&x, &x), "{kernel}, {stride}, {padding}");
        }
    });
}

/// There and back, in sizes that are whole vectors and others, and for dtypes without kernels. A format that a tensor has is no copy.
#[test]
fn formats_change_and_numbers_stay() {
    on_gpu("formats_change_and_numbers_stay", |gpu| {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::I64] {
            for shape in [[2, 16, 5, 7], [3, 3, 4, 4], [2, 1, 3, 2], [2, 5, 1, 1], [1, 8, 1, 9], [0, 3, 2, 2]] {
                let x = (tensor(&shape, 1) * 100.0).unwrap().abs().unwrap().to_dtype(dtype).unwrap();
                let there = channels_last(&x.to_device(gpu).unwrap());
                let has_pixels = shape[2] * shape[3] > 1 && shape[0] > 0;
                assert_eq!(MemoryFormat::of(&there) == MemoryFormat::ChannelsLast, has_pixels, "{shape:?}");
                assert_eq!(channels_last(&there).stride(), there.stride());
                let back = to_memory_format(&there, MemoryFormat::Contiguous).unwrap();
                assert!(back.is_contiguous());
                // candle copies no tensors without elements to the host.
                if x.elem_count() > 0 {
                    assert_eq!([floats(&there), floats(&back)], [floats(&x), floats(&x)], "{shape:?} in {dtype:?}");
                }
            }
        }
        let refused = to_memory_format(&tensor(&[2, 3, 4], 1), MemoryFormat::ChannelsLast);
        assert_error(refused, &["it must be (N, C, H, W), not f32[2, 3, 4]"]);
    });
}

/// Two ranks, the other one of which has the same batch.
#[derive(Debug)]
struct Twice;

impl BatchNormGroup for Twice {
    fn world_size(&self) -> usize {
        2
    }

    fn check(&self, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, mine: &Tensor) -> Result<Tensor> {
        Tensor::stack(&[mine, mine], 0)
    }

    fn all_reduce(&self, sums: &Tensor) -> Result<()> {
        sums.slice_set(&(sums * 2.0)?, 0, 0)
    }
}

/// The batch of all ranks, of twice as many values.
#[test]
fn batches_of_several_ranks_are_the_same_in_both_formats() {
    on_gpu("batches_of_several_ranks_are_the_same_in_both_formats", |gpu| {
        let run = |is_last: bool| {
            let (x, weight, bias) = (
                new_var(&[3, 16, 4, 5], 1, DType::F32, gpu),
                new_var(&[16], 2, DType::F32, gpu),
                new_var(&[16], 3, DType::F32, gpu),
            );
            let statistic = |value: f32| Tensor::full(value, 16, gpu).unwrap();
            let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
            let norm = BatchNorm::new(16, statistic(0.0), statistic(1.0), w, b, 1e-5).unwrap();
            let norm = norm.synchronised(Arc::new(Twice));
            let input = if is_last { channels_last(&x) } else { x.as_tensor().clone() };
            let y = norm.forward_relu_t(&input, true).unwrap();
            assert_eq!(MemoryFormat::of(&y) == MemoryFormat::ChannelsLast, is_last);
            let dy = tensor(y.dims(), 4).to_device(gpu).unwrap();
            let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
            let gradients = [&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap()));
            let statistics = [norm.running_mean(), norm.running_var()].map(floats);
            [floats(&y)].into_iter().chain(gradients).chain(statistics).collect::<Vec<_>>()
        };
        for (index, (ours, others)) in run(true).iter().zip(run(false)).enumerate() {
            assert_close(ours, &others, 1e-5, &format!("result {index}"));
        }
    });
}
