//! Measures a training step with and without DistributedDataParallel, on several ranks:
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --bench step -- --model mlp
//! ```
#[path = "../../examples/common/mod.rs"]
mod common;
mod net;

use candle_core::{DType, Tensor};
use candle_ddp::amp::Autocast;
use candle_ddp::backend::nccl::NcclOptions;
use candle_ddp::comm_hook::{Bf16Compress, Int8Compress, PowerSgd, PowerSgdOptions};
use candle_ddp::nn::{LoraConfig, MemoryFormat, to_memory_format};
use candle_ddp::optim::{AdamW, Muon, Optimizer, Parameters, ParamsAdamW, ParamsMuon};
use candle_ddp::{
    Backward, Buckets, DdpOptions, DistributedDataParallel, Error, InitOptions, OnNonFinite, Precision, ProcessGroup,
    ReplicaCheck, Result, Sharding, backward_with, init_process_group,
};
use candle_ddp_tensor::kernels;
use candle_nn::{VarBuilder, VarMap};
use clap::{Parser, ValueEnum};
use common::median::median;
use common::memory::peak_rss_bytes;
use net::{Batch, LossNet, Model};
use std::process::ExitCode;
use std::time::Instant;

/// Measure training steps in several modes that alternate step by step, so that other load on the machine affects all
/// equally. Prints a JSON object per mode: medians over steps of the slowest rank's times.
#[derive(Parser)]
struct Options {
    /// The model.
    #[arg(long, value_enum, default_value = "mlp")]
    model: Model,
    /// Samples per rank and step. [default: 256 for mlp, 32 for resnet18, resnet50, mobilenet and vit, 20 for lstm, 8 for the others]
    #[arg(long)]
    batch_size: Option<usize>,
    /// The number of measured steps of each mode.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// The modes to compare.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "local,ddp")]
    modes: Vec<Mode>,
    /// The dtype of parameters and activations: f32, f16 or bf16.
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Compute in this dtype, f16 or bf16, with parameters in f32 (modes ddp, autocast and products only).
    #[arg(long)]
    amp: Option<DType>,
    /// On a GPU, round f32 to TF32 in products and convolutions.
    #[arg(long)]
    tf32: bool,
    /// The height and width of the images of resnet50 and vit.
    #[arg(long, default_value_t = 224)]
    image_size: usize,
    /// Wait for the GPU once per step, as a program would, and not after forward and backward too.
    #[arg(long)]
    no_phases: bool,
    /// Wait for the GPU once in so many steps, as a program that reads its loss so often; with more than 1, `--no-phases` holds.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    wait_every: u32,
    /// Store the images in channels_last.
    #[arg(long)]
    channels_last: bool,
    /// Keep only the inputs of a GPT's blocks for the backward pass, which computes the blocks again.
    #[arg(long)]
    checkpoint: bool,
    /// The number of a GPT's blocks. [default: the model's]
    #[arg(long)]
    layers: Option<usize>,
    /// The bucket size in MiB. [default: as in DdpOptions]
    #[arg(long)]
    bucket_cap_mib: Option<f64>,
    /// On GPUs, let collectives wait until running kernels have no more blocks to place.
    #[arg(long)]
    low_priority: bool,
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Plain candle: every rank trains its own model, at the same time as the others.
    Local,
    /// DistributedDataParallel: gradients are averaged during the backward pass.
    Ddp,
    /// The same, with `backward_and_step`. The backward pass's time includes the optimizer's.
    Parts,
    /// As ddp, but gradients are averaged after the backward pass.
    After,
    /// As ddp, with gradients sent in bf16.
    Bf16Hook,
    /// As ddp, with gradients sent as 8-bit integers.
    Int8Hook,
    /// As ddp, with matrices sent as approximations of rank 1 after the warm-up.
    PowerSgd,
    /// DistributedDataParallel that leaves out steps whose gradients are not finite.
    Skip,
    /// DistributedDataParallel with virtual ranks: one micro-batch per rank, so their number is that of the ranks.
    Virtual,
    /// DistributedDataParallel whose functions cast to the dtype of `--amp`, by PyTorch's lists.
    Autocast,
    /// The same, but only products compute in it.
    Products,
    /// DistributedDataParallel whose ranks compare their models in every pass.
    Checked,
    /// With `Sharding::Optimizer`.
    Zero,
    /// The same, with the blocks of a GPT spread over the ranks.
    Shard,
    /// The same, whose parameters stay from forward to backward pass.
    ShardKept,
    /// The same as shard, with a copy of the model on each half of the ranks.
    Hybrid,
    /// DistributedDataParallel with adapters of rank 8 on a GPT's linear layers, whose weights are frozen.
    Lora,
}

/// The number of unmeasured steps of each mode: the first steps allocate, and DDP rebuilds its buckets after the first.
const WARMUP: u32 = 2;
/// A learning rate at which nothing overflows or vanishes, however many steps are measured.
const LEARNING_RATE: f64 = 1e-5;
/// The milliseconds of forward, backward and optimizer, and those until the host has nothing left but to wait.
type Times = [f64; 4];

fn main() -> ExitCode {
    common::main_with(
        |options: &Options| {
            let nccl = NcclOptions { high_priority: !options.low_priority, ..Default::default() };
            InitOptions { nccl, ..Default::default() }
        },
        measure,
    )
}

fn measure(pg: &ProcessGroup, options: &Options) -> Result<()> {
    candle_core::cuda::set_gemm_reduced_precision_f32(options.tf32);
    let batch_size = options.batch_size.unwrap_or(options.model.batch_size());
    let mut batch = options.model.batch(batch_size, options.image_size, options.dtype, pg.device())?;
    if options.channels_last {
        batch.input = to_memory_format(&batch.input, MemoryFormat::ChannelsLast)?;
    }
    let default = DdpOptions::default();
    let bucket_cap_mb = options.bucket_cap_mib.unwrap_or(default.buckets.bucket_cap_mb);
    let ddp = DdpOptions { buckets: Buckets { bucket_cap_mb, ..default.buckets }, ..default };
    let build = |vb: VarBuilder| options.model.build(options.image_size, options.checkpoint, options.layers, vb);
    let new = |mode: &Mode| {
        let replica_check = matches!(mode, Mode::Checked).then(|| ReplicaCheck { every: 1, ..Default::default() });
        let on_non_finite = matches!(mode, Mode::Skip).then_some(OnNonFinite::Skip { at_most: 10 });
        let sharding = match mode {
            Mode::Shard => Sharding::Blocks { reshard_after_forward: true, ranks: None },
            Mode::ShardKept => Sharding::Blocks { reshard_after_forward: false, ranks: None },
            Mode::Hybrid => Sharding::Blocks { reshard_after_forward: true, ranks: Some(pg.world_size() / 2) },
            Mode::Zero => Sharding::Optimizer { ranks: None },
            _ => Sharding::Off,
        };
        let precision = mode.precision(options.amp, options.dtype)?;
        let ddp = DdpOptions { replica_check, on_non_finite, sharding, precision, ..ddp.clone() };
        Trainer::new(*mode, (options.model, &build), options.dtype, pg, ddp)
    };
    let phases = !options.no_phases && options.wait_every == 1;
    let mut trainers = options.modes.iter().map(new).collect::<Result<Vec<_>>>()?;
    let mut times = vec![Vec::new(); trainers.len()];
    for step in 0..WARMUP + options.steps {
        for turn in 0..trainers.len() {
            // Each mode comes first, and after each other mode, equally often.
            let index = (turn + step as usize) % trainers.len();
            pg.barrier()?;
            let elapsed = slowest(pg, trainers[index].steps(&batch, phases, options.wait_every)?)?;
            if step >= WARMUP {
                times[index].push(elapsed);
            }
        }
    }
    if pg.rank() > 0 {
        return Ok(());
    }
    for ((mode, trainer), times) in options.modes.iter().zip(&trainers).zip(&times) {
        let part = |part: usize| median(times.iter().map(|times| times[part]));
        let line = serde_json::json!({
            "model": options.model.name(),
            "mode": mode.name(),
            "dtype": options.dtype.as_str(),
            "amp": options.amp.map(|dtype| dtype.as_str()),
            "tf32": options.tf32,
            "channels_last": options.channels_last,
            "checkpoint": options.checkpoint,
            "world_size": pg.world_size(),
            "batch_size": batch_size,
            "gradient_bytes": trainer.gradient_bytes,
            "wait_every": options.wait_every,
            "step_ms": median(times.iter().map(step)),
            "forward_ms": part(0),
            "backward_ms": part(1),
            "optimizer_ms": part(2),
            // Otherwise it contains waits.
            "host_ms": (!phases).then(|| part(3)),
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_gpu_bytes": kernels::peak_memory(pg.device())?,
        });
        println!("{line}");
    }
    Ok(())
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Ddp => "ddp",
            Self::Parts => "parts",
            Self::After => "after",
            Self::Bf16Hook => "bf16-hook",
            Self::Int8Hook => "int8-hook",
            Self::PowerSgd => "power-sgd",
            Self::Skip => "skip",
            Self::Virtual => "virtual",
            Self::Autocast => "autocast",
            Self::Products => "products",
            Self::Checked => "checked",
            Self::Zero => "zero",
            Self::Shard => "shard",
            Self::ShardKept => "shard-kept",
            Self::Hybrid => "hybrid",
            Self::Lora => "lora",
        }
    }

    /// The precision of this mode with `--amp` and `--dtype`.
    fn precision(self, amp: Option<DType>, dtype: DType) -> Result<Precision> {
        let invalid = |reason: &str| Error::InvalidArgument { argument: "modes", reason: reason.to_string() };
        match (self, amp) {
            (Self::Autocast | Self::Products, None) => Err(invalid("autocast and products need --amp")),
            // Its model has its own variables.
            (Self::After, None) => Ok(Precision::default()),
            (_, None) => Ok(Precision::Pure(dtype)),
            (_, Some(_)) if dtype != DType::F32 => Err(invalid("parameters must be f32 with --amp")),
            (
                Self::Ddp | Self::Parts | Self::Lora | Self::Zero | Self::Shard | Self::ShardKept | Self::Hybrid,
                Some(param_dtype),
            ) => Ok(Precision::Half { param_dtype, buffer_dtype: None }),
            (Self::Autocast, Some(dtype)) => Ok(Precision::Autocast(Autocast::Lists(dtype))),
            (Self::Products, Some(dtype)) => Ok(Precision::Autocast(Autocast::Products(dtype))),
            _ => Err(invalid("must be ddp, autocast, products or a sharded mode, with --amp")),
        }
    }
}

/// A model and its training step.
struct Trainer {
    net: Net,
    optimizer: Box<dyn Optimizer>,
    gradient_bytes: usize,
    in_parts: bool,
}

enum Net {
    Local(LossNet),
    Ddp(DistributedDataParallel<LossNet>),
    Virtual(DistributedDataParallel<LossNet>),
}

impl Trainer {
    fn new(
        mode: Mode,
        (model, build): (Model, &impl Fn(VarBuilder) -> candle_core::Result<LossNet>),
        dtype: DType,
        pg: &ProcessGroup,
        options: DdpOptions,
    ) -> Result<Self> {
        let (varmap, device) = (VarMap::new(), pg.device());
        let plain = || build(VarBuilder::from_varmap(&varmap, dtype, device));
        let net = match mode {
            Mode::Local => Net::Local(plain()?),
            Mode::Ddp
            | Mode::Parts
            | Mode::Autocast
            | Mode::Products
            | Mode::Checked
            | Mode::Skip
            | Mode::Bf16Hook
            | Mode::Int8Hook
            | Mode::PowerSgd
            | Mode::Zero
            | Mode::Shard
            | Mode::ShardKept
            | Mode::Hybrid => Net::Ddp(DistributedDataParallel::with_options(pg, &varmap, build, options)?),
            Mode::Lora => {
                let base = VarBuilder::from_varmap(&VarMap::new(), dtype, device);
                let target_modules = ["qkv", "projection", "fc1", "fc2"].map(String::from).to_vec();
                let lora = LoraConfig { r: 8, lora_alpha: 16., target_modules, ..Default::default() };
                let build = |vb| lora.build(base, vb, build);
                Net::Ddp(DistributedDataParallel::with_options(pg, &varmap, build, options)?)
            }
            Mode::Virtual => {
                let (virtual_ranks, device) = (Some(pg.world_size()), Some(device.clone()));
                let pg = init_process_group(InitOptions { virtual_ranks, device, ..Default::default() })?;
                Net::Virtual(DistributedDataParallel::with_options(&pg, &varmap, build, options)?)
            }
            Mode::After => {
                let net = plain()?;
                Net::Ddp(DistributedDataParallel::from_vars(pg, net, &varmap, options)?)
            }
        };
        if let Net::Ddp(ddp) = &net {
            match mode {
                Mode::Bf16Hook => ddp.register_comm_hook(Bf16Compress::default())?,
                Mode::Int8Hook => ddp.register_comm_hook(Int8Compress::default())?,
                Mode::PowerSgd => {
                    let options = PowerSgdOptions { start_iter: WARMUP.into(), ..Default::default() };
                    ddp.register_comm_hook(PowerSgd::new(options)?)?;
                }
                _ => {}
            }
        }
        let parameters: Vec<_> = match &net {
            Net::Local(_) => {
                Parameters::from(&varmap).into_iter().filter(|(name, _)| !name.contains("running_")).collect()
            }
            Net::Ddp(ddp) | Net::Virtual(ddp) => ddp.named_parameters(),
        };
        let bytes = |(_, var): &(String, candle_core::Var)| var.elem_count() * var.dtype().size_in_bytes();
        let gradient_bytes = parameters.iter().map(bytes).sum();
        let params = ParamsAdamW { lr: LEARNING_RATE, ..Default::default() };
        let optimizer: Box<dyn Optimizer> = match model.is_muons() {
            true => {
                let muon = ParamsMuon { lr: LEARNING_RATE, ..Default::default() };
                let is_adamws = |name: &str| ["positions", "tokens", "head"].iter().any(|part| name.starts_with(part));
                Box::new(Muon::with_adamw(parameters, muon, params, is_adamws)?)
            }
            false => Box::new(AdamW::new(parameters, params)?),
        };
        Ok(Self { net, optimizer, gradient_bytes, in_parts: matches!(mode, Mode::Parts) })
    }

    /// The means of `count` steps, after the last of which it waits for the GPU.
    fn steps(&mut self, batch: &Batch, phases: bool, count: u32) -> Result<Times> {
        let mut times = [0.; 4];
        now(batch, true)?;
        for step in 1..=count {
            let measured = self.step(batch, phases, step == count)?;
            times.iter_mut().zip(measured).for_each(|(sum, time)| *sum += time / f64::from(count));
        }
        Ok(times)
    }

    fn step(&mut self, batch: &Batch, phases: bool, waits: bool) -> Result<Times> {
        let Batch { input, targets } = batch;
        let start = Instant::now();
        let loss = match &self.net {
            Net::Local(net) => net(input, targets)?,
            Net::Ddp(ddp) | Net::Virtual(ddp) => {
                let input = ddp.cast_forward_inputs(input)?;
                ddp.call(|net| net(&input, targets))?
            }
        };
        let forward = now(batch, phases)?;
        let gradients = match &self.net {
            Net::Local(_) => Some(loss.backward()?),
            Net::Ddp(ddp) if self.in_parts => {
                ddp.backward_and_step(&loss, &mut self.optimizer)?;
                None
            }
            Net::Ddp(ddp) => Some(ddp.backward(&loss)?),
            Net::Virtual(ddp) => {
                let micro_batch = Some(ddp.process_group().rank());
                Some(backward_with(&loss, &[ddp], Backward { micro_batch, ..Default::default() })?)
            }
        };
        let backward = now(batch, phases)?;
        if let Some(gradients) = gradients {
            self.optimizer.step(&gradients)?;
        }
        let launched = Instant::now();
        let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        let end = now(batch, waits)?;
        let [forward, backward, optimizer] =
            [(start, forward), (forward, backward), (backward, end)].map(|(from, to)| milliseconds(from, to));
        Ok([forward, backward, optimizer, milliseconds(start, launched)])
    }
}

/// The time, after a GPU has nothing left to do if it `waits`: calls only enqueue work there.
fn now(batch: &Batch, waits: bool) -> candle_core::Result<Instant> {
    if waits {
        batch.input.device().synchronize()?;
    }
    Ok(Instant::now())
}

/// The time of a step.
fn step([forward, backward, optimizer, _]: &Times) -> f64 {
    forward + backward + optimizer
}

/// Returns the times on the slowest rank.
fn slowest(pg: &ProcessGroup, times: Times) -> Result<Times> {
    let world_size = pg.world_size();
    let all = Tensor::zeros((world_size, times.len()), DType::F64, pg.device())?;
    pg.all_gather(&all, &Tensor::new(&times, pg.device())?)?;
    let all = all.to_vec2::<f64>()?.into_iter().filter_map(|times| Times::try_from(times).ok());
    Ok(all.max_by(|a, b| step(a).total_cmp(&step(b))).unwrap_or(times))
}
