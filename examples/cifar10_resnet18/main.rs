//! Trains ResNet-18 on CIFAR-10, on all ranks that the launcher starts. Without `--data` it trains a narrower one on the
//! handwritten digits, in files of CIFAR-10's format:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example cifar10_resnet18
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example cifar10_resnet18 -- --data cifar-10-batches-bin
//! ```
//!
//! ci: --epochs 3 --width 8 --batch-size 16 --sync-bn --require-accuracy 0.5
#[path = "../common/batch_norm.rs"]
mod batch_norm;
#[path = "../common/mod.rs"]
mod common;
mod schedule;
mod small;

use batch_norm::BatchNormOptions;
use candle_core::DType;
use candle_ddp::checkpoint;
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::optim::{LrScheduler, Optimizer, ParamsSgd, Sgd};
use candle_ddp::vision::models::{ResNetOptions, ResNetStem, resnet18};
use candle_ddp::vision::{Cifar10, Image, Normalize, RandomCrop, RandomHorizontalFlip, Split, Transform};
use candle_ddp::{DistributedDataParallel, Precision, ProcessGroup, Result, nn};
use candle_nn::VarMap;
use clap::{ArgAction, Parser, ValueEnum};
use common::accuracy::accuracy;
use common::options::TrainOptions;
use common::run::Run;
use common::summary::require;
use common::training::Training;
use common::{cache, digits};
use schedule::ScheduleKind;
use std::path::PathBuf;
use std::process::ExitCode;

/// Train ResNet-18 on CIFAR-10 with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// The folder with the files of CIFAR-10's binary version. [default: the handwritten digits in this format]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// The number of passes over the training images. [default: 200 with --data, otherwise 5]
    #[arg(long)]
    epochs: Option<u64>,
    /// The number of images per batch and rank. [default: 128 with --data, otherwise 32]
    #[arg(long)]
    batch_size: Option<usize>,
    /// The channels of the first stage. [default: 64, which makes a ResNet-18, with --data, otherwise 16]
    #[arg(long)]
    width: Option<usize>,
    /// SGD's highest learning rate.
    #[arg(long, default_value_t = 0.1)]
    lr: f64,
    /// How the learning rate falls.
    #[arg(long, value_enum, default_value = "cosine")]
    schedule: ScheduleKind,
    /// Crop the images at random, after padding, and flip half of them.
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    augment: bool,
    /// The number of threads that make batches on each rank.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// The dtype of the model. f64 is for comparisons with other implementations: in f32, rounding errors grow with every
    /// step.
    #[arg(long, value_enum, default_value = "f32", conflicts_with_all = ["amp", "opt_level"])]
    dtype: Dtype,
    /// Write the initial weights to this file.
    #[arg(long, value_name = "FILE")]
    export_init: Option<PathBuf>,
    /// Fail unless the test accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
    #[command(flatten)]
    batch_norm: BatchNormOptions,
    #[command(flatten)]
    training: TrainOptions,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F64,
}

/// Of CIFAR-10's training images.
const NORMALIZE: Normalize = Normalize { mean: [0.4914, 0.4822, 0.4465], std: [0.2470, 0.2435, 0.2616] };
const CLASSES: usize = 10;

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let is_small = options.data.is_none();
    let epochs = options.epochs.unwrap_or(if is_small { 5 } else { 200 });
    let batch_size = options.batch_size.unwrap_or(if is_small { 32 } else { 128 });
    let width = options.width.unwrap_or(if is_small { 16 } else { 64 });
    let mut ddp_options = options.training.ddp_options();
    if matches!(options.dtype, Dtype::F64) {
        ddp_options.precision = Precision::Pure(DType::F64);
    }
    // That of images, and of the loss.
    let dtype = match ddp_options.precision {
        Precision::Pure(dtype) => dtype,
        _ => DType::F32,
    };
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => cache::folder(pg, "digits-cifar10", small::VERSION, small::write)?,
    };
    let mut augmentation: Vec<Box<dyn Transform>> = Vec::new();
    if options.augment {
        augmentation.push(Box::new(RandomCrop { size: (32, 32), padding: 4, ..Default::default() }));
        augmentation.push(Box::new(RandomHorizontalFlip::default()));
    }
    let train = Cifar10::new(&folder, Split::Train, augmentation)?;
    let test = Cifar10::new(&folder, Split::Eval, ())?;

    let varmap = VarMap::new();
    let model_options = ResNetOptions {
        num_classes: Some(CLASSES),
        norm_layer: options.batch_norm.norm_layer(pg),
        stem: ResNetStem::Cifar,
        width,
        ..Default::default()
    };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| resnet18(model_options, vb), ddp_options)?;
    if let Some(path) = &options.export_init {
        checkpoint::save_distributed(pg, &varmap, path)?;
    }
    let params = ParamsSgd { lr: options.lr, momentum: 0.9, weight_decay: 5e-4, ..Default::default() };
    let mut optimizer = Sgd::new(&ddp, params)?;
    let schedule = LrScheduler::new(&mut optimizer, options.schedule.over(epochs))?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    // Without padding every test image counts once, and some ranks have one less than others.
    let test_sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let loader_options = LoaderOptions { batch_size, num_workers: options.workers, sampler, ..Default::default() };
    let collate = move |samples: Vec<(Image, u32)>| {
        let (images, labels) = NORMALIZE.collate(samples)?;
        Ok((images.to_dtype(dtype)?, labels))
    };
    let loader = DataLoader::with_collate(train, pg, loader_options, collate)?;
    let loader_options = LoaderOptions { sampler: test_sampler, ..loader_options };
    let test_loader = DataLoader::with_collate(test, pg, loader_options, collate)?;

    let mut training = Training { varmap, optimizer, schedule, scaler, loader };
    let mut run = Run::new(pg, &options.training, "test accuracy", &mut training)?;
    for epoch in run.epochs(epochs)? {
        run.begin_epoch(epoch, training.loader.num_batches());
        for (index, batch) in training.loader.iter().enumerate() {
            let (images, labels) = batch?;
            let micro_batch = run.micro_batch(index);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let logits = ddp.forward_t(&images, true)?.to_dtype(dtype)?;
            let loss = (nn::cross_entropy(&logits, &labels)? / micro_batch.count as f64)?;
            let mut grads = ddp.backward(&training.scaler.scale(&loss)?)?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
            }
            run.count(&micro_batch, &loss, labels.elem_count(), training.optimizer.learning_rate())?;
        }
        training.schedule.step(&mut training.optimizer)?;
        let test_accuracy = run.pause(|| accuracy(&ddp, test_loader.iter()))?;
        run.end_epoch(&ddp, epoch, test_accuracy, &[], &mut training)?;
    }
    let test_accuracy = run.finish(&ddp)?;
    require("--require-accuracy", options.require_accuracy, "the test accuracy", test_accuracy)
}
