//! The training of `digits`, which continues when a rank is killed:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 4 --max-restarts 5 --example elastic
//! ```
//!
//! ci: --require-accuracy 0.97
#[path = "../common/mod.rs"]
mod common;
#[path = "../digits/dataset.rs"]
mod dataset;
#[path = "../digits/net.rs"]
mod net;

use candle_core::{DType, Device};
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_ddp::data::{DataLoader, Dataset, LoaderOptions, LoaderState, Remainder, SamplerOptions};
use candle_ddp::elastic::{self, ElasticOptions, State};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsWarmupCosine, WarmupCosine};
use candle_ddp::seed::var_builder;
use candle_ddp::{Backend, Context, DistributedDataParallel, InitOptions, ProcessGroup, Result, nn};
use candle_nn::VarMap;
use clap::Parser;
use common::accuracy::accuracy;
use common::summary::{parameter_hash, require};
use dataset::{Digits, digits};
use net::Net;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Train a convolutional network on 8×8 handwritten digits, also when ranks are killed.
#[derive(Parser)]
struct Options {
    /// The number of passes over the training images.
    #[arg(long, default_value_t = 25)]
    epochs: u64,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// AdamW's highest learning rate.
    #[arg(long, default_value_t = 0.005)]
    learning_rate: f64,
    /// The seed for the initial parameters and the order of the images.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The smallest number of ranks with which training continues. [default: all]
    #[arg(long)]
    min_world_size: Option<usize>,
    /// Append one JSON object per event to this file, one per line (on rank 0).
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
    /// Seconds to wait after each step, to have the time to kill a rank.
    #[arg(long, default_value_t = 0.)]
    pause: f64,
    /// Seconds to wait for ranks, and for a collective.
    #[arg(long, default_value_t = 600.)]
    timeout: f64,
    /// Write the state to this file after each epoch (on rank 0), and begin with its contents.
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// Fail unless the test accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
}

/// The state that must be the same on all ranks.
struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    schedule: WarmupCosine,
    progress: LoaderState,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![
            ("model", &mut self.varmap),
            ("optimizer", &mut self.optimizer),
            ("schedule", &mut self.schedule),
            ("progress", &mut self.progress),
        ]
    }
}

impl Training {
    /// `samples` is the length of the dataset.
    fn new(options: &Options, samples: usize) -> Result<Self> {
        let varmap = VarMap::new();
        // The model that DDP builds later finds these variables.
        Net::new(var_builder(&varmap, options.seed, DType::F32, &Device::Cpu))?;
        let params = ParamsAdamW { lr: options.learning_rate, ..Default::default() };
        let mut optimizer = AdamW::new(&varmap, params)?;
        let total_steps = options.epochs.max(1);
        let schedule = WarmupCosine::new(
            &mut optimizer,
            ParamsWarmupCosine { warmup_steps: 0, total_steps, start_factor: 0., eta_min: options.learning_rate / 10. },
        )?;
        let progress = LoaderState { seed: options.seed, dataset_len: samples, ..Default::default() };
        Ok(Self { varmap, optimizer, schedule, progress })
    }
}

fn main() -> ExitCode {
    common::exit_code(run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let data = digits(&Device::Cpu)?;
    let mut state = State::new(Training::new(options, data.0.len())?);
    if let Some(path) = options.checkpoint.as_ref().filter(|path| path.exists()) {
        state.load(path)?;
    }
    let timeout = Duration::from_secs_f64(options.timeout);
    let elastic_options = ElasticOptions {
        init: InitOptions { backend: Backend::Cpu, timeout, ..Default::default() },
        min_world_size: options.min_world_size,
        ..Default::default()
    };
    elastic::run(elastic_options, &mut state, |pg, state| train(pg, state, options, &data))
}

fn train(
    pg: &ProcessGroup,
    state: &mut State<Training>,
    options: &Options,
    (train, test): &(Digits, Digits),
) -> Result<()> {
    report(options, pg, "begin", state)?;
    let ddp = DistributedDataParallel::new(pg, &state.varmap, |vb| Net::new(vb))?;
    let loader_options = LoaderOptions { batch_size: options.batch_size, ..Default::default() };
    let mut loader = DataLoader::new(train.clone(), pg, loader_options)?;
    // The rest of the epoch is dealt out to the present ranks.
    loader.resume(state.progress)?;

    while loader.current_epoch() < options.epochs {
        for batch in &loader {
            let (images, labels) = batch?;
            let loss = nn::cross_entropy(&ddp.forward_t(&images, true)?, &labels)?;
            let gradients = ddp.backward(&loss)?;
            state.optimizer.step(&gradients)?;
            state.progress = loader.state();
            state.commit()?;
            report(options, pg, "commit", state)?;
            std::thread::sleep(Duration::from_secs_f64(options.pause));
        }
        let Training { optimizer, schedule, progress, .. } = &mut **state;
        schedule.step(optimizer)?;
        *progress = loader.state();
        if let Some(path) = options.checkpoint.as_ref().filter(|_| pg.rank() == 0) {
            state.save(path)?;
        }
    }

    let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let test_loader = DataLoader::new(test.clone(), pg, LoaderOptions { sampler, ..loader_options })?;
    let accuracy = accuracy(&ddp, &test_loader)?;
    let hash = parameter_hash(&ddp)?;
    if pg.rank() == 0 {
        println!("test accuracy {:.2} %, {} steps, parameters {hash}", 100. * accuracy, state.commits());
    }
    require("--require-accuracy", options.require_accuracy, "the test accuracy", accuracy)
}

/// Appends an event to the file, with the time and the process of rank 0.
fn report(options: &Options, pg: &ProcessGroup, event: &str, state: &State<Training>) -> Result<()> {
    let Some(path) = options.events.as_ref().filter(|_| pg.rank() == 0) else { return Ok(()) };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0., |since| since.as_secs_f64());
    let LoaderState { epoch, consumed, .. } = state.progress;
    let line = serde_json::json!({
        "event": event,
        "time": time,
        "world_size": pg.world_size(),
        "commits": state.commits(),
        "epoch": epoch,
        "samples": consumed,
    });
    let file = File::options().create(true).append(true).open(path);
    file.and_then(|mut file| writeln!(file, "{line}")).with_context(|| format!("cannot write to {}", path.display()))
}
