//! ResNets: torchvision's logits and initial values, and the options that torchvision does not have.
use candle_core::{DType, Device, ModuleT, Result, safetensors};
use candle_ddp_base::Error::InvalidArgument;
use candle_ddp_state::seed;
use candle_ddp_tensor::Error;
use candle_ddp_testing::hashed::{Hashed, hashed};
use candle_ddp_testing::{assert_close, floats, tensor, var};
use candle_ddp_vision::models::{ResNet, ResNetOptions, ResNetStem, resnet18, resnet34, resnet50};
use candle_nn::{VarBuilder, VarMap};

type Build = fn(ResNetOptions, VarBuilder) -> Result<ResNet>;

/// Compares the logits in evaluation mode, and then in training mode.
fn check(golden: &str, build: Build, replace_stride_with_dilation: [bool; 3]) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/resnet.safetensors");
    let expected = safetensors::load(path, &Device::Cpu).unwrap()[golden].clone();
    let options = ResNetOptions { num_classes: Some(10), replace_stride_with_dilation, ..Default::default() };
    let images = hashed("images", &[2, 3, 64, 64], 4., 0.);
    // In training mode, ResNet-50 magnifies the rounding of f32 to 1e-4, in PyTorch as well.
    for (index, train, dtype) in [(0, false, DType::F32), (1, true, DType::F64)] {
        let model = build(options.clone(), Hashed::builder(dtype).0).unwrap();
        let logits = model.forward_t(&images.to_dtype(dtype).unwrap(), train).unwrap();
        let mode = if train { "training" } else { "evaluation" };
        assert_close(&floats(&logits), &floats(&expected.get(index).unwrap()), 1e-4, mode);
    }
}

#[test]
fn resnet18_has_torchvisions_logits() {
    check("resnet18", resnet18, [false; 3]);
}

#[test]
fn resnet34_has_torchvisions_logits() {
    check("resnet34", resnet34, [false; 3]);
}

#[test]
fn resnet50_has_torchvisions_logits() {
    check("resnet50", resnet50, [false; 3]);
}

#[test]
fn resnet50_has_torchvisions_logits_with_dilation() {
    check("dilated", resnet50, [false, true, true]);
}

#[test]
fn initial_values_are_torchvisions() {
    let varmap = VarMap::new();
    let vb = seed::var_builder(&varmap, 1, DType::F32, &Device::Cpu);
    resnet18(ResNetOptions { width: 16, ..Default::default() }, vb).unwrap();
    let deviation = |name: &str| {
        let values = floats(&var(&varmap, name));
        (values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32).sqrt()
    };
    // Kaiming's normal distribution over the outputs, and uniform between ±1/√128 where PyTorch's linear layers are.
    for (name, expected) in [
        ("layer3.0.conv1.weight", (2_f32 / (64. * 9.)).sqrt()),
        ("layer4.0.downsample.0.weight", (2_f32 / 128.).sqrt()),
        ("fc.weight", 1. / (3_f32 * 128.).sqrt()),
        ("fc.bias", 1. / (3_f32 * 128.).sqrt()),
    ] {
        let found = deviation(name);
        assert!((found / expected - 1.).abs() < 0.05, "{name}: {found}, expected {expected}");
    }
    let largest = floats(&var(&varmap, "fc.weight")).into_iter().fold(0_f32, |largest, value| largest.max(value.abs()));
    assert!(largest <= 128_f32.sqrt().recip(), "{largest}");
    assert_eq!(floats(&var(&varmap, "layer4.1.bn2.weight")), [1.; 128]);
}

#[test]
fn without_classes_a_model_returns_its_features() {
    let images = tensor(&[1, 3, 33, 20], 1);
    for (build, expansion) in [(resnet34 as Build, 1), (resnet50 as Build, 4)] {
        for (stem, reduction) in [(ResNetStem::ImageNet, 4), (ResNetStem::Cifar, 1)] {
            let options = ResNetOptions { num_classes: None, stem, width: 2, ..Default::default() };
            let model = build(options, Hashed::builder(DType::F32).0).unwrap();
            let features = model.features(&images, false).unwrap();
            for (layer, features) in features.iter().enumerate() {
                let (channels, reduction) = ((expansion * 2) << layer, reduction << layer);
                assert_eq!(model.channels()[layer], channels);
                assert_eq!(features.dims(), [1, channels, 33_usize.div_ceil(reduction), 20_usize.div_ceil(reduction)]);
            }
            let means = floats(&features[3].mean((2, 3)).unwrap());
            assert_close(&floats(&model.forward_t(&images, false).unwrap()), &means, 1e-5, "pooled features");
        }
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let width = |width| (ResNetOptions { width, ..Default::default() }, "width");
    let classes =
        |classes| (ResNetOptions { num_classes: Some(classes), width: 1, ..Default::default() }, "num_classes");
    for (options, culprit) in [width(0), width(usize::MAX), classes(0), classes(usize::MAX)] {
        let error = Error::from(resnet50(options, Hashed::builder(DType::F32).0).unwrap_err());
        assert!(matches!(&error, Error::Base(InvalidArgument { argument, .. }) if *argument == culprit), "{error:?}");
        assert!(error.to_string().contains("must be from 1 to 1000000"), "{error}");
    }
}
