//! ResNets under ranks: torchvision's files, and batch norms over all ranks. The other tests of ResNets are in candle-ddp-vision.
use crate::common::{assert_close, floats, ranks, tensor, var};
use candle_core::{DType, Device, ModuleT, safetensors};
use candle_ddp::checkpoint::{self, LoadOptions};
use candle_ddp::nn::sync_batch_norm;
use candle_ddp::vision::models::{ResNetOptions, ResNetStem, resnet18};
use candle_ddp_testing::hashed::{Hashed, variable};
use candle_nn::{VarBuilder, VarMap};
use std::path::Path;
use std::sync::Arc;

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
