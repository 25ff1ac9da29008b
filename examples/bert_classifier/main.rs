//! Fine-tunes BERT to classify sentences, on all ranks that the launcher starts. Without `--checkpoint` it trains a small one
//! from random weights, and without `--data` on sentences that it makes itself:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example bert_classifier
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --example bert_classifier -- --checkpoint bert-base-uncased --freeze embeddings
//! ```
//!
//! ci: --freeze embeddings.position_embeddings --require-accuracy 0.9
//! ci: --amp bf16 --accumulate 2 --batch-size 8 --require-accuracy 0.9
mod accuracy;
#[path = "../common/mod.rs"]
mod common;
mod freeze;
mod model;
mod pretrained;
mod requests;
mod schedule;
mod text;

use accuracy::accuracy;
use candle_core::DType;
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::metrics::ThroughputOptions;
use candle_ddp::optim::{AdamW, LrScheduler, Optimizer, ParameterGroup, ParamsAdamW};
use candle_ddp::seed::{default_generator, seed_everything};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Role, nn};
use candle_nn::VarMap;
use clap::Parser;
use common::options::{TrainOptions, require_rest};
use common::progress::Progress;
use common::summary::{Summary, parameter_hash, require};
use common::training::Training;
use model::BertForSequenceClassification;
use pretrained::Pretrained;
use schedule::ParamsWarmupLinear;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use text::{Sentences, WordPieces};

/// Fine-tune BERT to classify sentences with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// A folder with config.json, vocab.txt, and model.safetensors or pytorch_model.bin. [default: a small model]
    #[arg(long, value_name = "FOLDER")]
    checkpoint: Option<PathBuf>,
    /// A text file with a class, a tab and a sentence in each line. [default: requests to an assistant at home]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Do not train the variables whose names begin with these, such as `embeddings,encoder.layer.0`.
    #[arg(long, value_name = "PREFIXES", value_delimiter = ',')]
    freeze: Vec<String>,
    /// The number of passes over the training sentences. [default: 3 with --checkpoint, otherwise 10]
    #[arg(long)]
    epochs: Option<u64>,
    /// The number of sentences per batch and rank.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// AdamW's highest learning rate. [default: 0.00005 with --checkpoint, otherwise 0.002]
    #[arg(long)]
    lr: Option<f64>,
    /// The part of all steps in which the learning rate rises; then it falls along a straight line to 0.
    #[arg(long, default_value_t = 0.1)]
    warmup: f64,
    /// The L2 norm to which the gradients are clipped.
    #[arg(long, default_value_t = 1.)]
    clip: f64,
    /// Fail unless the validation accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
    /// Write the trained model to this folder, for --checkpoint and for transformers.
    #[arg(long, value_name = "FOLDER")]
    export: Option<PathBuf>,
    #[command(flatten)]
    training: TrainOptions,
}

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let is_small = options.checkpoint.is_none();
    let epochs = options.epochs.unwrap_or(if is_small { 10 } else { 3 });
    let lr = options.lr.unwrap_or(if is_small { 0.002 } else { 5e-5 });
    let (classes, train, validation) = Sentences::read(options.data.as_deref())?;
    let pretrained = match &options.checkpoint {
        Some(folder) => Pretrained::read(folder)?,
        None => Pretrained::small(train.vocabulary())?,
    };
    let config = &pretrained.config;
    let word_pieces = WordPieces::new(&pretrained.vocabulary, config.max_position_embeddings)?;

    let varmap = VarMap::new();
    let prefixes = options.freeze.clone();
    let role = move |name: &str| if freeze::is_frozen(name, &prefixes) { Role::Frozen } else { Role::Parameter };
    let ddp = DistributedDataParallel::with_options(
        pg,
        &varmap,
        |vb| BertForSequenceClassification::new(config, classes.len(), vb),
        DdpOptions { role: Arc::new(role), ..options.training.ddp_options() },
    )?;
    let frozen = freeze::check(&ddp, &options.freeze)?;
    pretrained.load(pg, &varmap)?;
    // From here on each rank draws its own masks for dropout.
    seed_everything(pg.device(), options.training.seed, pg.rank())?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    // Without padding every sentence counts once, and some ranks have one less than others.
    let validation_sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, num_workers: 1, sampler, ..Default::default() };
    let pieces = word_pieces.clone();
    let loader = DataLoader::with_collate(train, pg, loader_options, move |samples| pieces.batch(samples))?;
    let loader_options = LoaderOptions { sampler: validation_sampler, ..loader_options };
    let validation_loader =
        DataLoader::with_collate(validation, pg, loader_options, move |samples| word_pieces.batch(samples))?;

    let parameters = ddp.named_parameters().into_iter();
    let (bare, decayed) = parameters.partition(|(name, _)| name.ends_with(".bias") || name.contains("LayerNorm"));
    let params = ParamsAdamW { lr, ..Default::default() };
    let mut optimizer = AdamW::from_groups(vec![
        ParameterGroup { parameters: decayed, options: params.clone() },
        ParameterGroup { parameters: bare, options: ParamsAdamW { weight_decay: 0., ..params } },
    ])?;
    let total_steps = epochs * loader.num_batches().div_ceil(options.training.accumulate.get()) as u64;
    let schedule = LrScheduler::new(&mut optimizer, ParamsWarmupLinear { warmup: options.warmup, total_steps })?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let mut training = Training { varmap, optimizer, schedule, scaler, loader };
    let mut dropout = default_generator();
    let mut checkpointer = options.training.checkpointer(pg, 1)?;
    let mut epochs_done = 0;
    if let Some(checkpointer) = checkpointer.as_mut().filter(|_| options.training.resume) {
        epochs_done = checkpointer.load_latest((&mut training, ("dropout", &mut dropout)))?.unwrap_or(0);
    }
    require_rest("--epochs", epochs_done, epochs)?;

    let mut writer = options.training.writer(pg, epochs_done)?;
    let mut summary = Summary::new(pg, "sentences", ThroughputOptions::default())?;
    let mut validation_accuracy = 0.;
    for epoch in epochs_done + 1..=epochs {
        let batches = training.loader.num_batches();
        let mut progress = Progress::new(pg, format!("epoch {epoch}"), batches);
        let (mut loss_sum, mut trained) = (0., 0);
        for (index, batch) in training.loader.iter().enumerate() {
            let (ids, mask, labels) = batch?;
            let micro_batch = options.training.micro_batch(index, batches);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let logits = ddp.call(|bert| bert.forward(&ids, &ids.zeros_like()?, &mask, true))?;
            let loss = nn::cross_entropy(&logits.to_dtype(DType::F32)?, &labels)?;
            let mut grads = ddp.backward(&training.scaler.scale(&(&loss / micro_batch.count as f64)?)?)?;
            if micro_batch.is_last {
                training.optimizer.unscale(&mut training.scaler, &mut grads)?;
                training.optimizer.clip_grad_norm(&mut grads, options.clip)?;
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
                training.schedule.step(&mut training.optimizer)?;
            }
            let (loss, count) = (f64::from(loss.to_scalar::<f32>()?), labels.elem_count());
            loss_sum += loss * count as f64;
            trained += count;
            summary.step(count);
            progress.step(loss, &summary);
        }
        progress.finish();

        let [loss_sum, trained] = pg.all_reduce_scalars([loss_sum, trained as f64], ReduceOp::Sum)?;
        let train_loss = loss_sum / trained;
        validation_accuracy = summary.throughput.pause(|| accuracy(&ddp, validation_loader.iter()))?;
        if pg.rank() == 0 {
            println!("epoch {epoch:>2}: loss {train_loss:.4}, validation accuracy {:.2} %", 100. * validation_accuracy);
        }
        let parameter_hash = parameter_hash(&ddp)?.to_string();
        writer.write(&[
            ("epoch", epoch.into()),
            ("train_loss", train_loss.into()),
            ("validation_accuracy", validation_accuracy.into()),
            ("learning_rate", training.optimizer.learning_rate().into()),
            ("parameter_hash", parameter_hash.as_str().into()),
        ])?;
        if let Some(checkpointer) = &mut checkpointer {
            summary.throughput.pause(|| checkpointer.save(epoch, (&mut training, ("dropout", &mut dropout))))?;
        }
    }
    if let Some(mut checkpointer) = checkpointer {
        checkpointer.finish()?;
    }
    if let Some(folder) = &options.export {
        pretrained.export(pg, folder, &classes, &training.varmap)?;
    }

    let accuracy = format!("{:.2} % of {} classes", 100. * validation_accuracy, classes.len());
    summary.print(&ddp, &[("frozen", format!("{frozen} variables")), ("validation accuracy", accuracy)])?;
    require("--require-accuracy", options.require_accuracy, "the validation accuracy", validation_accuracy)
}
