//! Trains a ResNet on images in a folder for each class, on all ranks that the launcher starts. Without `--data` it trains a
//! narrow one on the handwritten digits, as JPEG and PNG files:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example imagefolder_resnet
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example imagefolder_resnet -- --data imagenet --arch resnet50
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example imagefolder_resnet -- --data flowers --weights resnet18.pth --lr 0.01
//! ```
//!
//! ci: --epochs 2 --width 8 --batch-size 16 --lr 0.2 --require-accuracy 0.6
#[path = "../common/batch_norm.rs"]
mod batch_norm;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/pictures.rs"]
mod pictures;
mod small;
mod weights;

use batch_norm::BatchNormOptions;
use candle_core::DType;
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::optim::{CosineAnnealingLr, Optimizer, ParamsCosineAnnealingLr, ParamsSgd, Sgd};
use candle_ddp::vision::models::{ResNetOptions, resnet18, resnet34, resnet50};
use candle_ddp::vision::{CenterCrop, ImageFolder, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, Result, nn};
use candle_nn::VarMap;
use clap::{Parser, ValueEnum};
use common::accuracy::accuracy;
use common::options::TrainOptions;
use common::run::Run;
use common::summary::require;
use common::training::Training;
use common::{cache, digits};
use std::path::PathBuf;
use std::process::ExitCode;

/// Train a ResNet on a folder of images with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// A folder with the folders `train` and `val`, in which each class has its own. [default: the handwritten digits]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// The model.
    #[arg(long, value_enum, default_value = "resnet18")]
    arch: Arch,
    /// Begin with the weights of this file, torchvision's `.pth` or safetensors.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The number of passes over the training images. [default: 90 with --data, otherwise 5]
    #[arg(long)]
    epochs: Option<u64>,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// The height and width to which images are brought. [default: 224 with --data, otherwise 64]
    #[arg(long)]
    image_size: Option<usize>,
    /// The smallest part of an image's area that a crop has. [default: 0.08 with --data, otherwise 0.6]
    #[arg(long)]
    crop_scale: Option<f64>,
    /// The channels of the first stage. [default: 64, as torchvision's, with --data or --weights, otherwise 16]
    #[arg(long)]
    width: Option<usize>,
    /// SGD's highest learning rate, which falls along half a cosine.
    #[arg(long, default_value_t = 0.1)]
    lr: f64,
    /// Train with the next image in the place of one that is damaged.
    #[arg(long)]
    skip_corrupt: bool,
    /// The number of threads that read images on each rank.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Fail unless the validation accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
    #[command(flatten)]
    batch_norm: BatchNormOptions,
    #[command(flatten)]
    training: TrainOptions,
}

#[derive(Clone, Copy, ValueEnum)]
enum Arch {
    Resnet18,
    Resnet34,
    Resnet50,
}

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let is_small = options.data.is_none();
    let epochs = options.epochs.unwrap_or(if is_small { 5 } else { 90 });
    let image_size = options.image_size.unwrap_or(if is_small { 64 } else { 224 });
    let crop_scale = options.crop_scale.unwrap_or(if is_small { 0.6 } else { 0.08 });
    let width = options.width.unwrap_or(if is_small && options.weights.is_none() { 16 } else { 64 });
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => cache::folder(pg, "digits-folder", small::VERSION, small::write)?,
    };
    let size = (image_size, image_size);
    let augmentation =
        (RandomResizedCrop { size, scale: (crop_scale, 1.), ..Default::default() }, RandomHorizontalFlip::default());
    // Of 224 pixels and 256, as everywhere.
    let resize = Resize::ShorterSide(image_size * 8 / 7);
    let center = (resize, CenterCrop { size, ..Default::default() });
    let train = ImageFolder::new(folder.join("train"), augmentation)?.skip_corrupt(options.skip_corrupt);
    let validation = ImageFolder::new(folder.join("val"), center)?;
    if train.classes() != validation.classes() {
        let reason = format!("the folders train and val of {} have different classes", folder.display());
        return Err(Error::InvalidArgument { argument: "--data", reason });
    }
    let classes = train.classes().len();

    let varmap = VarMap::new();
    let resnet = match options.arch {
        Arch::Resnet18 => resnet18,
        Arch::Resnet34 => resnet34,
        Arch::Resnet50 => resnet50,
    };
    let model_options = ResNetOptions {
        num_classes: Some(classes),
        norm_layer: options.batch_norm.norm_layer(pg),
        width,
        ..Default::default()
    };
    let ddp_options = options.training.ddp_options();
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| resnet(model_options, vb), ddp_options)?;
    if let Some(path) = &options.weights {
        weights::load(pg, &varmap, path, classes)?;
    }
    let params = ParamsSgd { lr: options.lr, momentum: 0.9, weight_decay: 1e-4, ..Default::default() };
    let mut optimizer = Sgd::new(&ddp, params)?;
    let params = ParamsCosineAnnealingLr { t_max: epochs, eta_min: 0. };
    let schedule = CosineAnnealingLr::new(&mut optimizer, params)?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    // Without padding every image counts once, and some ranks have one less than others.
    let validation_sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, num_workers: options.workers, sampler, ..Default::default() };
    let loader =
        DataLoader::with_collate(train, pg, loader_options, |samples| Ok(Normalize::IMAGENET.collate(samples)?))?;
    let loader_options = LoaderOptions { sampler: validation_sampler, ..loader_options };
    let validation_loader =
        DataLoader::with_collate(validation, pg, loader_options, |samples| Ok(Normalize::IMAGENET.collate(samples)?))?;

    let mut training = Training { varmap, optimizer, schedule, scaler, loader };
    let mut run = Run::new(pg, &options.training, "validation accuracy", &mut training)?;
    for epoch in run.epochs(epochs)? {
        run.begin_epoch(epoch, training.loader.num_batches());
        for (index, batch) in training.loader.iter().enumerate() {
            let (images, labels) = batch?;
            let micro_batch = run.micro_batch(index);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let logits = ddp.forward_t(&images, true)?.to_dtype(DType::F32)?;
            let loss = (nn::cross_entropy(&logits, &labels)? / micro_batch.count as f64)?;
            let mut grads = ddp.backward(&training.scaler.scale(&loss)?)?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
            }
            run.count(&micro_batch, &loss, labels.elem_count(), training.optimizer.learning_rate())?;
        }
        training.schedule.step(&mut training.optimizer)?;
        let validation_accuracy = run.pause(|| accuracy(&ddp, validation_loader.iter()))?;
        run.end_epoch(&ddp, epoch, validation_accuracy, &[], &mut training)?;
    }
    let validation_accuracy = run.finish(&ddp)?;
    require("--require-accuracy", options.require_accuracy, "the validation accuracy", validation_accuracy)
}
