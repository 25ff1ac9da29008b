//! The modes of `ddprun` that start no workers.
use super::check::{Check, Manner, WORKER};
use super::console::message;
use std::path::PathBuf;

/// A mode that starts no workers.
#[derive(Debug, Clone, PartialEq, clap::Subcommand)]
pub(crate) enum Mode {
    /// Shows the state of a running job: its nodes and ranks, their steps and speed, how long they wait for each
    /// other, the generation, the restarts used, and the last failure.
    ///
    /// The secret is read from CANDLE_DDP_SECRET or CANDLE_DDP_SECRET_FILE; the run must have been started with the same one.
    Status {
        /// Address of the job's store: --rdzv-endpoint, or --master-addr and --master-port, which a run on one machine
        /// must have been given for this.
        #[arg(value_name = "HOST:PORT")]
        address: String,
        /// The run has no secret.
        #[arg(long, alias = "no_secret")]
        no_secret: bool,
        /// Shows it as one line of JSON, whose fields candle-ddp's docs/elastic.md describes.
        #[arg(long)]
        json: bool,
    },

    /// Measures cores, memory and connections of all nodes before a run, and names what is slow or missing: exit code 1.
    ///
    /// Start it on every machine, with the options that say which ranks a run has and where they meet. Each core multiplies
    /// matrices, each rank copies memory, each pair of ranks exchanges messages, and all add numbers up (all-reduce). Clocks,
    /// limits, free memory, versions and GPUs of the nodes are compared.
    Check(Box<Check>),

    /// A rank of `check`.
    #[command(name = WORKER, hide = true)]
    CheckWorker(Manner),

    /// Says which rank parted from the others, and where, from the files that all ranks wrote to a folder because of
    /// CANDLE_DDP_FLIGHT_RECORDER.
    Explain {
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Also writes the calls of all ranks to this folder, in the format of PyTorch's analyser, `torchfrtrace`.
        #[arg(long, value_name = "DIR")]
        torchfrtrace: Option<PathBuf>,
    },

    /// Shows a run as DIR/report.html, a page without scripts: its metrics over steps, how long each rank waits, the last steps of
    /// all ranks side by side, and restarts.
    ///
    /// It looks for what the run has left in DIR and below: JSON lines of metrics (*.jsonl), the timelines of CANDLE_DDP_TRACE, the
    /// folder of --log-dir, which also has the waits of all ranks, and flight records. It says which option records what is not there.
    Report {
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Writes the page to this file instead.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },

    /// Merges the timelines that all ranks wrote to a folder because of CANDLE_DDP_TRACE into DIR/trace.json, for
    /// <https://ui.perfetto.dev>.
    MergeTraces {
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

/// The flags that have become modes. They will be removed after one version.
#[derive(Debug, Clone, clap::Args)]
#[group(multiple = false, conflicts_with_all = ["command", "example", "bin", "bench"])]
pub(crate) struct FormerFlags {
    #[arg(long, value_name = "HOST:PORT", hide = true)]
    status: Option<String>,
    #[arg(long, value_name = "DIR", hide = true)]
    explain: Option<PathBuf>,
    #[arg(long, alias = "merge_traces", value_name = "DIR", hide = true)]
    merge_traces: Option<PathBuf>,
}

impl FormerFlags {
    /// The mode that one of them asks for, after a note.
    pub(crate) fn mode(&mut self, no_secret: bool) -> Option<Mode> {
        let status = self.status.take().map(|address| ("status", Mode::Status { address, no_secret, json: false }));
        let explain = self.explain.take().map(|folder| ("explain", Mode::Explain { folder, torchfrtrace: None }));
        let merge_traces = self.merge_traces.take().map(|folder| ("merge-traces", Mode::MergeTraces { folder }));
        let (name, mode) = status.or(explain).or(merge_traces)?;
        message(format_args!(
            "--{name} is deprecated, and will be removed in the next version: write `ddprun {name}` instead"
        ));
        Some(mode)
    }
}
