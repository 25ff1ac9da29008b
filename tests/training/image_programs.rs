//! What the example programs for images are made of: ResNet, as torchvision has it, Xception, DeepLabv3+, and the confusion
//! matrix.
use crate::common::assert_close;
use backbone::BackboneKind;
use candle_core::{DType, Device, ModuleT, Result, Shape, Tensor, safetensors};
use candle_ddp::nn::{BatchNorm, batch_norm};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use confusion::ConfusionMatrix;
use model::{DeepLab, DeepLabOptions};
use resnet::{Arch, ResNet, ResNetOptions, Stem};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "../../examples/ade20k_deeplab/backbone.rs"]
mod backbone;
#[path = "../../examples/ade20k_deeplab/confusion.rs"]
mod confusion;
#[path = "../../examples/common/convolution.rs"]
mod convolution;
#[path = "../../examples/ade20k_deeplab/model.rs"]
mod model;
#[allow(dead_code)] // the stem for small images
#[path = "../../examples/common/resnet.rs"]
mod resnet;
#[path = "../../examples/ade20k_deeplab/xception.rs"]
mod xception;

/// A batch norm over the rank's own samples.
fn local(channels: usize, vb: VarBuilder) -> Result<BatchNorm> {
    batch_norm(channels, 1e-5, vb)
}

/// Numbers from −0.5 to 0.5 that follow from their places, as in `scripts/golden_resnet.py`.
fn ramp(shape: &[usize], scale: f64, shift: f64) -> Tensor {
    let value = |place: u32| (f64::from(place.wrapping_mul(2_654_435_761)) / 4_294_967_296. - 0.5) * scale + shift;
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u32).map(|place| value(place) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Makes the variables as the script does, and counts what is trained. Random numbers, which they would begin with, take
/// long in a debug build.
struct Ramps(Arc<AtomicUsize>);

impl Ramps {
    fn builder() -> (VarBuilder<'static>, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let ramps = Box::new(Self(Arc::clone(&count)));
        (VarBuilder::from_backend(ramps, DType::F32, Device::Cpu), count)
    }
}

impl SimpleBackend for Ramps {
    fn get(&self, shape: Shape, name: &str, _: Init, _: DType, _: &Device) -> Result<Tensor> {
        let dims = shape.dims();
        if !name.contains("running_") {
            self.0.fetch_add(shape.elem_count(), Ordering::Relaxed);
        }
        Ok(match dims.len() {
            1 if name.ends_with("weight") || name.ends_with("running_var") => ramp(dims, 0.5, 1.),
            1 => ramp(dims, 0.5, 0.),
            _ => ramp(dims, (12. / dims[1..].iter().product::<usize>() as f64).sqrt(), 0.),
        })
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} has no shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

fn check(golden: &str, arch: Arch, dilated_stages: usize, modes: &[bool]) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/resnet.safetensors");
    let golden = safetensors::load(path, &Device::Cpu).unwrap()[golden].clone();
    let options = ResNetOptions { arch, stem: Stem::ImageNet, width: 64, dilated_stages };
    let model = ResNet::new(options, 10, &local, Ramps::builder().0).unwrap();
    // Without dilation the last batch norms see one pixel of each image, which makes training mode sensitive to rounding.
    let images = ramp(&[2, 3, 32, 32], 4., 0.);
    for (index, &train) in modes.iter().enumerate() {
        let logits = model.forward_t(&images, train).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let expected = golden.get(index).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_close(&logits, &expected, 1e-3, if train { "training" } else { "evaluation" });
    }
}

#[test]
fn resnet18_and_34_are_torchvisions() {
    check("resnet18", Arch::Resnet18, 0, &[false]);
    check("resnet34", Arch::Resnet34, 0, &[false]);
}

#[test]
fn resnet50_is_torchvisions_also_with_dilation() {
    check("resnet50", Arch::Resnet50, 0, &[false]);
    check("dilated", Arch::Resnet50, 2, &[false, true]);
}

#[test]
fn xception_has_as_many_parameters_as_published() {
    // timm's table has 26.97 and 39.92 million, with a classifier of 1000 classes.
    for (kind, published) in [(BackboneKind::Xception41, 26.97), (BackboneKind::Xception65, 39.92)] {
        let (vb, parameters) = Ramps::builder();
        kind.build(64, 16, &local, vb).unwrap();
        let millions = (parameters.load(Ordering::Relaxed) + 2048 * 1000 + 1000) as f64 / 1e6;
        assert!((millions - published).abs() < 0.005, "{millions} million");
    }
}

#[test]
fn every_backbone_has_the_output_stride_that_is_asked_for() {
    for kind in [BackboneKind::Resnet18, BackboneKind::Resnet50, BackboneKind::Xception41, BackboneKind::Xception65] {
        for output_stride in [8, 16, 32] {
            let vb = Ramps::builder().0;
            let backbone = kind.build(8, output_stride, &local, vb).unwrap();
            // The sizes that the paper uses are one more than a multiple of the stride.
            let (height, width) = (65, 96);
            let images = Tensor::zeros((1, 3, height, width), DType::F32, &Device::Cpu).unwrap();
            let features = backbone.features(&images, false).unwrap();
            for ((features, channels), stride) in features.iter().zip(backbone.channels()).zip([4, output_stride]) {
                let expected = [1, channels, height.div_ceil(stride), width.div_ceil(stride)];
                assert_eq!(features.dims(), expected, "output stride {output_stride}");
            }
        }
    }
}

#[test]
fn xceptions_receptive_field_does_not_depend_on_its_output_stride() {
    let outputs = [8, 32].map(|output_stride| {
        let vb = Ramps::builder().0;
        let backbone = BackboneKind::Xception41.build(8, output_stride, &local, vb).unwrap();
        let images = ramp(&[1, 3, 129, 129], 4., 0.);
        backbone.features(&images, false).unwrap()[1].clone()
    });
    // With dilation in the place of a stride, every fourth value is the one that the stride leaves.
    let every_fourth = Tensor::arange_step(0u32, 17, 4, &Device::Cpu).unwrap();
    let [dense, strided] = outputs;
    let sparse = dense.index_select(&every_fourth, 2).unwrap().index_select(&every_fourth, 3).unwrap();
    assert_eq!(sparse.dims(), strided.dims());
    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_close(&values(&sparse), &values(&strided), 1e-4, "features");
}

#[test]
fn deeplab_finds_a_class_for_every_pixel() {
    for backbone in [BackboneKind::Resnet18, BackboneKind::Xception41] {
        let options = DeepLabOptions { backbone, width: 8, output_stride: 16, classes: 5 };
        let deeplab = DeepLab::new(options, &local, Ramps::builder().0).unwrap();
        let images = ramp(&[2, 3, 48, 65], 4., 0.);
        assert_eq!(deeplab.forward_t(&images, true).unwrap().dims(), [2, 5, 48, 65]);
    }
}

#[test]
fn the_mean_iou_is_that_of_all_ranks() {
    let results = candle_ddp::spawn(2, |pg| {
        let mut confusion = ConfusionMatrix::new(4);
        // Two pixels of class 0, one of which is taken for class 1, and one of class 1; the last one does not count.
        let (labels, predictions) = if pg.rank() == 0 { ([0u8, 0], [0u32, 1]) } else { ([1, 255], [1, 3]) };
        let tensor = |values: [u32; 2]| Tensor::new(&values, &Device::Cpu)?.reshape((1, 1, 2));
        let labels = Tensor::new(&labels, &Device::Cpu)?.reshape((1, 1, 2))?;
        confusion.add(&tensor(predictions)?, &labels)?;
        confusion.all_reduce(&pg)?;
        Ok([confusion.mean_iou(), confusion.pixel_accuracy()])
    });
    // Classes 2 and 3 are in neither labels nor counted predictions.
    for result in results.unwrap() {
        assert_eq!(result, [0.5, 2. / 3.]);
    }
}
