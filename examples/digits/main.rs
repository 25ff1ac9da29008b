//! Trains a small convolutional network on handwritten digits, on all ranks that the launcher starts:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example digits
//! ```
//!
//! ci: --require-accuracy 0.97
#[path = "../common/mod.rs"]
pub(crate) mod common;
mod dataset;
mod hook;
mod net;

use candle_core::DType;
use candle_ddp::amp::GradScaler;
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::metrics::ThroughputOptions;
use candle_ddp::optim::{AdamW, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Sharding, nn};
use candle_nn::VarMap;
use clap::Parser;
use common::accuracy::accuracy;
use common::options::{TrainOptions, require_rest};
use common::progress::Progress;
use common::summary::{Summary, parameter_hash, require};
use dataset::digits;
use hook::Hook;
use net::Net;
use std::process::ExitCode;

/// Train a convolutional network on 8×8 handwritten digits with DistributedDataParallel.
#[derive(Parser)]
pub(crate) struct Options {
    /// The number of passes over the training images.
    #[arg(long, default_value_t = 25)]
    epochs: u64,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// AdamW's learning rate.
    #[arg(long, default_value_t = 0.005)]
    lr: f64,
    /// The communication hook for the gradients.
    #[arg(long, value_enum, default_value_t = Hook::None)]
    comm_hook: Hook,
    /// Shard the optimizer state over the ranks (ZeRO-2).
    #[arg(long, conflicts_with = "comm_hook")]
    zero: bool,
    /// Fail unless the test accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
    #[command(flatten)]
    training: TrainOptions,
}

/// What training changes, which is what a checkpoint holds.
struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    scaler: GradScaler,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("scaler", &mut self.scaler)]
    }
}

fn main() -> ExitCode {
    common::main(train)
}

pub(crate) fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let (rank, world_size) = (pg.rank(), pg.world_size());
    let (train, test) = digits(pg.device())?;
    let varmap = VarMap::new();
    let sharding = if options.zero { Sharding::Optimizer { ranks: None } } else { Sharding::Off };
    let ddp_options = DdpOptions { sharding, ..options.training.ddp_options() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Net::new(vb), ddp_options)?;
    options.comm_hook.register(&ddp)?;
    let params = ParamsAdamW { lr: options.lr, ..Default::default() };
    let optimizer = AdamW::new(&ddp, params)?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    let loader_options = LoaderOptions { batch_size: options.batch_size, sampler, ..Default::default() };
    let loader = DataLoader::new(train, pg, loader_options)?;
    // Every test image counts once, and some ranks have one less than others.
    let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let test_loader = DataLoader::new(test, pg, LoaderOptions { sampler, ..loader_options })?;
    let batches = loader.num_batches();

    let mut training = Training { varmap, optimizer, scaler };
    let mut checkpointer = options.training.checkpointer(pg, 1)?;
    let mut epochs_done = 0;
    if let Some(checkpointer) = checkpointer.as_mut().filter(|_| options.training.resume) {
        epochs_done = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    }

    require_rest("--epochs", epochs_done, options.epochs)?;

    let mut writer = options.training.writer(pg, epochs_done)?;
    let mut summary = Summary::new(pg, "images", ThroughputOptions::default())?;
    let mut test_accuracy = 0.;
    for epoch in epochs_done + 1..=options.epochs {
        let mut progress = Progress::new(pg, format!("epoch {epoch}"), batches);
        let (mut loss_sum, mut trained) = (0., 0);
        for (index, batch) in loader.epoch(epoch).enumerate() {
            let (images, labels) = batch?;
            let micro_batch = options.training.micro_batch(index, batches);
            let _guard = ddp.sync_if(micro_batch.is_last);
            let loss = nn::cross_entropy(&ddp.forward_t(&images, true)?.to_dtype(DType::F32)?, &labels)?;
            let mut grads = ddp.backward(&training.scaler.scale(&(&loss / micro_batch.count as f64)?)?)?;
            if micro_batch.is_last {
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
            }
            let loss = f64::from(loss.to_scalar::<f32>()?);
            loss_sum += loss * labels.elem_count() as f64;
            trained += labels.elem_count();
            summary.step(labels.elem_count());
            progress.step(loss, &summary);
        }
        progress.finish();

        let [loss_sum, trained] = pg.all_reduce_scalars([loss_sum, trained as f64], ReduceOp::Sum)?;
        let (train_loss, images_per_second) = (loss_sum / trained, summary.throughput.rate().units_per_second);
        test_accuracy = summary.throughput.pause(|| accuracy(&ddp, &test_loader))?;
        if rank == 0 {
            println!(
                "epoch {epoch:>2}: loss {train_loss:.4}, test accuracy {:.2} %, {images_per_second:.0} images/s",
                100. * test_accuracy
            );
        }
        let traffic = ddp.comm_hook_traffic();
        let parameter_hash = parameter_hash(&ddp)?.to_string();
        let mut fields = vec![
            ("epoch", epoch.into()),
            ("train_loss", train_loss.into()),
            ("test_accuracy", test_accuracy.into()),
            ("images_per_second", images_per_second.into()),
            ("world_size", world_size.into()),
            ("parameter_hash", parameter_hash.as_str().into()),
        ];
        let gradient_bytes = traffic.map(|(gradient_bytes, _)| ("gradient_bytes", gradient_bytes.into()));
        let bytes_sent = traffic.and_then(|(_, bytes_sent)| Some(("bytes_sent", bytes_sent?.into())));
        fields.extend([gradient_bytes, bytes_sent].into_iter().flatten());
        writer.write(&fields)?;
        if let Some(checkpointer) = &mut checkpointer {
            summary.throughput.pause(|| checkpointer.save(epoch, &mut training))?;
        }
    }
    if let Some(mut checkpointer) = checkpointer {
        checkpointer.finish()?;
    }

    let mut results = vec![("test accuracy", format!("{:.2} %", 100. * test_accuracy))];
    if let Some((gradient_bytes, Some(sent))) = ddp.comm_hook_traffic() {
        results.push(("bytes sent", format!("{sent} for {gradient_bytes} bytes of gradients")));
    }
    summary.print(&ddp, &results)?;
    require("--require-accuracy", options.require_accuracy, "the test accuracy", test_accuracy)
}
