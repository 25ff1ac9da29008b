//! The training loop.
use crate::data::{Loading, TokenBatch, Tokens};
use crate::measure::{compare, measure};
use crate::model::{Model, is_bare, is_embedding};
use crate::options::{Kind, Options, Shard};
use crate::parquet::text;
use crate::sample::draw;
use candle_core::DType;
use candle_core::backprop::GradStore;
use candle_ddp::amp::Autocast;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, Parts, StateDict};
use candle_ddp::data::DataLoader;
use candle_ddp::metrics::{Throughput, ThroughputOptions, Writer, WriterOptions};
use candle_ddp::optim::{
    AdamW, AdjustLr, Muon, OnOtherLength, Optimizer, ParameterGroup, ParamsAdamW, ParamsMuon, ParamsWarmupCosine,
    WarmupCosine,
};
use candle_ddp::{
    Backward, DdpOptions, DistributedDataParallel, Precision, ProcessGroup, ReduceOp, Result, Sharding, backward_with,
    nn,
};
use candle_nn::VarMap;
use std::path::PathBuf;

type Loader = DataLoader<Tokens, TokenBatch>;

/// The state that training changes and that a checkpoint holds.
struct Training<O> {
    varmap: VarMap,
    optimizer: O,
    schedule: WarmupCosine,
    loader: Loader,
}

impl<O: StateDict> Parts for Training<O> {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, loader } = self;
        vec![("model", varmap), ("optimizer", optimizer), ("schedule", schedule), ("loader", loader)]
    }
}

/// Trains until `options.steps` steps have been made, or until a signal asks the run to stop. Before each step, `on_step` gets the step's
/// number, from 1 on, and the samples of this rank; its error ends the run. Returns the last validation loss per token, if there was an
/// evaluation.
///
/// # Errors
/// Errors of the options, the files, the group, and of `on_step`.
pub fn train(
    pg: &ProcessGroup,
    options: &Options,
    on_step: impl FnMut(u64, &[usize]) -> Result<()>,
) -> Result<Option<f64>> {
    options.config.check()?;
    let varmap = VarMap::new();
    let sharding = match options.shard {
        Shard::Off => Sharding::Off,
        Shard::Optimizer => Sharding::Optimizer { ranks: None },
        Shard::Blocks => Sharding::Blocks { reshard_after_forward: true, ranks: None },
    };
    let precision = match options.autocast {
        true => Precision::Autocast(Autocast::Lists(DType::BF16)),
        false => Precision::default(),
    };
    let ddp_options = DdpOptions { init_seed: Some(options.seed), sharding, precision, ..Default::default() };
    let config = options.config;
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| Model::new(config, vb), ddp_options)?;

    let Options { lr, weight_decay, .. } = *options;
    let bare = ParamsAdamW { lr, beta2: 0.95, weight_decay: 0., ..Default::default() };
    match options.optimizer {
        Kind::AdamW => {
            let (decayed, others) = ddp.named_parameters().into_iter().partition(|(name, _)| !is_bare(name));
            let optimizer = AdamW::from_groups(vec![
                ParameterGroup { parameters: decayed, options: ParamsAdamW { weight_decay, ..bare.clone() } },
                ParameterGroup { parameters: others, options: bare },
            ])?;
            steps(pg, options, (varmap, ddp), optimizer, on_step)
        }
        Kind::Muon => {
            let muon = ParamsMuon { lr, weight_decay, adjust_lr: AdjustLr::MatchRmsAdamw, ..Default::default() };
            let optimizer = Muon::with_adamw(&ddp, muon, bare, is_embedding)?;
            steps(pg, options, (varmap, ddp), optimizer, on_step)
        }
    }
}

fn steps<O: Optimizer>(
    pg: &ProcessGroup,
    options: &Options,
    (varmap, ddp): (VarMap, DistributedDataParallel<Model>),
    mut optimizer: O,
    mut on_step: impl FnMut(u64, &[usize]) -> Result<()>,
) -> Result<Option<f64>> {
    let is_first = pg.rank() == 0;
    let loading = Loading {
        batch_size: options.batch_size.get(),
        context: options.config.context,
        workers: options.workers,
        seed: options.seed,
        is_training: true,
        is_in_step: options.shard == Shard::Blocks,
    };
    let open = |argument, paths: &[PathBuf]| {
        let files = options.column().files(pg, paths, options.format, options.cache.as_deref())?;
        Tokens::open(argument, &files, options.cut())
    };
    let tokens = open("--data", &options.data)?;
    if is_first {
        println!("{} tokens in {} files", tokens.count(), options.data.len());
    }
    let loader = tokens.loader(pg, loading)?;
    // With another loader, so that the training's loader keeps its position.
    let reading = match options.measure_data {
        Some(batches) => Some(measure(pg, &open("--data", &options.data)?.loader(pg, loading)?, batches.get())?),
        None => None,
    };
    let validation = match options.validation.is_empty() {
        true => None,
        false => {
            let tokens = open("--validation", &options.validation)?;
            Some(tokens.loader(pg, Loading { is_training: false, ..loading })?)
        }
    };
    let schedule = ParamsWarmupCosine {
        warmup_steps: options.warmup.min(options.steps.saturating_sub(1)),
        total_steps: options.steps,
        start_factor: 0.1,
        eta_min: 0.1 * options.lr,
    };
    // With another number of --steps, a resumed run trains longer, or less long.
    let schedule = WarmupCosine::new(&mut optimizer, schedule)?.on_other_length(OnOtherLength::New);
    let mut training = Training { varmap, optimizer, schedule, loader };

    let checkpointing = CheckpointerOptions { every: options.checkpoint_every, resume: true, ..Default::default() };
    let folder = options.checkpoints.as_ref();
    let mut checkpointer = folder.map(|folder| Checkpointer::new(pg, folder, checkpointing)).transpose()?;
    let mut step = match &mut checkpointer {
        Some(checkpointer) => checkpointer.load_latest(&mut training)?.unwrap_or(0),
        None => 0,
    };
    if is_first && step > 0 {
        println!("continuing after step {step}");
    }
    let purge_step = if step > 0 { step + 1 } else { 0 };
    let writing = WriterOptions { log_dir: options.log_dir.clone(), purge_step, ..Default::default() };
    let mut writer = Writer::new(pg, writing)?;
    let mut throughput = Throughput::new(pg, ThroughputOptions::default())?;
    let mut last = None;

    while step < options.steps {
        let epoch = training.loader.current_epoch();
        let mut batches = training.loader.epoch(epoch).with_indices();
        while step < options.steps {
            // The last step of an epoch may have fewer batches.
            let batches = batches.by_ref().take(options.accumulate.get()).collect::<Result<Vec<_>>>()?;
            if batches.is_empty() {
                break;
            }
            let indices: Vec<usize> = batches.iter().flat_map(|(indices, _)| indices).copied().collect();
            on_step(step + 1, &indices)?;
            let tokens: usize = batches.iter().map(|(_, batch)| batch.count()).sum();
            let (mut grads, loss) = gradients(&ddp, &batches)?;
            let norm = training.optimizer.clip_grad_norm(&mut grads, options.clip)?;
            ddp.phase("optimizer", || training.optimizer.step(&grads))?;
            step += 1;
            throughput.step(tokens);

            let [loss, count] = pg.all_reduce_scalars([loss, tokens as f64], ReduceOp::Sum)?;
            let (loss, rate) = (loss / count, throughput.rate().units_per_second);
            writer.write(&[
                ("step", step.into()),
                ("loss", loss.into()),
                ("learning_rate", training.optimizer.learning_rate().into()),
                ("grad_norm", norm.to_scalar::<f64>()?.into()),
                ("tokens_per_second", rate.into()),
            ])?;
            if is_first && step.is_multiple_of(options.print_every.get() as u64) {
                println!("step {step}, epoch {epoch}: loss {loss:.4}, {rate:.0} tokens/s");
            }
            training.schedule.step(&mut training.optimizer)?;
            let is_due = step.is_multiple_of(options.evaluate_every.get() as u64) || step == options.steps;
            if is_due {
                last = throughput.pause(|| evaluate(&ddp, options, validation.as_ref(), step, &mut writer))?;
            }
            if let Some(checkpointer) = &mut checkpointer {
                // Also when a signal asks the run to stop.
                throughput.pause(|| match step == options.steps {
                    true => checkpointer.save(step, &mut training).map(drop),
                    false => checkpointer.save_if_due(step, &mut training).map(drop),
                })?;
            }
            if pg.stop_requested()? {
                if let Some(mut checkpointer) = checkpointer {
                    checkpointer.finish()?;
                }
                return Ok(last);
            }
        }
    }
    if let Some(reading) = reading {
        let training = throughput.compute(pg)?.units_per_second;
        if is_first {
            println!("{}", compare(reading, training));
        }
    }
    if let Some(mut checkpointer) = checkpointer {
        checkpointer.finish()?;
    }
    Ok(last)
}

/// The gradients of the mean loss per token over the batches of all ranks, and the sum of this rank's losses.
fn gradients(ddp: &DistributedDataParallel<Model>, batches: &[(Vec<usize>, TokenBatch)]) -> Result<(GradStore, f64)> {
    let (mut grads, mut sum) = (GradStore::default(), 0.);
    for (number, (_, batch)) in batches.iter().enumerate() {
        // The gradients of all but the last batch are only added up.
        let _guard = ddp.sync_if(number + 1 == batches.len());
        let count = batch.count() as f64;
        let loss = (ddp.call(|model| model.loss(batch))? * count)?;
        grads = backward_with(&loss, &[ddp], Backward { count: Some(count), ..Default::default() })?;
        sum += f64::from(loss.to_scalar::<f32>()?);
    }
    Ok((grads, sum))
}

/// Returns the mean loss per token over the evaluation's batches of all ranks, and shows tokens that the model draws.
fn evaluate(
    ddp: &DistributedDataParallel<Model>,
    options: &Options,
    loader: Option<&Loader>,
    step: u64,
    writer: &mut Writer,
) -> Result<Option<f64>> {
    let pg = ddp.process_group();
    let mut mean = None;
    if let Some(loader) = loader {
        let (mut sum, mut count) = (0., 0.);
        // Always the same batches.
        for batch in loader.epoch(0).take(options.evaluation_batches) {
            let batch = batch?;
            let loss = nn::no_grad(|| ddp.call(|model| model.loss(&batch)))?;
            sum += f64::from(loss.to_scalar::<f32>()?) * batch.count() as f64;
            count += batch.count() as f64;
        }
        let [sum, count] = pg.all_reduce_scalars([sum, count], ReduceOp::Sum)?;
        mean = Some(sum / count);
        writer.write(&[("step", step.into()), ("validation_loss", (sum / count).into())])?;
        if pg.rank() == 0 {
            println!("step {step}: validation loss {:.4}", sum / count);
        }
    }
    if options.sample > 0 {
        let first = options.end_of_text.min(options.config.vocabulary as u32 - 1);
        let tokens = draw(ddp, options.config.context, first, options.sample, options.seed)?;
        if pg.rank() == 0 {
            let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
            match (&options.tokenizer, options.bytes) {
                (Some(file), _) => println!("{}", text(file, &tokens)?),
                (None, true) => println!("{}", String::from_utf8_lossy(&bytes)),
                (None, false) => println!("{tokens:?}"),
            }
        }
    }
    Ok(mean)
}
