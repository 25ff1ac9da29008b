//! A whole training in one file, to be copied: data, validation, the best weights, and a run that continues where it was killed.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example train -- checkpoints
//! ```
//!
//! Kill it, then start it again with the same folder, on as many ranks as you like: it continues after the last checkpoint. SIGTERM has
//! it save first, in the middle of an epoch.
//!
//! ci: target/train
use candle_ddp::nn::{Activation, Conv2dConfig, Sequential, conv2d, cross_entropy, linear, max_pool2d, seq};
use candle_ddp::prelude::*;

const EPOCHS: u64 = 20;

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

fn net(vb: VarBuilder) -> candle_core::Result<Sequential> {
    let padded = Conv2dConfig { padding: 1, ..Default::default() };
    let pool = |x: &Tensor| max_pool2d(x, 2, Default::default());
    let (conv1, conv2) = (conv2d(1, 16, 3, padded, vb.pp("conv1"))?, conv2d(16, 32, 3, padded, vb.pp("conv2"))?);
    let features = seq().add(conv1).add(Activation::Relu).add_fn(pool).add(conv2).add(Activation::Relu).add_fn(pool);
    Ok(features.add_fn(|x| x.flatten_from(1)).add(linear(128, 10, vb.pp("head"))?))
}

/// Handwritten digits f32[B, 1, 8, 8] and their labels u32[B]: those for training, and every fifth for validation.
fn digits(pg: &ProcessGroup) -> Result<(Loader, Loader)> {
    let tensors = candle_core::safetensors::load_buffer(include_bytes!("data/digits.safetensors"), &Device::Cpu)?;
    let images = (tensors["images"].to_dtype(DType::F32)?.reshape(((), 1, 8, 8))? / 16.)?;
    let labels = tensors["labels"].to_dtype(DType::U32)?;
    let (validation, train): (Vec<u32>, Vec<u32>) = (0..labels.dim(0)? as u32).partition(|index| index % 5 == 0);
    let part = |indices: Vec<u32>| {
        let indices = Tensor::new(indices, &Device::Cpu)?;
        TensorDataset::new((images.index_select(&indices, 0)?, labels.index_select(&indices, 0)?))
    };
    let train = DataLoader::new(part(train)?, pg, LoaderOptions { batch_size: 32, ..Default::default() })?;
    // For validation, each image counts once.
    let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
    let options = LoaderOptions { batch_size: 256, sampler, ..Default::default() };
    Ok((train, DataLoader::new(part(validation)?, pg, options)?))
}

/// The fraction of the images of all ranks that the model classifies correctly.
fn accuracy(ddp: &DistributedDataParallel<Sequential>, loader: &Loader) -> Result<f64> {
    let (mut correct, mut tested) = (0., 0.);
    for batch in loader {
        let (images, labels) = batch?;
        let guesses = no_grad(|| ddp.forward(&images))?.argmax(D::Minus1)?;
        correct += guesses.eq(&labels)?.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        tested += labels.dim(0)? as f64;
    }
    let [correct, tested] = ddp.process_group().all_reduce_scalars([correct, tested], ReduceOp::Sum)?;
    Ok(correct / tested)
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "checkpoints".to_string());
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let pg = init_process_group(InitOptions { stop_signals, ..Default::default() })?;
    pg.abort_on_error(|| train(&pg, &folder))
}

fn train(pg: &ProcessGroup, folder: &str) -> Result<()> {
    let (loader, validation) = digits(pg)?;
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, net)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.005, ..Default::default() })?;
    let total_steps = EPOCHS * loader.num_batches() as u64;
    let schedule = ParamsWarmupCosine { warmup_steps: 20, total_steps, start_factor: 0.1, eta_min: 0.0005 };
    // Resumed on another number of ranks, the run continues from the same fraction of its steps.
    let stretch = candle_ddp::optim::OnOtherLength::Stretch;
    let schedule = WarmupCosine::new(&mut optimizer, schedule)?.on_other_length(stretch);
    let mut training = Training { varmap, optimizer, schedule, loader, best: 0. };

    let mut checkpointer = Checkpointer::new(pg, folder, CheckpointerOptions { resume: true, ..Default::default() })?;
    let mut step = checkpointer.load_latest(&mut training)?.unwrap_or(0);
    for epoch in training.loader.current_epoch()..EPOCHS {
        for batch in training.loader.epoch(epoch) {
            let (images, labels) = batch?;
            let loss = cross_entropy(&ddp.forward(&images)?, &labels)?;
            let mut grads = ddp.backward(&loss)?;
            training.optimizer.clip_grad_norm(&mut grads, 1.0)?;
            training.optimizer.step(&grads)?;
            training.schedule.step(&mut training.optimizer)?;
            step += 1;
            if pg.stop_requested()? {
                checkpointer.save(step, &mut training)?;
                return checkpointer.finish();
            }
        }
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
    checkpointer.finish()
}
