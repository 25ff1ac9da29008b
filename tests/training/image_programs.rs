//! The parts of the example programs for images: Xception, DeepLabv3+, and the confusion matrix.
use crate::common::{assert_close, floats};
use backbone::BackboneKind;
use candle_core::{DType, Device, ModuleT, Tensor};
use candle_ddp::vision::models::{NormLayer, ResNetOptions};
use candle_ddp_testing::hashed::{Hashed, hashed};
use confusion::ConfusionMatrix;
use model::{DeepLab, DeepLabOptions};
use std::sync::atomic::Ordering;

#[path = "../../examples/ade20k_deeplab/backbone.rs"]
mod backbone;
#[path = "../../examples/ade20k_deeplab/confusion.rs"]
mod confusion;
#[path = "../../examples/ade20k_deeplab/convolution.rs"]
mod convolution;
#[path = "../../examples/ade20k_deeplab/model.rs"]
mod model;
#[path = "../../examples/ade20k_deeplab/xception.rs"]
mod xception;

/// Batch norms over the rank's own samples.
fn local() -> NormLayer {
    ResNetOptions::default().norm_layer
}

#[test]
fn xception_has_as_many_parameters_as_published() {
    // timm's table has 26.97 and 39.92 million, with a classifier of 1000 classes.
    for (kind, published) in [(BackboneKind::Xception41, 26.97), (BackboneKind::Xception65, 39.92)] {
        let (vb, parameters) = Hashed::builder(DType::F32);
        kind.build(64, 16, &local(), vb).unwrap();
        let millions = (parameters.load(Ordering::Relaxed) + 2048 * 1000 + 1000) as f64 / 1e6;
        assert!((millions - published).abs() < 0.005, "{millions} million");
    }
}

#[test]
fn every_backbone_has_the_output_stride_that_is_asked_for() {
    for kind in [BackboneKind::Resnet18, BackboneKind::Resnet50, BackboneKind::Xception41, BackboneKind::Xception65] {
        for output_stride in [8, 16, 32] {
            let vb = Hashed::builder(DType::F32).0;
            let backbone = kind.build(8, output_stride, &local(), vb).unwrap();
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
        let vb = Hashed::builder(DType::F32).0;
        let backbone = BackboneKind::Xception41.build(8, output_stride, &local(), vb).unwrap();
        let images = hashed("images", &[1, 3, 129, 129], 4., 0.);
        backbone.features(&images, false).unwrap()[1].clone()
    });
    // With dilation in the place of a stride, every fourth value is the one that the stride leaves.
    let every_fourth = Tensor::arange_step(0u32, 17, 4, &Device::Cpu).unwrap();
    let [dense, strided] = outputs;
    let sparse = dense.index_select(&every_fourth, 2).unwrap().index_select(&every_fourth, 3).unwrap();
    assert_eq!(sparse.dims(), strided.dims());
    assert_close(&floats(&sparse), &floats(&strided), 1e-4, "features");
}

#[test]
fn deeplab_finds_a_class_for_every_pixel() {
    for backbone in [BackboneKind::Resnet18, BackboneKind::Xception41] {
        let options = DeepLabOptions { backbone, width: 8, output_stride: 16, classes: 5 };
        let deeplab = DeepLab::new(options, &local(), Hashed::builder(DType::F32).0).unwrap();
        let images = hashed("images", &[2, 3, 48, 65], 4., 0.);
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
