//! Trains a ResNet on images in a folder for each class, on all ranks that the launcher starts. Without `--data` it trains a
//! narrow one on the handwritten digits, as JPEG and PNG files:
//!
//! ```text
//! cargo run -p ddprun --release -- --nproc-per-node 2 --example imagefolder_resnet
//! cargo run -p ddprun --release -- --nproc-per-node 4 --example imagefolder_resnet -- --data imagenet --arch resnet50
//! cargo run -p ddprun --release -- --nproc-per-node 4 --example imagefolder_resnet -- --data flowers --weights resnet18.pth --lr 0.01
//! ```
//!
//! ci: --epochs 2 --width 8 --batch-size 16 --lr 0.2 --require-accuracy 0.6
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/pictures.rs"]
mod pictures;
mod small;
mod weights;

use candle_core::DType;
use candle_ddp::data::{DistributedSampler, LoaderOptions, SamplerOptions, StatefulDataLoader};
use candle_ddp::optim::{CosineAnnealingLr, Optimizer, ParamsCosineAnnealingLr, ParamsSgd, Sgd};
use candle_ddp::vision::{
    CenterCrop, ImageFolder, ImageFolderOptions, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ResizeSize,
};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, Result, nn};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use clap::builder::ArgPredicate;
use common::accuracy::accuracy;
use common::batch_norm::BatchNormOptions;
use common::options::TrainOptions;
use common::resnet::{Arch, ResNet, ResNetOptions, Stem};
use common::run::Run;
use common::summary::require;
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
    #[arg(
        long,
        default_value = "5",
        default_value_if("data", ArgPredicate::IsPresent, "90"),
        hide_default_value = true
    )]
    epochs: u64,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// The height and width to which images are brought. [default: 224 with --data, otherwise 64]
    #[arg(
        long,
        default_value = "64",
        default_value_if("data", ArgPredicate::IsPresent, "224"),
        hide_default_value = true
    )]
    image_size: usize,
    /// The smallest part of an image's area that a crop has. [default: 0.08 with --data, otherwise 0.6]
    #[arg(
        long,
        default_value = "0.6",
        default_value_if("data", ArgPredicate::IsPresent, "0.08"),
        hide_default_value = true
    )]
    crop_scale: f64,
    /// The channels of the first stage. [default: 64, as torchvision's, with --data or --weights, otherwise 16]
    #[arg(
        long,
        default_value = "16",
        default_value_ifs([("data", ArgPredicate::IsPresent, "64"), ("weights", ArgPredicate::IsPresent, "64")]),
        hide_default_value = true
    )]
    width: usize,
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

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => cache::folder(pg, "digits-folder", small::VERSION, small::write)?,
    };
    let size = (options.image_size, options.image_size);
    let augmentation = (
        RandomResizedCrop { size, scale: (options.crop_scale, 1.), ..Default::default() },
        RandomHorizontalFlip::default(),
    );
    // Of 224 pixels and 256, as everywhere.
    let resize = Resize { size: ResizeSize::ShorterSide(options.image_size * 8 / 7) };
    let center = (resize, CenterCrop { size, ..Default::default() });
    let folder_options = ImageFolderOptions { skip_corrupt: options.skip_corrupt };
    let train = ImageFolder::new(folder.join("train"), augmentation, folder_options)?;
    let validation = ImageFolder::new(folder.join("val"), center, ImageFolderOptions::default())?;
    if train.classes() != validation.classes() {
        let reason = format!("the folders train and val of {} have different classes", folder.display());
        return Err(Error::InvalidArgument { argument: "--data", reason });
    }
    let classes = train.classes().len();

    let mut varmap = VarMap::new();
    let resnet = ResNetOptions { arch: options.arch, stem: Stem::ImageNet, width: options.width, dilated_stages: 0 };
    let norm = |channels, vb: VarBuilder| options.batch_norm.build(pg, channels, vb);
    let ddp_options = options.training.ddp_options();
    let ddp = DistributedDataParallel::new(
        pg,
        &varmap,
        DType::F32,
        |vb| ResNet::new(resnet, classes, &norm, vb),
        ddp_options,
    )?;
    if let Some(path) = &options.weights {
        weights::load(pg, &varmap, path, classes)?;
    }
    let params = ParamsSgd { lr: options.lr, momentum: 0.9, weight_decay: 1e-4, ..Default::default() };
    let mut optimizer = Sgd::from_named(ddp.named_parameters(), params)?;
    let params = ParamsCosineAnnealingLr { t_max: options.epochs, eta_min: 0. };
    let mut schedule = CosineAnnealingLr::new(&mut optimizer, params)?;
    let mut scaler = options.training.grad_scaler(&ddp)?;

    let sampler_options = SamplerOptions { seed: options.training.seed, ..Default::default() };
    let sampler = DistributedSampler::new(train.len(), pg.world_size(), pg.rank(), sampler_options)?;
    // Without padding every image counts once, and some ranks have one less than others.
    let validation_options = SamplerOptions { shuffle: false, padding: false, ..Default::default() };
    let validation_sampler = DistributedSampler::new(validation.len(), pg.world_size(), pg.rank(), validation_options)?;
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, num_workers: options.workers, ..Default::default() };
    let mut loader =
        StatefulDataLoader::new(train, sampler, loader_options, |samples| Ok(Normalize::IMAGENET.collate(samples)?))?;
    let validation_loader = StatefulDataLoader::new(validation, validation_sampler, loader_options, |samples| {
        Ok(Normalize::IMAGENET.collate(samples)?)
    })?;

    let mut run = Run::new(
        pg,
        &options.training,
        "validation accuracy",
        &mut [
            ("model", &mut varmap),
            ("optimizer", &mut optimizer),
            ("schedule", &mut schedule),
            ("scaler", &mut scaler),
            ("loader", &mut loader),
        ],
    )?;
    for epoch in run.epochs(options.epochs)? {
        run.begin_epoch(epoch, loader.num_batches());
        for (index, batch) in loader.iter_on(pg.device()).enumerate() {
            let (images, labels) = batch?;
            let micro_batch = run.micro_batch(index);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = (!micro_batch.is_last).then(|| ddp.no_sync());
            let logits = ddp.forward_t(&images, true)?.to_dtype(DType::F32)?;
            let loss = (nn::cross_entropy(&logits, &labels)? / micro_batch.count as f64)?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || scaler.step(&mut optimizer, &mut grads))?;
                scaler.update()?;
            }
            run.count(&micro_batch, &loss, labels.elem_count(), optimizer.learning_rate())?;
        }
        schedule.step(&mut optimizer)?;
        let validation_accuracy = accuracy(&ddp, validation_loader.iter_on(pg.device()))?;
        run.end_epoch(
            &ddp,
            epoch,
            validation_accuracy,
            &[],
            &[
                ("model", &varmap),
                ("optimizer", &optimizer),
                ("schedule", &schedule),
                ("scaler", &scaler),
                ("loader", &loader),
            ],
        )?;
    }
    let validation_accuracy = run.finish(&ddp)?;
    require("--require-accuracy", options.require_accuracy, "the validation accuracy", validation_accuracy)
}
