//! A training program for any number of ranks, which continues where it was stopped or killed.
//!
//! ```text
//! ddprun --nproc-per-node 2 --example train -- checkpoints
//! ```
use candle_ddp::nn::{Activation, Sequential, cross_entropy, linear, seq};
use candle_ddp::prelude::*;
use candle_ddp::seed::Generator;

// The system's allocator gives memory back at every free, which costs a training step on a CPU much of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The settings of a run.
#[derive(Clone)]
struct Config {
    epochs: u64,
    /// Of each rank.
    batch_size: usize,
    learning_rate: f64,
    /// Where the checkpoints are. On several machines it must be on a shared file system.
    folder: String,
}

impl Default for Config {
    fn default() -> Self {
        Self { epochs: 10, batch_size: 64, learning_rate: 0.003, folder: "checkpoints".to_string() }
    }
}

type Loader = DataLoader<TensorDataset<(Tensor, Tensor)>, (Tensor, Tensor)>;

/// What training changes, which is what a checkpoint holds.
struct Training {
    varmap: VarMap,
    optimizer: AdamW,
    schedule: WarmupCosine,
    loader: Loader,
    best: f64,
}

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, loader, best } = self;
        vec![("model", varmap), ("optimizer", optimizer), ("schedule", schedule), ("loader", loader), ("best", best)]
    }
}

/// Your model. Build all layers from `vb`, with `candle_ddp::nn`.
fn net(vb: VarBuilder) -> candle_core::Result<Sequential> {
    let (hidden, output) = (linear(64, 128, vb.pp("hidden"))?, linear(128, 2, vb.pp("output"))?);
    Ok(seq().add(hidden).add(Activation::Relu).add(output))
}

/// Your data, the same on all ranks: here noise of f32[N, 64], with labels u32[N] that say whether its mean is above 0.
fn data(count: usize, seed: u64) -> Result<TensorDataset<(Tensor, Tensor)>> {
    let inputs = Generator::new(seed).randn(0.0, 1.0, (count, 64), DType::F32, &Device::Cpu)?;
    let labels = inputs.mean(1)?.gt(0.0)?.to_dtype(DType::U32)?;
    TensorDataset::new((inputs, labels))
}

/// The batches of this rank for training, and for validation, where each sample counts once.
fn loaders(pg: &ProcessGroup, config: &Config) -> Result<(Loader, Loader)> {
    let options = LoaderOptions { batch_size: config.batch_size, ..Default::default() };
    let train = DataLoader::new(data(4000, 1)?, pg, options)?;
    let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let options = LoaderOptions { batch_size: 256, sampler, ..Default::default() };
    Ok((train, DataLoader::new(data(1000, 2)?, pg, options)?))
}

/// The fraction of the samples of all ranks that the model classifies correctly.
fn accuracy(ddp: &DistributedDataParallel<Sequential>, loader: &Loader) -> Result<f64> {
    let (mut correct, mut tested) = (0., 0.);
    for batch in loader {
        let (inputs, labels) = batch?;
        let guesses = no_grad(|| ddp.forward(&inputs))?.argmax(D::Minus1)?;
        correct += guesses.eq(&labels)?.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        tested += labels.dim(0)? as f64;
    }
    let [correct, tested] = ddp.process_group().all_reduce_scalars([correct, tested], ReduceOp::Sum)?;
    Ok(correct / tested)
}

fn main() -> Result<()> {
    let mut config = Config::default();
    if let Some(folder) = std::env::args().nth(1) {
        config.folder = folder;
    }
    // SIGTERM, as a scheduler sends it before it takes the machine, saves first.
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let pg = init_process_group(InitOptions { stop_signals, ..Default::default() })?;
    pg.abort_on_error(|| train(&pg, &config)).map(drop)
}

/// Trains from the last checkpoint on, and returns the best accuracy.
fn train(pg: &ProcessGroup, config: &Config) -> Result<f64> {
    let (loader, validation) = loaders(pg, config)?;
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, net)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: config.learning_rate, ..Default::default() })?;
    // Its steps are epochs: the number of batches depends on the number of ranks, with which a run may continue.
    let schedule = ParamsWarmupCosine { warmup_steps: 1, total_steps: config.epochs, start_factor: 0.3, eta_min: 0. };
    let schedule = WarmupCosine::new(&mut optimizer, schedule)?;
    let mut training = Training { varmap, optimizer, schedule, loader, best: 0. };

    let options = CheckpointerOptions { resume: true, ..Default::default() };
    let mut checkpointer = Checkpointer::new(pg, &config.folder, options)?;
    let mut step = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    for epoch in training.loader.current_epoch()..config.epochs {
        for batch in training.loader.epoch(epoch) {
            let (inputs, labels) = batch?;
            let loss = cross_entropy(&ddp.forward(&inputs)?, &labels)?;
            let mut grads = ddp.backward(&loss)?;
            training.optimizer.clip_grad_norm(&mut grads, 1.0)?;
            training.optimizer.step(&grads)?;
            step += 1;
            if pg.stop_requested()? {
                checkpointer.save(step, &mut training)?;
                checkpointer.finish()?;
                return Ok(training.best);
            }
        }
        training.schedule.step(&mut training.optimizer)?;
        let accuracy = accuracy(&ddp, &validation)?;
        if accuracy > training.best {
            training.best = accuracy;
            checkpointer.save_best(step, &mut training)?;
        } else {
            checkpointer.save(step, &mut training)?;
        }
        if pg.rank() == 0 {
            println!("epoch {epoch}: accuracy {:.2} %, best {:.2} %", 100. * accuracy, 100. * training.best);
        }
    }
    checkpointer.finish()?;
    Ok(training.best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trains with ranks as threads, in `folder`.
    fn best(ranks: usize, epochs: u64, folder: &std::path::Path) -> Result<f64> {
        let config = Config { epochs, folder: folder.to_string_lossy().into_owned(), ..Default::default() };
        Ok(candle_ddp::spawn(ranks, move |pg| train(&pg, &config))?[0])
    }

    #[test]
    fn it_learns_on_one_rank_and_on_two() -> Result<()> {
        for ranks in [1, 2] {
            let folder = tempfile::tempdir().expect("a folder");
            let best = best(ranks, 5, folder.path())?;
            assert!(best > 0.9, "{ranks} ranks: {best}");
        }
        Ok(())
    }

    #[test]
    fn one_rank_takes_up_what_two_have_trained() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let best_of_two = best(2, 5, folder.path())?;
        // All epochs are done.
        assert_eq!(best(1, 5, folder.path())?, best_of_two);
        Ok(())
    }
}
