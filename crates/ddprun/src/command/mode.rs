//! The subcommands of `ddprun`.
use super::options::{RANKS, Tolerance};
use super::ranks::Ranks;
use crate::numa::{self, Binding};
use std::net::IpAddr;
use std::path::PathBuf;

/// The name of the hidden mode, a rank of a check.
pub(crate) const WORKER: &str = "check-worker";

/// A subcommand.
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
        #[arg(long)]
        no_secret: bool,
        /// Shows it as one line of JSON, whose fields candle-ddp's docs/watching.md describes.
        #[arg(long)]
        json: bool,
    },

    /// Measures cores, memory and connections of all nodes before a run, and names what is slow or missing: exit code 1.
    ///
    /// Start it on every machine, with the options that say which ranks a run has and where they meet. Each core multiplies
    /// matrices, each rank copies memory, each pair of ranks exchanges messages, and all add numbers up (all-reduce). Clocks,
    /// limits, free memory, versions and GPUs of the nodes are compared.
    Check(Box<Check>),

    /// Hosts the store of a run on several nodes, on a machine that starts no workers: any node may then be lost, and a spare can
    /// take its place.
    ///
    /// Start it with the options that say which ranks the run has and where they meet, with --rdzv-backend c10d; the nodes get the same
    /// options. It ends with the run, and has its exit code. A signal to it ends the run on all nodes.
    HostStore(Box<HostStore>),

    /// Makes a package that trains: a loop with validation and checkpoints, tests on one rank and on two, and a script for Slurm.
    New {
        /// Its folder, which must not exist yet, or be empty. Its last part is the package's name.
        #[arg(value_name = "PATH")]
        path: PathBuf,
        /// The sources of candle-ddp. [default: those that this ddprun was built from]
        #[arg(long, value_name = "DIR")]
        candle_ddp: Option<PathBuf>,
    },

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

/// The command line of `ddprun host-store`.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct HostStore {
    /// How often workers may be restarted, as in a run.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) max_restarts: u32,

    /// The store has no secret, as in a run.
    #[arg(long)]
    pub(crate) no_secret: bool,

    /// Records the steps and waits of all ranks in DIR/RUN_ID, for `ddprun report`.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,

    /// Serves the metrics of the run, as in a run.
    #[arg(long, value_name = "PORT")]
    pub(crate) metrics_port: Option<u16>,

    /// Address for --metrics-port.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics_addr: Option<IpAddr>,

    #[command(flatten, next_help_heading = RANKS)]
    pub(crate) ranks: Ranks,
}

/// How a check is made and shown.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub(crate) struct Manner {
    /// How many times slower than most a rank must be to count as an outlier. Connections between ranks may differ by twice
    /// this.
    #[arg(long, value_name = "FACTOR", default_value_t)]
    pub(crate) tolerance: Tolerance,

    /// Measures less, in about a third of the time.
    #[arg(long)]
    pub(crate) quick: bool,

    /// Shows all measurements as one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// Measures only what concerns several nodes, and shows only what is wrong.
    #[arg(long, hide = true)]
    pub(crate) joint: bool,

    /// The most bytes of a call or a copy, for tests of builds without optimisation.
    #[arg(long, hide = true, default_value_t = usize::MAX)]
    pub(crate) most_bytes: usize,
}

/// The command line of `ddprun check`.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) manner: Manner,

    #[command(flatten, next_help_heading = RANKS)]
    pub(crate) ranks: Ranks,

    /// Binds each rank to processors, as in a run.
    #[arg(long, value_name = "KIND", value_parser = numa::parse)]
    pub(crate) numa_binding: Option<Binding>,

    /// The store has no secret, as in a run.
    #[arg(long)]
    pub(crate) no_secret: bool,
}
