//! Trains a small GPT on a text, character by character, on all ranks that the launcher starts; then it writes some text:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example char_gpt
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example char_gpt -- --data shakespeare.txt --steps 5000
//! cargo run --release --bin ddprun -- --features nccl --nproc-per-node 1 --example char_gpt -- --amp bf16 --peak-flops 989.4e12
//! ```
//!
//! ci: --steps 3 --layers 1 --width 32 --context 32 --batch-size 4 --accumulate 2 --amp bf16 --export target/char_gpt
//! ci: --steps 3 --layers 2 --width 32 --context 32 --batch-size 4 --shard --peak-flops 1e12
mod block;
#[path = "../common/mod.rs"]
mod common;
mod model;
#[path = "../generate/plain.rs"]
mod plain;
#[path = "../generate/sample.rs"]
mod sample;
mod text;
#[path = "../generate/vocabulary.rs"]
mod vocabulary;

use candle_core::{DType, Tensor};
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::metrics::{ThroughputOptions, TransformerFlops};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsWarmupCosine, WarmupCosine};
use candle_ddp::{
    Context, DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Sharding, checkpoint, nn,
};
use candle_nn::{VarBuilder, VarMap};
use clap::{ArgAction, Parser};
use common::hash;
use common::options::{TrainOptions, require_rest};
use common::progress::Progress;
use common::summary::{Summary, parameters};
use common::training::Training;
use model::Gpt;
use plain::Config;
use sample::Sampling;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use text::Text;
use vocabulary::Vocabulary;

/// Train a small GPT on a text with DistributedDataParallel, ZeRO-2, gradient clipping and a cosine schedule.
#[derive(Parser)]
struct Options {
    /// A text file, or a folder with .md files. [default: the documentation of candle-ddp]
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/docs"), hide_default_value = true)]
    data: PathBuf,
    /// The number of steps of the optimizer.
    #[arg(long, default_value_t = 500)]
    steps: u64,
    /// The number of pieces of text per batch and rank.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// AdamW's highest learning rate.
    #[arg(long, default_value_t = 0.002)]
    lr: f64,
    /// The number of steps until the learning rate is highest; then it falls along half a cosine to a tenth.
    #[arg(long, default_value_t = 50)]
    warmup: u64,
    /// The L2 norm to which the gradients are clipped.
    #[arg(long, default_value_t = 1.)]
    clip: f64,
    /// Shard the optimizer state over the ranks (ZeRO-2).
    #[arg(long, default_value_t = true, action = ArgAction::Set)]
    zero: bool,
    /// Spread the whole model over the ranks, block by block (ZeRO-3, FSDP).
    #[arg(long)]
    shard: bool,
    /// The number of characters that the model sees.
    #[arg(long, default_value_t = 128)]
    context: usize,
    /// The length of the vectors within the model, a multiple of --heads.
    #[arg(long, default_value_t = 128)]
    width: usize,
    #[arg(long, default_value_t = 4)]
    heads: usize,
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Show the model FLOPs utilization (MFU) for a device with this peak, in dense operations of the dtype per second.
    #[arg(long, value_name = "FLOPS")]
    peak_flops: Option<f64>,
    /// Save a checkpoint whenever this many steps have been made.
    #[arg(long, default_value_t = 100, value_name = "STEPS")]
    checkpoint_every: u64,
    /// Write the initial weights to this file.
    #[arg(long, value_name = "FILE")]
    export_init: Option<PathBuf>,
    /// Write the trained model to this folder, for the example `generate`.
    #[arg(long, value_name = "FOLDER")]
    export: Option<PathBuf>,
    #[command(flatten)]
    training: TrainOptions,
}

fn main() -> ExitCode {
    common::main(train)
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let (vocabulary, text, validation) = Text::read(&options.data, options.context)?;
    let Options { context, width, heads, layers, .. } = *options;
    let config = Config { vocabulary: vocabulary.len(), context, width, heads, layers };
    let varmap = VarMap::new();
    let sharding = match (options.shard, options.zero) {
        (true, _) => Sharding::Blocks { reshard_after_forward: true, ranks: None },
        (false, true) => Sharding::Optimizer { ranks: None },
        (false, false) => Sharding::Off,
    };
    let ddp_options = DdpOptions { sharding, ..options.training.ddp_options() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Gpt::new(config, vb), ddp_options)?;
    if let Some(path) = &options.export_init {
        checkpoint::save_distributed(pg, &varmap, path)?;
    }

    let params = ParamsAdamW { lr: options.lr, ..Default::default() };
    let mut optimizer = AdamW::new(&ddp, params)?;
    let memory = ddp.memory_estimate(&optimizer)?;
    if pg.rank() == 0 {
        println!("{memory}\n");
    }
    let schedule = ParamsWarmupCosine {
        warmup_steps: options.warmup.min(options.steps.saturating_sub(1)),
        total_steps: options.steps,
        start_factor: 0.1,
        eta_min: 0.1 * options.lr,
    };
    let schedule = WarmupCosine::new(&mut optimizer, schedule)?;
    let scaler = options.training.grad_scaler(&ddp)?;

    let sampler = SamplerOptions { seed: options.training.seed, ..Default::default() };
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, drop_last: true, sampler, ..Default::default() };
    let windows = 0..text.len();
    let loader = DataLoader::with_collate(windows, pg, loader_options, move |windows| text.batch(&windows))?;
    // The ranks gather blocks together, so that all must have equally many batches; then some windows count twice.
    let remainder = if options.shard { Remainder::Pad } else { Remainder::Uneven };
    let sampler = SamplerOptions { shuffle: false, remainder, ..Default::default() };
    let loader_options = LoaderOptions { batch_size: options.batch_size, sampler, ..Default::default() };
    let windows = 0..validation.len();
    let validation_loader =
        DataLoader::with_collate(windows, pg, loader_options, move |windows| validation.batch(&windows))?;

    let mut training = Training { varmap, optimizer, schedule, scaler, loader };
    let mut checkpointer = options.training.checkpointer(pg, options.checkpoint_every)?;
    let mut step = 0;
    if let Some(checkpointer) = checkpointer.as_mut().filter(|_| options.training.resume) {
        step = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    }

    require_rest("--steps", step, options.steps)?;

    let mut writer = options.training.writer(pg, step)?;
    let mut progress = Progress::new(pg, "steps".to_string(), options.steps.saturating_sub(step) as usize);
    // Positions are only looked up. The embedding's weights are the head's as well.
    let parameters = parameters(&ddp)? - context * width;
    let flops = TransformerFlops { parameters, layers, heads, head_dim: width / heads, context, ..Default::default() }
        .per_token();
    let throughput =
        ThroughputOptions { flops_per_unit: Some(flops), peak_flops: options.peak_flops, ..Default::default() };
    let mut summary = Summary::new(pg, "characters", throughput)?;
    while step < options.steps {
        let batches = training.loader.iter();
        let count = batches.len();
        let (mut loss_sum, mut seen) = (0., 0);
        for (index, batch) in batches.enumerate() {
            let (x, y) = batch?;
            let micro_batch = options.training.micro_batch(index, count);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let loss = (ddp.call(|gpt| gpt.loss(&x, &y))? / micro_batch.count as f64)?;
            let mut grads = ddp.backward(&training.scaler.scale(&loss)?)?;
            loss_sum += f64::from(loss.to_scalar::<f32>()?);
            seen += y.elem_count();
            if !micro_batch.is_last {
                continue;
            }
            training.optimizer.unscale(&mut training.scaler, &mut grads)?;
            let grad_norm = training.optimizer.clip_grad_norm(&mut grads, options.clip)?;
            ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
            training.scaler.update()?;
            step += 1;

            let [loss] = pg.all_reduce_scalars([std::mem::take(&mut loss_sum)], ReduceOp::Avg)?;
            summary.step(std::mem::take(&mut seen));
            progress.step(loss, &summary);
            let rate = summary.throughput.rate();
            let mut fields = vec![
                ("step", step.into()),
                ("loss", loss.into()),
                ("learning_rate", training.optimizer.learning_rate().into()),
                ("grad_norm", grad_norm.to_scalar::<f64>()?.into()),
                ("seconds", summary.seconds().into()),
                ("characters_per_second", rate.units_per_second.into()),
            ];
            fields.extend(rate.mfu.map(|mfu| ("mfu", mfu.into())));
            writer.write(&fields)?;
            training.schedule.step(&mut training.optimizer)?;
            if let Some(checkpointer) = &mut checkpointer {
                summary.throughput.pause(|| checkpointer.save_if_due(step, &mut training))?;
            }
            if step == options.steps {
                break;
            }
        }
    }
    progress.finish();
    if let Some(mut checkpointer) = checkpointer {
        checkpointer.finish()?;
    }

    let loss = validate(&ddp, &validation_loader)?;
    summary.print(&ddp, &[("validation loss", format!("{loss:.4} per character"))])?;
    let parameter_hash = common::summary::parameter_hash(&ddp)?.to_string();
    writer.write(&[
        ("step", step.into()),
        ("validation_loss", loss.into()),
        ("parameter_hash", parameter_hash.as_str().into()),
    ])?;
    if let Some(folder) = &options.export {
        export(pg, folder, &config, &vocabulary, &training.varmap)?;
    }
    // A sharded model is exported, for the example `generate`.
    if pg.rank() == 0 && !options.shard { write_text(pg, config, &vocabulary, &training.varmap) } else { Ok(()) }
}

/// Returns the mean loss over the windows of all ranks.
fn validate(ddp: &DistributedDataParallel<Gpt>, loader: &DataLoader<Range<usize>, (Tensor, Tensor)>) -> Result<f64> {
    let (mut sum, mut count) = (0., 0.);
    for batch in loader {
        let (x, y) = batch?;
        let loss = nn::no_grad(|| ddp.call(|gpt| gpt.loss(&x, &y)))?;
        sum += f64::from(loss.to_scalar::<f32>()?) * y.elem_count() as f64;
        count += y.elem_count() as f64;
    }
    let [sum, count] = ddp.process_group().all_reduce_scalars([sum, count], ReduceOp::Sum)?;
    Ok(sum / count)
}

/// Writes the files that `generate` reads.
fn export(pg: &ProcessGroup, folder: &Path, config: &Config, vocabulary: &Vocabulary, varmap: &VarMap) -> Result<()> {
    if pg.rank() == 0 {
        let config = serde_json::json!({
            "vocabulary": vocabulary.to_string(),
            "context": config.context,
            "width": config.width,
            "heads": config.heads,
            "layers": config.layers,
        });
        let writing = || format!("writing to {}", folder.display());
        std::fs::create_dir_all(folder).with_context(writing)?;
        std::fs::write(folder.join("config.json"), format!("{config:#}\n")).with_context(writing)?;
    }
    checkpoint::save_distributed(pg, varmap, folder.join("model.safetensors"))
}

/// Prints text that the model draws. This is how a program uses the model that knows candle alone, such as `generate`, and
/// with the same seed both print the same.
fn write_text(pg: &ProcessGroup, config: Config, vocabulary: &Vocabulary, varmap: &VarMap) -> Result<()> {
    let gpt = plain::Gpt::new(config, VarBuilder::from_varmap(varmap, DType::F32, pg.device()))?;
    let sampling = Sampling { length: 300, temperature: 0.8, seed: 0 };
    let (text, logits) = sampling.run(&gpt, vocabulary, "\n", pg.device())?;
    println!("{text}\nlogits {logits}");
    Ok(())
}
