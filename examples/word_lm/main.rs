//! Trains an LSTM or a GRU to predict the next word of a text, as PyTorch's example `word_language_model` does:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example word_lm
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example word_lm -- --data wiki.train.tokens --emsize 650 --nhid 650 --tied
//! ```
//!
//! The text is cut into columns, of which each rank reads its own from the start to the end. The state after some words, without its
//! graph, is the one before the next words (truncated backpropagation through time).
//!
//! ci: --batch-size 6 --epochs 1 --emsize 16 --nhid 16 --tied
//! ci: --batch-size 6 --epochs 1 --emsize 16 --nhid 12 --model gru --nlayers 1
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod model;

use candle_core::Tensor;
use candle_ddp::amp::GradScaler;
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::metrics::ThroughputOptions;
use candle_ddp::optim::{Optimizer, ParamsReduceLrOnPlateau, ParamsSgd, ReduceLrOnPlateau, Sgd, Threshold};
use candle_ddp::seed::{Generator, default_generator, seed_everything};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result, nn};
use candle_nn::VarMap;
use clap::Parser;
use common::options::{TrainOptions, require_rest};
use common::progress::Progress;
use common::summary::{Summary, parameter_hash};
use common::text::read_text;
use corpus::{Columns, Corpus};
use model::{Config, Kind, WordLm};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// Train a recurrent language model of words with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// A text file, or a folder with .md files. [default: the documentation of candle-ddp]
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/docs"), hide_default_value = true)]
    data: PathBuf,
    #[arg(long, value_enum, default_value = "lstm")]
    model: Kind,
    /// The length of the words' vectors.
    #[arg(long, default_value_t = 200)]
    emsize: usize,
    /// The length of each layer's state.
    #[arg(long, default_value_t = 200)]
    nhid: usize,
    #[arg(long, default_value_t = 2)]
    nlayers: usize,
    /// The initial learning rate. It falls to a quarter after each epoch that does not improve the validation loss.
    #[arg(long, default_value_t = 20.)]
    lr: f64,
    /// The L2 norm to which the gradients are clipped.
    #[arg(long, default_value_t = 0.25)]
    clip: f64,
    #[arg(long, default_value_t = 6)]
    epochs: u64,
    /// The number of columns on all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 20)]
    batch_size: usize,
    /// The number of words of each column in a step.
    #[arg(long, default_value_t = 35)]
    bptt: usize,
    #[arg(long, default_value_t = 0.2)]
    dropout: f32,
    /// Use the words' vectors as the weights of the last layer, too. --emsize must be --nhid.
    #[arg(long)]
    tied: bool,
    #[command(flatten)]
    training: TrainOptions,
}

/// What training changes, which is what a checkpoint holds. Each epoch begins with a state of zeros.
struct Training {
    varmap: VarMap,
    optimizer: Sgd,
    schedule: ReduceLrOnPlateau,
    scaler: GradScaler,
    dropout: Arc<Mutex<Generator>>,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, scaler, dropout } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("schedule", schedule),
            ("scaler", scaler),
            ("dropout", dropout),
        ]
    }
}

fn main() -> ExitCode {
    common::main(train)
}

fn check(options: &Options, world_size: usize) -> Result<()> {
    let Options { batch_size, bptt, emsize, nhid, tied, .. } = *options;
    let invalid = |argument, reason| Err(Error::InvalidArgument { argument, reason });
    if batch_size == 0 || batch_size % world_size > 0 {
        let reason = format!("it must be a multiple of the number of ranks, {world_size}, not {batch_size}");
        return invalid("--batch-size", reason);
    }
    if bptt == 0 {
        return invalid("--bptt", "it must be at least 1".to_string());
    }
    if tied && emsize != nhid {
        return invalid("--tied", format!("--emsize must be --nhid, but they are {emsize} and {nhid}"));
    }
    Ok(())
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    check(options, pg.world_size())?;
    let Options { model: kind, emsize, nhid, nlayers, dropout, tied, .. } = *options;
    let corpus = Corpus::of(&read_text(&options.data)?);
    let place = (pg.rank(), pg.world_size());
    let columns = |words: &[u32]| Columns::new(words, options.batch_size, options.bptt, place);
    let (train, validation) = (columns(&corpus.train)?, columns(&corpus.validation)?);

    let config = Config { kind, vocabulary: corpus.vocabulary, emsize, nhid, nlayers, dropout, tied };
    let varmap = VarMap::new();
    let ddp_options = options.training.ddp_options();
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| WordLm::new(config, vb), ddp_options)?;
    // From here on each rank draws its own masks for dropout.
    seed_everything(pg.device(), options.training.seed, pg.rank())?;
    let optimizer = Sgd::new(&ddp, ParamsSgd { lr: options.lr, ..Default::default() })?;
    let threshold = Threshold::Relative(0.);
    let params = ParamsReduceLrOnPlateau { factor: 0.25, patience: 0, threshold, ..Default::default() };
    let schedule = ReduceLrOnPlateau::new(params)?;
    let scaler = options.training.grad_scaler(&ddp)?;
    let mut training = Training { varmap, optimizer, schedule, scaler, dropout: default_generator() };

    let mut checkpointer = options.training.checkpointer(pg, 1)?;
    let mut epochs_done = 0;
    if let Some(checkpointer) = checkpointer.as_mut().filter(|_| options.training.resume) {
        epochs_done = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    }
    require_rest("--epochs", epochs_done, options.epochs)?;

    let mut writer = options.training.writer(pg, epochs_done)?;
    let mut summary = Summary::new(pg, "words", ThroughputOptions::default())?;
    let mut perplexity = f64::NAN;
    for epoch in epochs_done + 1..=options.epochs {
        let batches = train.batches();
        let count = batches.len();
        let mut progress = Progress::new(pg, format!("epoch {epoch}"), count);
        let (mut state, mut losses, mut seen) = (None::<Vec<Tensor>>, 0., 0);
        for (index, batch) in batches.enumerate() {
            let (words, next) = batch?;
            let micro_batch = options.training.micro_batch(index, count);
            // The gradients of all but the last batch of a step are only added up.
            let _guard = ddp.sync_if(micro_batch.is_last);
            let (loss, last) = ddp.call(|net| net.loss(&words, &next, state.as_deref(), true))?;
            state = Some(last.iter().map(Tensor::detach).collect());
            let mut grads = ddp.backward(&training.scaler.scale(&(&loss / micro_batch.count as f64)?)?)?;
            if micro_batch.is_last {
                training.optimizer.unscale(&mut training.scaler, &mut grads)?;
                training.optimizer.clip_grad_norm(&mut grads, options.clip)?;
                ddp.phase("optimizer", || training.scaler.step(&mut training.optimizer, &mut grads))?;
                training.scaler.update()?;
            }
            let (loss, trained) = (f64::from(loss.to_scalar::<f32>()?), next.elem_count());
            losses += loss * trained as f64;
            seen += trained;
            summary.step(trained);
            progress.step(loss, &summary);
        }
        progress.finish();
        let train_loss = mean(pg, losses, seen)?;
        let validation_loss = summary.throughput.pause(|| validate(&ddp, &validation))?;
        perplexity = validation_loss.exp();
        if pg.rank() == 0 {
            println!(
                "epoch {epoch:>2}: loss {train_loss:.4}, validation loss {validation_loss:.4}, perplexity {perplexity:.2}"
            );
        }
        let parameter_hash = parameter_hash(&ddp)?.to_string();
        writer.write(&[
            ("epoch", epoch.into()),
            ("train_loss", train_loss.into()),
            ("validation_loss", validation_loss.into()),
            ("learning_rate", training.optimizer.learning_rate().into()),
            ("parameter_hash", parameter_hash.as_str().into()),
        ])?;
        let is_best = !training.schedule.step(&mut training.optimizer, validation_loss)?;
        if let Some(checkpointer) = &mut checkpointer {
            summary.throughput.pause(|| match is_best {
                true => checkpointer.save_best(epoch, &mut training),
                false => checkpointer.save(epoch, &mut training),
            })?;
        }
    }
    if let Some(mut checkpointer) = checkpointer {
        checkpointer.finish()?;
    }
    summary.print(&ddp, &[("perplexity", format!("{perplexity:.2} of {} words", corpus.vocabulary))])
}

/// Returns the mean loss over the words of all ranks.
fn validate(ddp: &DistributedDataParallel<WordLm>, columns: &Columns) -> Result<f64> {
    let (mut state, mut losses, mut seen) = (None::<Vec<Tensor>>, 0., 0);
    for batch in columns.batches() {
        let (words, next) = batch?;
        let (loss, last) = nn::no_grad(|| ddp.call(|net| net.loss(&words, &next, state.as_deref(), false)))?;
        losses += f64::from(loss.to_scalar::<f32>()?) * next.elem_count() as f64;
        seen += next.elem_count();
        state = Some(last);
    }
    mean(ddp.process_group(), losses, seen)
}

fn mean(pg: &ProcessGroup, sum: f64, count: usize) -> Result<f64> {
    let [sum, count] = pg.all_reduce_scalars([sum, count as f64], ReduceOp::Sum)?;
    Ok(sum / count)
}
