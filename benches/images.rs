//! Images per second from a folder: JPEG, RandomResizedCrop, flip and normalisation, on worker threads.
//!
//! ```text
//! cargo bench --bench images -- --folder FOLDER [--workers 2 --batch-size 64 --epochs 3 --train 8]
//! ```
//!
//! FOLDER has a folder for each class, as `scripts/compare_images.py` makes one, which compares with PyTorch. The first epoch
//! warms up. Each line of the output is a JSON object: of each epoch `images_per_second` and `cpu_ms`, the processor time for an
//! image, and at last the milliseconds that each step takes for an image, on one thread. With `--train`, a small convnet is
//! trained on the images, and each epoch has two more numbers: `waiting`, the share of its time that the training thread waits for
//! the next batch, and `waiting_later`, the same without the first batch of the epoch, for which every loader has to be waited for.
//! Without `--bench` (as under `cargo test`), it reads a few small images as a smoke test.
mod start;

use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::data::{DataLoader, Dataset, DistributedSampler, LoaderOptions, SamplerOptions};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::seed::Generator;
use candle_ddp::vision::{Image, ImageFolder, Normalize, RandomHorizontalFlip, RandomResizedCrop, Transform};
use candle_ddp::{Context, Result, nn};
use candle_nn::{Conv2dConfig, VarBuilder, VarMap};
use clap::Parser;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Options {
    /// A folder with a folder of images for each class. By default, the small images of the tests.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/vision/folder"))]
    folder: PathBuf,
    /// The number of threads that read.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// The number of measured epochs.
    #[arg(long, default_value_t = 3)]
    epochs: usize,
    /// Train a convnet whose first layer has this number of channels.
    #[arg(long, value_name = "CHANNELS")]
    train: Option<usize>,
}

type Folder = ImageFolder<(RandomResizedCrop, RandomHorizontalFlip)>;

fn main() -> Result<()> {
    let options: Options = start::options_or(&["--epochs=1", "--train=1"]);
    let transform = (RandomResizedCrop::default(), RandomHorizontalFlip::default());
    let folder = Arc::new(ImageFolder::new(&options.folder, transform)?);
    let sampler = DistributedSampler::new(folder.len(), 0, 1, SamplerOptions::default())?;
    let Options { batch_size, workers: num_workers, .. } = options;
    let loader_options = LoaderOptions { batch_size, num_workers, ..Default::default() };
    let collate = |samples: Vec<_>| Ok(Normalize::IMAGENET.collate(samples)?);
    let loader = DataLoader::from_sampler(Arc::clone(&folder), sampler, loader_options, collate)?;
    let mut training = options.train.map(|channels| Training::new(channels, folder.classes().len())).transpose()?;
    for epoch in 0..=options.epochs {
        let (start, cpu) = (Instant::now(), cpu_ms()?);
        let mut waits = Vec::new();
        // That the workers are started belongs to the first batch.
        let mut asked = start;
        for batch in loader.iter() {
            waits.push(asked.elapsed().as_secs_f64());
            let (images, labels) = batch?;
            if let Some(training) = &mut training {
                training.step(&images, &labels)?;
            }
            asked = Instant::now();
        }
        let seconds = start.elapsed().as_secs_f64();
        let speed = folder.len() as f64 / seconds;
        let cpu = (cpu_ms()? - cpu) / folder.len() as f64;
        let mut row = serde_json::json!({ "epoch": epoch, "images_per_second": speed, "cpu_ms": cpu });
        if training.is_some() {
            row["waiting"] = (waits.iter().sum::<f64>() / seconds).into();
            row["waiting_later"] = (waits.iter().skip(1).sum::<f64>() / seconds).into();
        }
        if epoch > 0 {
            println!("{row}");
        }
    }
    steps(&folder)
}

/// Convolutions that halve the sides and double the channels, as in `scripts/compare/images_pytorch.py`.
struct Training {
    convolutions: Vec<nn::Conv2d>,
    head: nn::Linear,
    optimizer: Sgd,
}

impl Training {
    fn new(channels: usize, classes: usize) -> Result<Self> {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let sizes = [3, channels, 2 * channels, 4 * channels, 8 * channels];
        let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
        let layer = |(number, sizes): (usize, &[usize])| nn::conv2d(sizes[0], sizes[1], 3, config, vb.pp(number));
        let convolutions = sizes.windows(2).enumerate().map(layer).collect::<candle_core::Result<_>>()?;
        let head = nn::linear(sizes[4], classes, vb.pp("head"))?;
        let vars = varmap.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let named = vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect::<Vec<_>>();
        let params = ParamsSgd { lr: 0.01, momentum: 0.9, ..Default::default() };
        Ok(Self { convolutions, head, optimizer: Sgd::new(named, params)? })
    }

    fn step(&mut self, images: &Tensor, labels: &Tensor) -> Result<()> {
        let mut x = images.clone();
        for convolution in &self.convolutions {
            x = nn::relu(&convolution.forward(&x)?)?;
        }
        let logits = self.head.forward(&nn::adaptive_avg_pool2d(&x, 1)?.flatten_from(1)?)?;
        let loss = nn::cross_entropy(&logits, labels)?;
        self.optimizer.step(&loss.backward()?)
    }
}

/// The processor time that this process has used.
fn cpu_ms() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    // After the name in brackets, in ticks of 10 ms: user time is the 14th field, and system time the 15th.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    Ok(fields.skip(11).take(2).flat_map(str::parse::<f64>).sum::<f64>() * 10.)
}

/// Prints the time of each step.
fn steps(folder: &Folder) -> Result<()> {
    let mut times = [0.; 4];
    let mut random = Generator::new(0);
    let samples = &folder.samples()[..folder.len().min(256)];
    for (path, _) in samples {
        let start = Instant::now();
        let mut image = Image::open(path)?;
        times[0] += start.elapsed().as_secs_f64();
        let transforms: [&dyn Transform; 2] = [&RandomResizedCrop::default(), &RandomHorizontalFlip::default()];
        for (transform, time) in transforms.into_iter().zip(&mut times[1..]) {
            let start = Instant::now();
            transform.apply(&mut image, None, &mut random)?;
            *time += start.elapsed().as_secs_f64();
        }
        let start = Instant::now();
        Normalize::IMAGENET.batch([&image])?;
        times[3] += start.elapsed().as_secs_f64();
    }
    let [decode, crop, flip, normalize] = times.map(|time| time * 1e3 / samples.len() as f64);
    let steps = serde_json::json!({ "decode": decode, "crop": crop, "flip": flip, "normalize": normalize });
    println!("{}", serde_json::json!({ "step_ms": steps }));
    Ok(())
}
