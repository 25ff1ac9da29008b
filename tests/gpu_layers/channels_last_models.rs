//! Models on images in channels_last: their gradients, and that nothing is converted on the way.
use super::channels_last::{channels_last, has_cudnn};
use super::on_gpu;
use crate::common::{assert_close, floats, skip, tensor};
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{MemoryFormat, batch_norm, conv2d, cross_entropy};
use candle_ddp::vision::models::{ResNet, ResNetOptions, resnet50};
use candle_ddp::{Backend, DdpOptions, DistributedDataParallel, InitOptions, Precision, init_process_group};
use candle_ddp_testing::take_counts;
use candle_nn::{Conv2dConfig, FuncT, VarBuilder, VarMap, func_t};

/// The cast of mixed precision keeps the format, and the replicas' gradients are those of contiguous images.
#[test]
fn mixed_precision_keeps_the_format() {
    on_gpu("mixed_precision_keeps_the_format", |gpu| {
        let run = |is_last: bool| {
            let options = InitOptions { backend: Backend::Single, device: Some(gpu.clone()), ..Default::default() };
            let pg = init_process_group(options).unwrap();
            let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
            let options = DdpOptions { precision, ..Default::default() };
            let varmap = VarMap::new();
            let build = |vb: VarBuilder| -> candle_core::Result<FuncT<'static>> {
                let config = Conv2dConfig { padding: 1, ..Default::default() };
                let (conv, norm) = (conv2d(8, 16, 3, config, vb.pp("conv"))?, batch_norm(16, 1e-5, vb.pp("norm"))?);
                Ok(func_t(move |x, train| norm.forward_relu_t(&conv.forward(x)?, train)))
            };
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options).unwrap();
            for (seed, (_, var)) in sorted(&varmap).iter().enumerate() {
                var.set(&tensor(var.dims(), seed as u64).to_device(gpu).unwrap()).unwrap();
            }
            let images = tensor(&[2, 8, 6, 6], 1).to_device(gpu).unwrap();
            let images = if is_last { channels_last(&images) } else { images };
            let cast = ddp.cast_forward_inputs(&images).unwrap();
            assert_eq!((cast.dtype(), MemoryFormat::of(&cast)), (DType::BF16, MemoryFormat::of(&images)));
            let y = ddp.forward_t(&images, true).unwrap();
            assert_eq!(MemoryFormat::of(&y) == MemoryFormat::ChannelsLast, is_last && has_cudnn());
            let dy = tensor(y.dims(), 4).to_dtype(DType::BF16).unwrap().to_device(gpu).unwrap();
            let grads = ddp.backward(&(&y * dy).unwrap().sum_all().unwrap()).unwrap();
            let gradients = sorted(&varmap).into_iter().filter_map(|(_, var)| grads.get(&var).map(floats));
            std::iter::once(floats(&y)).chain(gradients).collect::<Vec<_>>()
        };
        let (ours, others) = (run(true), run(false));
        assert_eq!((ours.len(), others.len()), (5, 5));
        for (index, (ours, others)) in ours.iter().zip(&others).enumerate() {
            assert_close(ours, others, 2e-2, &format!("result {index}"));
        }
    });
}

const WIDTH: usize = 8;

fn resnet(dtype: DType, device: &Device) -> (ResNet, VarMap) {
    let varmap = VarMap::new();
    let options = ResNetOptions { width: WIDTH, num_classes: Some(5), ..Default::default() };
    let net = resnet50(options, VarBuilder::from_varmap(&varmap, dtype, device)).unwrap();
    for (index, (name, var)) in sorted(&varmap).into_iter().enumerate() {
        let value = (tensor(var.dims(), index as u64) * 0.3).unwrap();
        let value = if name.contains("var") || name.contains("bn") { (value + 1.0).unwrap() } else { value };
        var.set(&value.to_dtype(dtype).unwrap().to_device(device).unwrap()).unwrap();
    }
    (net, varmap)
}

fn sorted(varmap: &VarMap) -> Vec<(String, Var)> {
    let mut vars: Vec<_> = varmap.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    vars
}

/// All gradients of a ResNet, and its running statistics, in both formats. The emulated GPU has no convolution of the stem in channels_last,
/// and all others.
#[test]
fn a_step_of_resnet50_is_the_same_in_both_formats() {
    on_gpu("a_step_of_resnet50_is_the_same_in_both_formats", |gpu| {
        let step = |is_last: bool| {
            let (net, varmap) = resnet(DType::F64, gpu);
            let images = tensor(&[3, 3, 70, 70], 1).to_dtype(DType::F64).unwrap().to_device(gpu).unwrap();
            let images = if is_last { channels_last(&images) } else { images };
            let formats = net.features(&images, false).unwrap().map(|y| MemoryFormat::of(&y));
            let expected = if is_last && has_cudnn() { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
            assert_eq!(formats, [expected; 4]);
            let targets = Tensor::new(&[1i64, 3, 0], gpu).unwrap();
            let loss = cross_entropy(&net.forward_t(&images, true).unwrap(), &targets).unwrap();
            let grads = loss.backward().unwrap();
            let of = |(name, var): (String, Var)| {
                let gradient = grads.get(&var).map(floats).unwrap_or_else(|| floats(&var));
                (name, gradient)
            };
            sorted(&varmap).into_iter().map(of).collect::<Vec<_>>()
        };
        for ((name, ours), (_, others)) in step(true).iter().zip(step(false)) {
            assert_close(ours, &others, 1e-5, name);
        }
    });
}

/// Between the images and the pooled features, a step launches only kernels for channels last: none for planes, and no copies but those
/// of the weights of convolutions larger than 1 × 1 and their gradients.
#[test]
fn a_step_of_resnet50_converts_nothing() {
    const NAME: &str = "a_step_of_resnet50_converts_nothing";
    on_gpu(NAME, |gpu| {
        let (net, _varmap) = resnet(DType::F32, gpu);
        let images = tensor(&[2, 3, 70, 70], 1).to_device(gpu).unwrap();
        let targets = Tensor::new(&[1i64, 3], gpu).unwrap();
        let counts = |images: &Tensor| {
            let step = || cross_entropy(&net.forward_t(images, true)?, &targets)?.backward();
            step().unwrap();
            take_counts();
            step().unwrap();
            take_counts()
        };
        let (Some(last), Some(contiguous)) = (counts(&channels_last(&images)), counts(&images)) else {
            return skip(NAME, "only an emulated GPU counts operations");
        };
        if !has_cudnn() {
            return;
        }
        println!("{last:#?}, {contiguous:#?}");
        let of = |counts: &[(String, usize)], part: &str| -> usize {
            counts.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum()
        };
        // 16 blocks and the stem: their weights there, and the gradients back.
        const LARGE: usize = 17;
        assert_eq!((of(&last, "transpose_"), of(&contiguous, "transpose_")), (2 * LARGE, 0));
        assert_eq!(of(&last, "ucopy"), of(&contiguous, "ucopy"));
        let planes = [
            "moments_",
            "gradient_sums_",
            "add_relu_gradient_",
            "normalise_",
            "input_gradient_",
            "max_pool_",
            "resample_",
        ];
        for name in planes {
            let pixels = format!("pixel_{name}");
            // One block sums a channel of planes as small as these, and derives its statistics.
            let all = of(&contiguous, if name == "moments_" { "batch_statistics_" } else { name });
            let (pixels, kept) = match name {
                "max_pool_" => (of(&last, "max_pool_pixels"), of(&last, name)),
                "resample_" => (of(&last, "resample_pixels"), of(&last, name)),
                _ => (of(&last, &pixels), of(&last, name)),
            };
            assert!(all > 0 && pixels == all && kept == all, "{name}: {pixels} and {kept} of {all}");
        }
    });
}
