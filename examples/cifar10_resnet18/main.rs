//! Trains ResNet-18 on CIFAR-10, on all ranks that the launcher starts. Without `--data` it trains a narrower one on the
//! handwritten digits, in files of CIFAR-10's format:
//!
//! ```text
//! cargo run -p ddprun --release -- --nproc-per-node 2 --example cifar10_resnet18
//! cargo run -p ddprun --release -- --nproc-per-node 4 --example cifar10_resnet18 -- --data cifar-10-batches-bin
//! ```
//!
//! ci: --epochs 2 --width 8 --batch-size 16 --sync-bn --require-accuracy 0.4
#[path = "../common/mod.rs"]
mod common;
mod schedule;
mod small;

use candle_core::DType;
use candle_ddp::checkpoint;
use candle_ddp::data::{DistributedSampler, LoaderOptions, SamplerOptions, StatefulDataLoader};
use candle_ddp::optim::{LrScheduler, Optimizer, ParamsSgd, Sgd};
use candle_ddp::vision::{Cifar10, Image, Normalize, RandomCrop, RandomHorizontalFlip, Split, Transform};
use candle_ddp::{DistributedDataParallel, ProcessGroup, Result, nn};
use candle_nn::{VarBuilder, VarMap};
use clap::builder::ArgPredicate;
use clap::{ArgAction, Parser, ValueEnum};
use common::accuracy::accuracy;
use common::batch_norm::BatchNormOptions;
use common::options::TrainOptions;
use common::resnet::{Arch, ResNet, ResNetOptions, Stem};
use common::run::Run;
use common::summary::require;
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
    #[arg(
        long,
        default_value = "5",
        default_value_if("data", ArgPredicate::IsPresent, "200"),
        hide_default_value = true
    )]
    epochs: u64,
    /// The number of images per batch and rank. [default: 128 with --data, otherwise 32]
    #[arg(
        long,
        default_value = "32",
        default_value_if("data", ArgPredicate::IsPresent, "128"),
        hide_default_value = true
    )]
    batch_size: usize,
    /// The channels of the first stage. [default: 64, which makes a ResNet-18, with --data, otherwise 16]
    #[arg(
        long,
        default_value = "16",
        default_value_if("data", ArgPredicate::IsPresent, "64"),
        hide_default_value = true
    )]
    width: usize,
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
    #[arg(long, value_enum, default_value = "f32")]
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
    let dtype = match options.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
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

    let mut varmap = VarMap::new();
    let resnet18 = ResNetOptions { arch: Arch::Resnet18, stem: Stem::Cifar, width: options.width, dilated_stages: 0 };
    let norm = |channels, vb: VarBuilder| options.batch_norm.build(pg, channels, vb);
    let ddp_options = options.training.ddp_options();
    let ddp =
        DistributedDataParallel::new(pg, &varmap, dtype, |vb| ResNet::new(resnet18, CLASSES, &norm, vb), ddp_options)?;
    if let Some(path) = &options.export_init {
        checkpoint::save_distributed(pg, &varmap, path)?;
    }
    let params = ParamsSgd { lr: options.lr, momentum: 0.9, weight_decay: 5e-4, ..Default::default() };
    let mut optimizer = Sgd::from_named(ddp.named_parameters(), params)?;
    let mut schedule = LrScheduler::new(&mut optimizer, options.schedule.over(options.epochs))?;
    let mut scaler = options.training.grad_scaler(&ddp)?;

    let sampler_options = SamplerOptions { seed: options.training.seed, ..Default::default() };
    let sampler = DistributedSampler::new(train.len(), pg.world_size(), pg.rank(), sampler_options)?;
    // Without padding every test image counts once, and some ranks have one less than others.
    let test_options = SamplerOptions { shuffle: false, padding: false, ..Default::default() };
    let test_sampler = DistributedSampler::new(test.len(), pg.world_size(), pg.rank(), test_options)?;
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, num_workers: options.workers, ..Default::default() };
    let collate = move |samples: Vec<(Image, u32)>| {
        let (images, labels) = NORMALIZE.collate(samples)?;
        Ok((images.to_dtype(dtype)?, labels))
    };
    let mut loader = StatefulDataLoader::new(train, sampler, loader_options, collate)?;
    let test_loader = StatefulDataLoader::new(test, test_sampler, loader_options, collate)?;

    let mut run = Run::new(
        pg,
        &options.training,
        "test accuracy",
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
            let logits = ddp.forward_t(&images, true)?.to_dtype(dtype)?;
            let loss = (nn::cross_entropy(&logits, &labels)? / micro_batch.count as f64)?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || scaler.step(&mut optimizer, &mut grads))?;
                scaler.update()?;
            }
            run.count(&micro_batch, &loss, labels.elem_count(), optimizer.learning_rate())?;
        }
        schedule.step(&mut optimizer)?;
        let test_accuracy = accuracy(&ddp, test_loader.iter_on(pg.device()))?;
        run.end_epoch(
            &ddp,
            epoch,
            test_accuracy,
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
    let test_accuracy = run.finish(&ddp)?;
    require("--require-accuracy", options.require_accuracy, "the test accuracy", test_accuracy)
}
