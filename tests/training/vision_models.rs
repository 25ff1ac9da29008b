//! ResNets: torchvision's logits, files and initial values, and the options that torchvision does not have.
use crate::common::{assert_close, floats, ranks, tensor, var};
use candle_core::{DType, Device, ModuleT, Result, Shape, Tensor, safetensors};
use candle_ddp::checkpoint::{self, LoadOptions};
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::vision::models::{ResNet, ResNetOptions, ResNetStem, resnet18, resnet34, resnet50};
use candle_ddp::{Error, seed};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers from `shift - scale / 2` to `shift + scale / 2` that depend on the name and the place of each, as in
/// `scripts/golden_resnet.py`.
pub(crate) fn hashed(name: &str, shape: &[usize], scale: f64, shift: f64) -> Tensor {
    let start = name.bytes().fold(2_166_136_261_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    let value = |place: u32| {
        let mut hash = start.wrapping_add(place.wrapping_mul(0x9e37_79b1));
        hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
        hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
        ((f64::from(hash ^ (hash >> 16)) / 4_294_967_296. - 0.5) * scale + shift) as f32
    };
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u32).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The value of a variable, as in the script.
fn variable(name: &str, dims: &[usize]) -> Tensor {
    match dims.len() {
        1 if name.ends_with("weight") || name.ends_with("running_var") => hashed(name, dims, 0.5, 1.),
        1 => hashed(name, dims, 0.5, 0.),
        _ => hashed(name, dims, (12. / dims[1..].iter().product::<usize>() as f64).sqrt(), 0.),
    }
}

/// Makes variables by [`variable`], and counts the trained ones. Random initial values take long in a debug build.
pub(crate) struct Hashed(Arc<AtomicUsize>);

impl Hashed {
    pub(crate) fn builder(dtype: DType) -> (VarBuilder<'static>, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let backend = Box::new(Self(Arc::clone(&count)));
        (VarBuilder::from_backend(backend, dtype, Device::Cpu), count)
    }
}

impl SimpleBackend for Hashed {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        if !name.contains("running_") {
            self.0.fetch_add(shape.elem_count(), Ordering::Relaxed);
        }
        variable(name, shape.dims()).to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} has no shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

type Build = fn(ResNetOptions, VarBuilder) -> Result<ResNet>;

/// Compares the logits in evaluation mode, and then in training mode.
fn check(golden: &str, build: Build, replace_stride_with_dilation: [bool; 3]) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/resnet.safetensors");
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

/// A ResNet-18 with one channel in `layer1`, as the files of the next test have it.
fn narrow() -> ResNetOptions {
    ResNetOptions { num_classes: Some(10), width: 1, ..Default::default() }
}

#[test]
fn torchvisions_files_load() {
    let pickle = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resnet18.pth");
    let folder = tempfile::tempdir().unwrap();
    let same = folder.path().join("resnet18.safetensors");
    safetensors::save(&checkpoint::read(&pickle).unwrap(), &same).unwrap();
    for file in [&pickle, &same] {
        ranks(2, |pg| {
            let varmap = VarMap::new();
            resnet18(narrow(), VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
            let report = checkpoint::load_distributed(&pg, &varmap, file, LoadOptions::default())?;
            assert_eq!((report.loaded.len(), report.ignored.len()), (102, 20), "20 batch norms count their batches");
            for name in &report.loaded {
                let loaded = var(&varmap, name);
                assert_eq!(floats(&loaded), floats(&variable(name, loaded.dims())), "{name}");
            }
            Ok(())
        });
    }
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
fn batch_norms_of_all_ranks_compute_as_one_rank_does_with_all_images() {
    let options = ResNetOptions { stem: ResNetStem::Cifar, width: 4, ..narrow() };
    let images = tensor(&[6, 3, 16, 16], 1);
    let alone = resnet18(options.clone(), Hashed::builder(DType::F32).0).unwrap().forward_t(&images, true).unwrap();
    let parts = ranks(2, |pg| {
        let (first, count) = if pg.rank() == 0 { (0, 2) } else { (2, 4) };
        let group = pg.clone();
        let norm_layer = Arc::new(move |channels, vb: VarBuilder| sync_batch_norm(&group, channels, 1e-5, vb));
        let model = resnet18(ResNetOptions { norm_layer, ..options.clone() }, Hashed::builder(DType::F32).0)?;
        Ok(floats(&model.forward_t(&images.narrow(0, first, count)?, true)?))
    });
    assert_close(&parts.concat(), &floats(&alone), 1e-4, "logits");
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
    let width = |width| (ResNetOptions { width, ..narrow() }, "width");
    let classes = |classes| (ResNetOptions { num_classes: Some(classes), ..narrow() }, "num_classes");
    for (options, culprit) in [width(0), width(usize::MAX), classes(0), classes(usize::MAX)] {
        let error = Error::from(resnet50(options, Hashed::builder(DType::F32).0).unwrap_err());
        assert!(matches!(&error, Error::InvalidArgument { argument, .. } if *argument == culprit), "{error:?}");
        assert!(error.to_string().contains("must be from 1 to 1000000"), "{error}");
    }
}
