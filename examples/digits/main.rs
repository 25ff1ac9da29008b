//! Trains a small convolutional network on handwritten digits, on all ranks that the launcher starts:
//!
//! ```text
//! cargo run --release -- --nproc-per-node 2 --example digits
//! ```
//!
//! ci: --require-accuracy 0.97
mod dataset;
mod hook;
mod net;
mod progress;

use candle_core::DType;
use candle_ddp::data::{DataLoader, DistributedSampler, LoaderOptions, SamplerOptions};
use candle_ddp::error::Context;
use candle_ddp::nn;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, Error, InitOptions, ProcessGroup, ReduceOp, Result, init_process_group,
};
use candle_nn::VarMap;
use clap::Parser;
use dataset::Dataset;
use hook::Hook;
use net::Net;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

// Training on the CPU constantly frees and allocates large tensors, which this allocator does without the kernel.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train a convolutional network on 8×8 handwritten digits with DistributedDataParallel.
#[derive(Parser)]
struct Options {
    /// The number of passes over the training images.
    #[arg(long, default_value_t = 25)]
    epochs: usize,
    /// The number of images per batch and rank.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// AdamW's learning rate.
    #[arg(long, default_value_t = 0.005)]
    learning_rate: f64,
    /// The seed for the initial parameters and the order of the images.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The communication hook for the gradients.
    #[arg(long, value_enum, default_value_t = Hook::None)]
    comm_hook: Hook,
    /// Shard the optimizer state over the ranks (ZeRO-1).
    #[arg(long, conflicts_with = "comm_hook")]
    zero: bool,
    /// Write one JSON object per epoch to this file, one per line (on rank 0).
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Fail unless the test accuracy after the last epoch is at least this, from 0 to 1.
    #[arg(long, value_name = "ACCURACY")]
    require_accuracy: Option<f64>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let pg = init_process_group(InitOptions::default())?;
    pg.abort_on_error(|| train(&pg, options))
}

fn train(pg: &ProcessGroup, options: &Options) -> Result<()> {
    let (rank, world_size) = (pg.rank(), pg.world_size());
    let mut metrics = match &options.metrics {
        Some(path) if rank == 0 => Some((path, File::create(path).with_context(|| writing(path))?)),
        _ => None,
    };

    let (train, test) = Dataset::digits(pg.device())?;
    let varmap = VarMap::new();
    let ddp_options = DdpOptions { init_seed: Some(options.seed), ..Default::default() };
    let ddp = DistributedDataParallel::new(pg, &varmap, DType::F32, |vb| Net::new(vb), ddp_options)?;
    options.comm_hook.register(&ddp)?;
    let params = ParamsAdamW { lr: options.learning_rate, ..Default::default() };
    let mut optimizer: Box<dyn Optimizer> = match options.zero {
        true => Box::new(ZeroRedundancyOptimizer::new(&ddp, params)?),
        false => Box::new(AdamW::from_named(ddp.named_parameters(), params)?),
    };

    let sampler_options = SamplerOptions { shuffle: true, seed: options.seed, drop_last: false };
    let mut sampler = DistributedSampler::new(train.len(), world_size, rank, sampler_options)?;
    // To count every test image once, a rank leaves out the images that the sampler repeats to give all ranks the same
    // number.
    let test_options = SamplerOptions { shuffle: false, ..Default::default() };
    let test_sampler = DistributedSampler::new(test.len(), world_size, rank, test_options)?;
    let loader_options = LoaderOptions { batch_size: options.batch_size, drop_last: false };
    let loader = DataLoader::new(loader_options, |indices| Ok(train.batch(indices)?))?;
    let test_loader = DataLoader::new(loader_options, |indices| Ok(test.batch(indices)?))?;

    for epoch in 1..=options.epochs {
        let start = Instant::now();
        sampler.set_epoch(epoch);
        let bar = progress::bar(epoch, loader.num_batches(sampler.len()), rank);
        let (mut loss_sum, mut trained) = (0., 0);
        for batch in loader.iter(&sampler) {
            let (images, labels) = batch?;
            let loss = nn::cross_entropy(&ddp.forward_t(&images, true)?, &labels)?;
            let gradients = ddp.backward(&loss)?;
            ddp.phase("optimizer", || optimizer.step(&gradients))?;
            loss_sum += f64::from(loss.to_scalar::<f32>()?) * labels.elem_count() as f64;
            trained += labels.elem_count();
            bar.inc(1);
        }
        let seconds = start.elapsed().as_secs_f64();

        let (mut correct, mut tested) = (0., 0);
        for batch in test_loader.iter(test_sampler.iter().take(test_sampler.unpadded_len())) {
            let (images, labels) = batch?;
            let guesses = ddp.forward_t(&images, false)?.argmax(1)?;
            correct += f64::from(guesses.eq(&labels)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
            tested += labels.elem_count();
        }
        bar.finish_and_clear();

        let totals = [loss_sum, trained as f64, correct, tested as f64];
        let [loss_sum, trained, correct, tested] = pg.all_reduce_scalars(totals, ReduceOp::Sum)?;
        let (train_loss, test_accuracy) = (loss_sum / trained, correct / tested);
        let images_per_second = trained / seconds;
        let hash = shared_hash(pg, &ddp)?;
        if rank == 0 {
            println!(
                "epoch {epoch:>2}: loss {train_loss:.4}, test accuracy {:.2} %, {images_per_second:.0} images/s",
                100. * test_accuracy
            );
        }
        let traffic = ddp.comm_hook_traffic();
        if let Some((path, file)) = &mut metrics {
            let line = serde_json::json!({
                "epoch": epoch,
                "train_loss": train_loss,
                "test_accuracy": test_accuracy,
                "images_per_second": images_per_second,
                "world_size": world_size,
                "parameter_hash": hash,
                "gradient_bytes": traffic.map(|traffic| traffic.gradient_bytes),
                "bytes_sent": traffic.and_then(|traffic| traffic.bytes_sent),
            });
            writeln!(file, "{line}").with_context(|| writing(path))?;
        }
        if epoch == options.epochs {
            if rank == 0 {
                println!("parameters {hash}, the same on all ranks ({world_size})");
                if let Some(traffic) = traffic
                    && let Some(sent) = traffic.bytes_sent
                {
                    println!("{sent} bytes sent for {} bytes of gradients", traffic.gradient_bytes);
                }
            }
            if let Some(required) = options.require_accuracy.filter(|required| test_accuracy < *required) {
                let reason = format!("the test accuracy {test_accuracy:.4} does not reach {required}");
                return Err(Error::InvalidArgument { argument: "require-accuracy", reason });
            }
        }
    }
    Ok(())
}

/// Returns the hash of all parameters (FNV-1a over their bytes), which must be the same on every rank.
fn shared_hash<M>(pg: &ProcessGroup, ddp: &DistributedDataParallel<M>) -> Result<String> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for parameter in ddp.parameters() {
        for value in parameter.flatten_all()?.to_vec1::<f32>()? {
            for byte in value.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    let hashes = pg.all_gather_object(&hash)?;
    match hashes.iter().position(|&other| other != hashes[0]) {
        None => Ok(format!("{hash:016x}")),
        Some(rank) => {
            let difference = format!("parameter hash {:016x} instead of {:016x}", hashes[rank], hashes[0]);
            Err(Error::Mismatch { what: "model", rank, difference })
        }
    }
}

fn writing(path: &Path) -> String {
    format!("cannot write the metrics to {}", path.display())
}
