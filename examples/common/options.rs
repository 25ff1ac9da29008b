//! The command-line options of all training programs. Each adds its own, such as the batch size, with their defaults.
use candle_core::DType;
use candle_ddp::amp::{Autocast, GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
use candle_ddp::metrics::{Writer, WriterOptions};
use candle_ddp::{Buckets, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result};
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Args)]
pub(crate) struct TrainOptions {
    /// The seed for the initial parameters and the order of the samples.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// The number of batches whose gradients are added up for one step of the optimizer.
    #[arg(long, value_name = "BATCHES", default_value = "1")]
    pub(crate) accumulate: NonZeroUsize,
    /// Compute in this dtype; the variables remain f32. [default: f16 with --opt-level]
    #[arg(long, value_enum)]
    pub(crate) amp: Option<Amp>,
    /// How, as in Apex: O0 (not at all), O1 (functions cast), O2 (the model has the dtype) or O3 (and the variables too).
    /// [default: O2 with --amp]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(crate) opt_level: Option<OptLevel>,
    /// Write one JSON object per line to this file (on rank 0).
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write event files for TensorBoard to this folder (on rank 0).
    #[arg(long, value_name = "FOLDER")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Save everything that a later run needs to continue to this folder.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) checkpoints: Option<PathBuf>,
    /// Continue from the latest checkpoint in the folder, if there is one.
    #[arg(long, requires = "checkpoints")]
    pub(crate) resume: bool,
    /// Write a timeline of the training steps to this folder, for `ddprun merge-traces`.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) trace: Option<PathBuf>,
}

/// A dtype for mixed precision.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Amp {
    Bf16,
    /// With loss scaling, since small gradients vanish in f16.
    F16,
}

/// The optimization levels of Apex.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
#[value(rename_all = "verbatim")]
pub(crate) enum OptLevel {
    O0,
    O1,
    O2,
    O3,
}

impl TrainOptions {
    pub(crate) fn ddp_options(&self) -> DdpOptions {
        let (level, amp) = self.precision();
        let dtype = match amp {
            Amp::Bf16 => DType::BF16,
            Amp::F16 => DType::F16,
        };
        let precision = match level {
            OptLevel::O0 => Precision::default(),
            OptLevel::O1 => Precision::Autocast(Autocast::Lists(dtype)),
            OptLevel::O2 => Precision::Half { param_dtype: dtype, buffer_dtype: None },
            OptLevel::O3 => Precision::Pure(dtype),
        };
        let reduce_dtype = (level == OptLevel::O2).then_some(DType::F32);
        let (init_seed, trace) = (Some(self.seed), self.trace.clone());
        DdpOptions {
            precision,
            init_seed,
            trace,
            buckets: Buckets { reduce_dtype, ..Default::default() },
            ..Default::default()
        }
    }

    fn precision(&self) -> (OptLevel, Amp) {
        match (self.opt_level, self.amp) {
            (level, Some(amp)) => (level.unwrap_or(OptLevel::O2), amp),
            (level, None) => (level.unwrap_or(OptLevel::O0), Amp::F16),
        }
    }

    /// Returns the gradient scaler, which does nothing unless gradients of f16 arrive at variables of f32.
    pub(crate) fn grad_scaler<M>(&self, ddp: &DistributedDataParallel<M>) -> Result<GradScaler> {
        let enabled = matches!(self.precision(), (OptLevel::O1 | OptLevel::O2, Amp::F16));
        GradScaler::new(ddp.process_group(), ddp, GradScalerOptions { enabled, ..Default::default() })
    }

    /// Returns the checkpointer of the run, if there is a folder for it: every `every` steps or epochs.
    pub(crate) fn checkpointer(&self, pg: &ProcessGroup, every: u64) -> Result<Option<Checkpointer>> {
        let options = CheckpointerOptions { every, resume: self.resume, ..Default::default() };
        self.checkpoints.as_ref().map(|folder| Checkpointer::new(pg, folder, options)).transpose()
    }

    /// Returns the writer of the run's metrics, after the `done` steps or epochs of the checkpoint.
    pub(crate) fn writer(&self, pg: &ProcessGroup, done: u64) -> Result<Writer> {
        let (lines, log_dir) = (self.metrics.clone(), self.log_dir.clone());
        let purge_step = if done > 0 { done + 1 } else { 0 };
        Writer::new(pg, WriterOptions { log_dir, lines, purge_step, ..Default::default() })
    }

    /// Returns the part of batch `index` of the `batches` that an epoch still has in its step.
    pub(crate) fn micro_batch(&self, index: usize, batches: usize) -> MicroBatch {
        let first = index - index % self.accumulate.get();
        let count = self.accumulate.get().min(batches - first);
        MicroBatch { count, is_last: index + 1 == first + count }
    }
}

/// Fails if none of `total` steps or epochs is left, after the `done` ones of the checkpoint.
pub(crate) fn require_rest(argument: &'static str, done: u64, total: u64) -> Result<()> {
    if done < total {
        return Ok(());
    }
    let reason = format!("nothing is left to train: it is {total}, and {done} are done");
    Err(Error::InvalidArgument { argument, reason })
}

/// One of the batches whose gradients are added up for a step.
pub(crate) struct MicroBatch {
    /// Their number, by which each loss is divided: `--accumulate`, or less at the end of an epoch.
    pub(crate) count: usize,
    /// Whether the step follows. Before that, nothing is sent.
    pub(crate) is_last: bool,
}
