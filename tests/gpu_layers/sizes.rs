//! Sizes around the numbers that kernels process at once, compared with the CPU.
use super::{assert_like_the_cpu, on_gpu};
use crate::common::{assert_close, floats, new_var, tensor};
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{
    BatchNorm, Conv2d, ConvTranspose2d, CrossEntropyOptions, Embedding, GroupNorm, InterpolateMode, Linear,
    MaxPool2dOptions, add, cross_entropy, cross_entropy_with, gelu, interpolate, max_pool2d, relu, softmax,
};
use candle_nn::{Conv2dConfig, ConvTranspose2dConfig};

/// More images than the workspace of a product takes, with groups and without, and output padding, which cuDNN refuses.
#[test]
fn many_images_match_the_cpu() {
    on_gpu("many_images_match_the_cpu", |gpu| {
        let run = |device: &Device| {
            let var = |shape: &[usize], seed| new_var(shape, seed, DType::F64, device);
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
        assert_like_the_cpu(gpu, run, 1e-5, "many images");
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
        assert_like_the_cpu(gpu, run, 2e-5, "a large batch");
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
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
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
                assert_like_the_cpu(gpu, run, tolerance, &format!("{shape:?} from {skipped} on in {dtype:?}"));
            }
        }
    });
}

/// Rows that are whole vectors and others, in all passes of convolutions with groups, without, and per channel, and resampled.
/// Groups and planes that are whole vectors, and others; views that begin between vectors; several blocks for a group, and for a plane;
/// more channels in a group than a warp has threads; single pixels.
#[test]
fn groups_of_any_size_match_the_cpu() {
    on_gpu("groups_of_any_size_match_the_cpu", |gpu| {
        let shapes = [
            ([2, 4, 4, 4], 2),
            ([3, 6, 7, 7], 3),
            ([1, 4, 150, 99], 2),
            ([2, 80, 3, 1], 2),
            ([7, 16, 1, 1], 4),
            ([3, 4, 5, 3], 4),
        ];
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F64, 1e-6), (DType::F16, 3e-3), (DType::BF16, 2e-2)] {
            for ((shape, groups), skipped) in shapes.into_iter().flat_map(|shape| [(shape, 0), (shape, 1)]) {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                    let elements = shape.iter().product::<usize>();
                    // Contiguous, from element `skipped` on.
                    let view = |var: &Var| var.narrow(0, skipped, elements).unwrap().reshape(&shape).unwrap();
                    let (x, dy) = (var(&[skipped + elements], 1), var(&[skipped + elements], 2));
                    let (weight, bias) = (var(&[shape[1]], 3), var(&[shape[1]], 4));
                    let (w, b) = (weight.as_tensor().clone(), bias.as_tensor().clone());
                    let y = GroupNorm::new(w, b, shape[1], groups, 1e-3).unwrap().forward(&view(&x)).unwrap();
                    let grads = (&y * view(&dy)).unwrap().sum_all().unwrap().backward().unwrap();
                    let gradients = [&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap()));
                    std::iter::once(floats(&y)).chain(gradients).collect::<Vec<_>>()
                };
                assert_like_the_cpu(gpu, run, tolerance, &format!("{shape:?} from {skipped} on in {dtype:?}"));
            }
        }
        let weight = Var::from_tensor(&tensor(&[4], 1).to_device(gpu).unwrap()).unwrap();
        let (w, b) = (weight.as_tensor().clone(), weight.as_detached_tensor());
        // candle cannot fill a tensor without elements on GPUs.
        let empty = Tensor::zeros((0, 4, 3), DType::F32, gpu).unwrap();
        let y = GroupNorm::new(w, b, 4, 2, 1e-3).unwrap().forward(&empty).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!((y.dims(), floats(grads.get(&weight).unwrap())), (&[0, 4, 3][..], vec![0.0; 4]));
    });
}

#[test]
fn convolutions_of_any_width_match_the_cpu() {
    on_gpu("convolutions_of_any_width_match_the_cpu", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-6), (DType::F16, 3e-3), (DType::BF16, 2e-2)] {
            for (width, stride, groups) in [(8, 1, 1), (16, 1, 4), (16, 2, 2), (9, 1, 4), (7, 2, 1), (32, 2, 4)] {
                let run = |device: &Device| {
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
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
                assert_like_the_cpu(
                    gpu,
                    run,
                    tolerance,
                    &format!("width {width}, stride {stride}, {groups} groups in {dtype:?}"),
                );
            }
        }
    });
}

/// Rows that are whole vectors, and others; the usual windows, and others. Half as many windows as columns may be vectors, too.
#[test]
fn maxima_of_any_size_match_the_cpu() {
    on_gpu("maxima_of_any_size_match_the_cpu", |gpu| {
        let windows =
            [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 3), (1, 1), (1, 0)), ((2, 5), (3, 1), (1, 2))];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for ((kernel, stride, padding), shape) in windows.into_iter().flat_map(|windows| {
                let shapes = [[2, 3, 9, 24], [3, 1, 8, 11], [2, 2, 7, 32], [1, 2, 1, 8]];
                shapes
                    .into_iter()
                    .filter(move |[.., rows, _]| rows + 2 * windows.2.0 >= windows.0.0)
                    .map(move |shape| (windows, shape))
            }) {
                for ceil_mode in [true, false] {
                    let run = |device: &Device| {
                        // Many are equal.
                        let mut values = floats(&(tensor(&shape, 1) * 4.0).unwrap().round().unwrap());
                        values.iter_mut().skip(3).step_by(29).for_each(|value| *value = f32::NAN);
                        values.iter_mut().take(40).for_each(|value| *value = f32::NEG_INFINITY);
                        let x = Tensor::from_vec(values, &shape, device).unwrap().to_dtype(dtype).unwrap();
                        let x = Var::from_tensor(&x).unwrap();
                        let options = MaxPool2dOptions { stride: Some(stride), padding, ceil_mode };
                        let y = max_pool2d(&x, kernel, options).unwrap();
                        let dy = (tensor(y.dims(), 2) * 8.0).unwrap().round().unwrap().to_dtype(dtype).unwrap();
                        let grads =
                            (&y * dy.to_device(device).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
                        // Of all devices the same, and equal to itself.
                        let comparable = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
                        [floats(&y), floats(grads.get(&x).unwrap())]
                            .map(|values| values.into_iter().map(comparable).collect::<Vec<_>>())
                    };
                    let case = format!("{dtype:?} {shape:?} {kernel:?} {stride:?} {padding:?} {ceil_mode}");
                    assert_eq!(run(gpu), run(&Device::Cpu), "{case}");
                }
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
                let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                let (x, weight, bias) = (var(&[3, 301, 5], 1), var(&[out, 5], 2), var(&[out], 3));
                let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
                let y = layer.forward(&x).unwrap();
                // Gradients whose sums are as large as they are.
                let dy = (var(&[3, 301, out], 4).as_tensor() / 30.0).unwrap();
                let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = [&x, &weight, &bias].map(|var| floats(grads.get(var).unwrap()));
                [floats(&y)].into_iter().chain(gradients).collect::<Vec<_>>()
            };
            assert_like_the_cpu(gpu, run, tolerance, &format!("{out} columns in {dtype:?}"));
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
            assert_like_the_cpu(gpu, run, tolerance, &format!("{out} columns in {dtype:?}"));
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
                    let var = |shape: &[usize], seed| new_var(shape, seed, dtype, device);
                    let (a, b, dy) = (var(&shape, 1), var(&shape[skipped..], 2), var(&shape, 3));
                    let sum = add(&a, &b).unwrap();
                    let grads = (&sum * dy.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
                    [&sum, grads.get(&a).unwrap(), grads.get(&b).unwrap()].map(floats)
                };
                assert_like_the_cpu(gpu, run, tolerance, &format!("{shape:?} in {dtype:?}, repeated over {skipped}"));
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
                assert_like_the_cpu(gpu, run, tolerance, &format!("{size} in {dtype:?}"));
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
                    assert_alike(there, &here, tolerance, &format!("result {index} of {count} in {dtype:?}"));
                }
            }
        }
    });
}

/// Columns that are whole vectors, and others, with some values of −∞ and one column of nothing else.
#[test]
fn columns_of_any_number_match_the_cpu() {
    on_gpu("columns_of_any_number_match_the_cpu", |gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            for inner in [8, 9, 264] {
                let run = |device: &Device| {
                    let on = |values: Tensor| values.to_dtype(dtype).unwrap().to_device(device).unwrap();
                    let mut values = floats(&(tensor(&[3, 5, inner], 1) * 8.0).unwrap());
                    values.iter_mut().step_by(7).for_each(|value| *value = f32::NEG_INFINITY);
                    values.iter_mut().step_by(inner).take(5).for_each(|value| *value = f32::NEG_INFINITY);
                    let x = on(Tensor::from_vec(values, (3, 5, inner), &Device::Cpu).unwrap());
                    let (x, finite) =
                        (Var::from_tensor(&x).unwrap(), Var::from_tensor(&on(tensor(&[3, 5, inner], 2))).unwrap());
                    let y = softmax(&x, 1).unwrap();
                    let of_y = (&y * on(tensor(&[3, 5, inner], 3))).unwrap().sum_all().unwrap().backward().unwrap();
                    let targets = (0..3 * inner as u32).map(|sample| sample % 5).collect::<Vec<_>>();
                    let targets = Tensor::from_vec(targets, (3, inner), device).unwrap();
                    let weight = Tensor::new(&[1f32, 0.5, 2.0, 1.5, 0.25], device).unwrap();
                    let options = CrossEntropyOptions {
                        weight: Some(weight),
                        ignore_index: 3,
                        label_smoothing: 0.1,
                        ..Default::default()
                    };
                    let loss = cross_entropy_with(&finite, &targets, options).unwrap();
                    let of_loss = loss.backward().unwrap();
                    let gradients = [of_y.get(&x).unwrap(), of_loss.get(&finite).unwrap()];
                    [&y, &loss, gradients[0], gradients[1]].map(floats)
                };
                for (index, (there, here)) in run(gpu).iter().zip(run(&Device::Cpu)).enumerate() {
                    assert_alike(there, &here, tolerance, &format!("result {index} of {inner} in {dtype:?}"));
                }
            }
        }
    });
}

/// Like `assert_close`, for numbers some of which are NaN.
fn assert_alike(there: &[f32], here: &[f32], tolerance: f32, what: &str) {
    let nans = |values: &[f32]| values.iter().map(|value| value.is_nan()).collect::<Vec<_>>();
    assert_eq!(nans(there), nans(here), "{what}");
    let numbers = |values: &[f32]| values.iter().map(|value| value.max(-1e30)).collect::<Vec<_>>();
    assert_close(&numbers(there), &numbers(here), tolerance, what);
}

/// More lookups than a block sorts, and than threads that have the least of them; indices of several digits; rows that fill no tile, one, or
/// many; and vectors, also of 16 bytes. Some indices are not in the table.
#[test]
fn gradients_of_many_lookups_match_the_cpu() {
    on_gpu("gradients_of_many_lookups_match_the_cpu", |gpu| {
        let cases = [
            (300, 9000, 3, 8),
            (5, 64, 1, 3),
            (70_000, 4097, 100, 3),
            (2, 8192, 1, 16),
            (17, 1, 2, 3),
            (300, 550_000, 7, 1),
        ];
        for (rows, count, often, size) in cases {
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1.6e-2)] {
                // Every `often`th is the same.
                let index = |i: i64| if i % often == 0 { 1 } else { i * i % rows };
                let is_outside = |i: i64| i % 1000 == 999;
                let run = |device: &Device| {
                    let values =
                        |shape: &[usize], seed| tensor(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap();
                    let table = Var::from_tensor(&values(&[rows as usize, size], 1)).unwrap();
                    // The CPU refuses indices that are not in the table: there, their gradients are zeros.
                    let is_left_out = |i: i64| !device.is_cuda() && is_outside(i);
                    let outside = |i: i64| if i / 1000 % 2 == 0 { rows } else { -1 };
                    let found =
                        (0..count).map(|i| if is_outside(i) && device.is_cuda() { outside(i) } else { index(i) });
                    let indices = Tensor::new(found.collect::<Vec<_>>(), device).unwrap();
                    let kept: Vec<f32> = (0..count).map(|i| if is_left_out(i) { 0.0 } else { 1.0 }).collect();
                    let kept = Tensor::from_vec(kept, (count as usize, 1), device).unwrap().to_dtype(dtype).unwrap();
                    let dy = values(&[count as usize, size], 2).broadcast_mul(&kept).unwrap();
                    let y = Embedding::new(table.as_tensor().clone(), size).forward(&indices).unwrap();
                    let grads = (y * dy).unwrap().sum_all().unwrap().backward().unwrap();
                    floats(grads.get(&table).unwrap())
                };
                assert_close(&run(gpu), &run(&Device::Cpu), tolerance, &format!("{count} of {rows} in {dtype:?}"));
            }
        }
    });
}
