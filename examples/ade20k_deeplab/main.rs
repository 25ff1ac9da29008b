//! Trains DeepLabv3+ on ADE20K, on all ranks that the launcher starts. Without `--data` it trains a narrow one on drawings, in
//! files laid out as ADE20K's:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example ade20k_deeplab
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example ade20k_deeplab -- --data ADEChallengeData2016 --weights resnet50.pth --sync-bn --opt-level O1
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example ade20k_deeplab -- --data ADEChallengeData2016 --backbone xception65 --sync-bn --opt-level O1
//! ```
//!
//! ci: --backbone xception41 --epochs 1 --width 8 --batch-size 2 --sync-bn
//! ci: --epochs 4 --width 8 --batch-size 2 --lr 0.1 --sync-bn --opt-level O1 --require-miou 0.4
mod backbone;
#[path = "../common/batch_norm.rs"]
mod batch_norm;
#[path = "../common/mod.rs"]
mod common;
mod confusion;
mod convolution;
mod model;
#[path = "../common/pictures.rs"]
mod pictures;
mod poly;
mod small;
mod xception;

use backbone::BackboneKind;
use batch_norm::BatchNormOptions;
use candle_core::DType;
use candle_ddp::checkpoint::{self, LoadOptions};
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::nn::{CrossEntropyOptions, Reduction, cross_entropy_with, no_grad};
use candle_ddp::optim::{LrScheduler, Optimizer, ParamsSgd, Sgd};
use candle_ddp::vision::{Ade20k, IGNORE_INDEX, Normalize, RandomCrop, RandomHorizontalFlip, RandomResize, Split};
use candle_ddp::{Backward, DistributedDataParallel, Error, ProcessGroup, Result, backward_with};
use candle_nn::VarMap;
use clap::{Parser, ValueEnum};
use common::cache;
use common::options::TrainOptions;
use common::run::Run;
use common::summary::require;
use common::training::Training;
use confusion::ConfusionMatrix;
use model::{DeepLab, DeepLabOptions};
use poly::ParamsPoly;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Train DeepLabv3+ on ADE20K with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// The folder of ADEChallengeData2016. [default: drawings in its layout]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// The network that finds the features. [default: resnet50 with --data, otherwise resnet18]
    #[arg(long, value_enum)]
    backbone: Option<BackboneKind>,
    /// Begin with the weights of this file in the backbone, a ResNet: torchvision's `.pth` or safetensors.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// By how much the backbone reduces height and width.
    #[arg(long, value_enum, default_value = "16")]
    output_stride: OutputStride,
    /// The number of passes over the training images. [default: 60 with --data, otherwise 8]
    #[arg(long)]
    epochs: Option<u64>,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 4)]
    batch_size: usize,
    /// The height and width of the crops. [default: 512 with --data, otherwise 64]
    #[arg(long)]
    crop_size: Option<usize>,
    /// The channels of the ResNet's first stage, or of the input of Xception's first block; all others are in proportion.
    /// [default: 64, as in the papers, with --data or --weights, otherwise 16]
    #[arg(long)]
    width: Option<usize>,
    /// SGD's highest learning rate, which falls with the power 0.9 of the steps that are left. [default: 0.02 with --data,
    /// otherwise 0.1]
    #[arg(long)]
    lr: Option<f64>,
    /// The number of threads that read images on each rank.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Fail unless the mean intersection over union after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "MIOU")]
    require_miou: Option<f64>,
    #[command(flatten)]
    batch_norm: BatchNormOptions,
    #[command(flatten)]
    training: TrainOptions,
}

#[derive(Clone, Copy, ValueEnum)]
enum OutputStride {
    #[value(name = "8")]
    Eight,
    #[value(name = "16")]
    Sixteen,
    #[value(name = "32")]
    ThirtyTwo,
}

impl OutputStride {
    fn get(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Sixteen => 16,
            Self::ThirtyTwo => 32,
        }
    }
}

const CLASSES: usize = 150;

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let is_small = options.data.is_none();
    let backbone = options.backbone.unwrap_or(if is_small { BackboneKind::Resnet18 } else { BackboneKind::Resnet50 });
    let epochs = options.epochs.unwrap_or(if is_small { 8 } else { 60 });
    let size = options.crop_size.unwrap_or(if is_small { 64 } else { 512 });
    let width = options.width.unwrap_or(if is_small && options.weights.is_none() { 16 } else { 64 });
    let lr = options.lr.unwrap_or(if is_small { 0.1 } else { 0.02 });
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => cache::folder(pg, "drawings-ade20k", small::VERSION, small::write)?,
    };
    let augmentation = (
        RandomResize { min_size: size / 2, max_size: 2 * size },
        RandomCrop { size: (size, size), pad_if_needed: true, ..Default::default() },
        RandomHorizontalFlip::default(),
    );
    let train = Ade20k::new(&folder, Split::Train, augmentation)?;
    let validation = Ade20k::new(&folder, Split::Eval, ())?;

    let varmap = VarMap::new();
    let deeplab = DeepLabOptions { backbone, width, output_stride: options.output_stride.get(), classes: CLASSES };
    let norm = options.batch_norm.norm_layer(pg);
    let ddp_options = options.training.ddp_options();
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| DeepLab::new(deeplab, &norm, vb), ddp_options)?;
    if let Some(path) = &options.weights {
        let load_options = LoadOptions {
            rename: Some(Arc::new(|name| format!("backbone.{name}"))),
            // The classifier of the file, and all of the model but the backbone.
            skip: Arc::new(|name| name.starts_with("backbone.fc.") || !name.starts_with("backbone.")),
            ..Default::default()
        };
        checkpoint::load_with(&varmap, path, load_options)?;
    }
    let params = ParamsSgd { lr, momentum: 0.9, weight_decay: 1e-4, ..Default::default() };
    let mut optimizer = Sgd::new(&ddp, params)?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    // Without padding every image counts once, and some ranks have one less than others.
    let validation_sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    // A last batch of one image would leave a single value per channel to the batch norm of ASPP's branch for whole images.
    let loader_options = LoaderOptions {
        batch_size: options.batch_size,
        num_workers: options.workers,
        drop_last: true,
        sampler,
        ..Default::default()
    };
    let loader =
        DataLoader::with_collate(train, pg, loader_options, |samples| Ok(Normalize::IMAGENET.collate(samples)?))?;
    // Whole images, which differ in size.
    let loader_options =
        LoaderOptions { batch_size: 1, drop_last: false, sampler: validation_sampler, ..loader_options };
    let validation_loader =
        DataLoader::with_collate(validation, pg, loader_options, |samples| Ok(Normalize::IMAGENET.collate(samples)?))?;
    let batches = loader.num_batches();
    if batches == 0 {
        let reason = format!("a rank has too few images for a batch of {}", options.batch_size);
        return Err(Error::InvalidArgument { argument: "--batch-size", reason });
    }
    let total_steps = epochs * batches.div_ceil(options.training.accumulate.get()) as u64;
    let schedule = LrScheduler::new(&mut optimizer, ParamsPoly { total_steps, power: 0.9 })?;

    let mut training = Training { varmap, optimizer, schedule, scaler, loader };
    let mut run = Run::new(pg, &options.training, "mIoU", &mut training)?;
    let loss_options =
        CrossEntropyOptions { ignore_index: IGNORE_INDEX, reduction: Reduction::Sum, ..Default::default() };
    for epoch in run.epochs(epochs)? {
        run.begin_epoch(epoch, batches);
        for (index, batch) in training.loader.iter().enumerate() {
            let (images, masks) = batch?;
            let micro_batch = run.micro_batch(index);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let logits = ddp.forward_t(&images, true)?;
            let loss_sum = cross_entropy_with(&logits, &masks, loss_options.clone())?;
            // Crops have different numbers of labelled pixels. Each pixel counts once, whatever crop it is in.
            let labelled =
                f64::from(masks.ne(IGNORE_INDEX as u32)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
            let mut grads = backward_with(
                &training.scaler.scale(&loss_sum)?,
                &[&ddp],
                Backward { count: Some(labelled), ..Default::default() },
            )?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
                training.schedule.step(&mut training.optimizer)?;
            }
            let learning_rate = training.optimizer.learning_rate();
            run.count_sum(&micro_batch, &loss_sum, labelled, masks.dim(0)?, learning_rate)?;
        }

        let mut confusion = ConfusionMatrix::new(CLASSES);
        run.pause(|| {
            for batch in validation_loader.iter() {
                let (images, masks) = batch?;
                confusion.add(&no_grad(|| ddp.forward_t(&images, false))?.argmax(1)?, &masks)?;
            }
            confusion.all_reduce(pg)
        })?;
        run.end_epoch(
            &ddp,
            epoch,
            confusion.mean_iou(),
            &[("pixel accuracy", confusion.pixel_accuracy())],
            &mut training,
        )?;
    }
    let miou = run.finish(&ddp)?;
    require("--require-miou", options.require_miou, "the mIoU", miou)
}
