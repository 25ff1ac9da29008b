//! Trains the GPT of `char_gpt` over a slow link: either gradients are averaged in every step (DDP, with a hook that compresses them), or
//! parameters every `--period` steps (DiLoCo), after `--warmup` steps of DDP; in fragments that travel during further steps, if `--fragments`
//! and `--delay` say so.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example diloco -- --warmup 250 --period 50
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example diloco -- --period 60 --fragments 3 --delay 5 --alpha 0.5
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example diloco -- --comm-hook bf16
//! ```
//!
//! At its end, it prints how long a step took on average, and the loss of text that was not trained on, which is the ranks' mean.
//!
//! ci: --steps 9 --period 4 --layers 1 --width 32 --context 32 --batch-size 4
//! ci: --steps 9 --period 4 --warmup 3 --fragments 2 --delay 1 --alpha 0.5 --layers 1 --width 32 --context 32 --batch-size 4
//! ci: --steps 3 --comm-hook int8 --layers 1 --width 32 --context 32 --batch-size 4
#[path = "../char_gpt/block.rs"]
mod block;
#[path = "../common"]
mod common {
    pub(crate) mod text;
}
#[path = "../digits/hook.rs"]
mod hook;
#[path = "../char_gpt/model.rs"]
mod model;
// Of these, `generate` uses the rest.
#[allow(dead_code)]
#[path = "../generate/plain.rs"]
mod plain;
#[path = "../char_gpt/text.rs"]
mod text;
#[allow(dead_code)]
#[path = "../generate/vocabulary.rs"]
mod vocabulary;

use candle_core::DType;
use candle_ddp::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions};
use candle_ddp::optim::{
    AdamW, Optimizer, ParamsAdamW, ParamsSgd, ParamsWarmupCosine, PeriodicModelAverager, WarmupCosine,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, nn};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use hook::Hook;
use model::Gpt;
use plain::Config;
use std::path::PathBuf;
use std::time::Instant;
use text::Text;

/// The steps of a longer run that are not timed: PowerSGD compresses after them.
const UNTIMED: u64 = 50;

/// Train a small GPT on several ranks with a slow link between them.
#[derive(Parser)]
struct Options {
    /// A text file, or a folder with .md files. [default: the documentation of candle-ddp]
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/docs"), hide_default_value = true)]
    data: PathBuf,
    /// The number of steps of the optimizer.
    #[arg(long, default_value_t = 501)]
    steps: u64,
    /// Average parameters whenever this many steps have been made, and not gradients.
    #[arg(long, value_name = "STEPS")]
    period: Option<u64>,
    /// The number of fragments that take turns in a period.
    #[arg(long, default_value_t = 1)]
    fragments: u64,
    /// The number of steps during which a fragment travels.
    #[arg(long, default_value_t = 0)]
    delay: u64,
    /// Average gradients in this many steps first, as DDP does.
    #[arg(long, value_name = "STEPS", default_value_t = 0, requires = "period")]
    warmup: u64,
    /// The local parameters' share in a fragment that arrives.
    #[arg(long, default_value_t = 0.)]
    alpha: f64,
    /// The learning rate of the outer step, which has Nesterov's momentum.
    #[arg(long, default_value_t = 0.7)]
    outer_lr: f64,
    /// The momentum of the outer step.
    #[arg(long, default_value_t = 0.9)]
    outer_momentum: f64,
    /// How gradients are compressed, without --period.
    #[arg(long, value_enum, default_value = "none", conflicts_with = "period")]
    comm_hook: Hook,
    /// The number of pieces of text per batch and rank.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// AdamW's highest learning rate.
    #[arg(long, default_value_t = 0.002)]
    lr: f64,
    /// The seed for the initial parameters and the order of the samples.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The number of characters that the model sees.
    #[arg(long, default_value_t = 128)]
    context: usize,
    /// The length of the vectors within the model, a multiple of 4.
    #[arg(long, default_value_t = 128)]
    width: usize,
    #[arg(long, default_value_t = 4)]
    layers: usize,
}

/// The model, which averages its gradients or only has this rank's.
enum Model {
    Ddp(DistributedDataParallel<Gpt>),
    Local(Gpt),
}

fn main() -> Result<()> {
    let options = Options::parse();
    candle_ddp::run(|pg| train(pg, &options))
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let (vocabulary, text, validation) = Text::read(&options.data, options.context)?;
    let Options { context, width, layers, .. } = *options;
    let config = Config { vocabulary: vocabulary.len(), context, width, heads: 4, layers };
    let varmap = VarMap::new();
    let params = ParamsAdamW { lr: options.lr, ..Default::default() };
    // All ranks begin with the same weights, also without a step of DDP: the mean of different ones would be too small.
    let ddp_options = DdpOptions { init_seed: Some(options.seed), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Gpt::new(config, vb), ddp_options)?;
    options.comm_hook.register(&ddp)?;
    let mut optimizer = AdamW::new(&ddp, params)?;
    let mut model = Model::Ddp(ddp);
    let averager = |period| {
        let (lr, momentum) = (options.outer_lr, options.outer_momentum);
        let outer = ParamsSgd { lr, momentum, nesterov: momentum > 0., ..Default::default() };
        let averager = PeriodicModelAverager::new(pg, period, options.warmup, outer)?;
        averager.streaming(options.fragments, options.delay, options.alpha)
    };
    let mut averager = options.period.map(averager).transpose()?;
    let schedule = ParamsWarmupCosine {
        warmup_steps: 50.min(options.steps.saturating_sub(1)),
        total_steps: options.steps,
        start_factor: 0.1,
        eta_min: 0.1 * options.lr,
    };
    let mut schedule = WarmupCosine::new(&mut optimizer, schedule)?;

    let sampler = SamplerOptions { seed: options.seed, ..Default::default() };
    let loader_options =
        LoaderOptions { batch_size: options.batch_size, drop_last: true, sampler, ..Default::default() };
    let loader = DataLoader::with_collate(0..text.len(), pg, loader_options, move |windows| text.batch(&windows))?;
    let (mut step, mut begun) = (0, Instant::now());
    while step < options.steps {
        for batch in loader.iter().take((options.steps - step) as usize) {
            let (x, y) = batch?;
            if averager.is_some() && step == options.warmup {
                // From the same variables: the parameters of DDP's model are copies, whose gradients belong to all ranks.
                model = Model::Local(Gpt::new(config, VarBuilder::from_varmap(&varmap, DType::F32, pg.device()))?);
            }
            let gradients = match &model {
                Model::Ddp(ddp) => ddp.backward(&ddp.call(|gpt| gpt.loss(&x, &y))?)?,
                Model::Local(gpt) => gpt.loss(&x, &y)?.backward()?,
            };
            optimizer.step(&gradients)?;
            if let Some(averager) = &mut averager {
                averager.average_parameters(&varmap)?;
            }
            schedule.step(&mut optimizer)?;
            step += 1;
            if step == if options.steps > UNTIMED { UNTIMED } else { 1 } {
                pg.barrier()?;
                begun = Instant::now();
            }
        }
    }
    pg.barrier()?;
    let timed = if options.steps > UNTIMED { options.steps - UNTIMED } else { options.steps.max(2) - 1 };
    let seconds = begun.elapsed().as_secs_f64() / timed as f64;

    let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let loader_options = LoaderOptions { batch_size: options.batch_size, sampler, ..Default::default() };
    let windows = 0..validation.len();
    let loader = DataLoader::with_collate(windows, pg, loader_options, move |windows| validation.batch(&windows))?;
    let (mut sum, mut count) = (0., 0.);
    for batch in &loader {
        let (x, y) = batch?;
        let loss = nn::no_grad(|| match &model {
            Model::Ddp(ddp) => ddp.call(|gpt| gpt.loss(&x, &y)),
            Model::Local(gpt) => Ok(gpt.loss(&x, &y)?),
        })?;
        sum += f64::from(loss.to_scalar::<f32>()?) * y.elem_count() as f64;
        count += y.elem_count() as f64;
    }
    let [sum, count] = pg.all_reduce_scalars([sum, count], ReduceOp::Sum)?;
    if pg.rank() == 0 {
        println!("{:.1} ms per step, validation loss {:.4} per character", 1e3 * seconds, sum / count);
    }
    Ok(())
}
