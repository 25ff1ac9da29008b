//! The command line as it was typed. [`Config`](super::Config) is what it means.
use super::processes::Processes;
use super::streams::StreamSelection;
use clap::builder::BoolishValueParser;
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  ddprun --nproc-per-node 2 target/release/train --epochs 3
  ddprun --nproc-per-node 2 --example digits -- --epochs 3
  ddprun --nproc-per-node 2 python train.py

Every worker finds its rank in torchrun's environment: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on. \
Its standard input is empty. Its output is passed on line by line; it sees a terminal where ddprun has one.

Whatever a worker has started ends with the run, also in a session of its own: SIGTERM, then SIGKILL after \
--shutdown-timeout. Where all workers ended well, this begins after a second, and ddprun names what it ends: start a \
service that is to outlive the run outside of it. If ddprun itself is killed by SIGKILL, the kernel kills the workers, \
but what they have started survives: in a wrapper script, start the program with `exec`, so that it is the worker.

The workers wait when nobody reads ddprun's output, as they would for any full pipe. At the end ddprun waits for a \
reader as long as it reads. When nothing is read for --shutdown-timeout (5 s at most after a signal), it gives up the \
rest and says how much that is.

Options also come from torchrun's variables, as PET_NNODES: where both are given, the option counts. \
torchrun's --monitor-interval and --start-method are accepted and change nothing.

Exit code: 0 when every worker ended with 0; that of the first worker that failed (128 + N when signal N killed it); \
128 + N after ddprun itself was sent signal N; 2 for a command line that makes no sense; cargo's own when the build \
failed; 126 or 127 for a program that is not executable or not there; 1 for everything else.";

/// The command line of `ddprun`, as it was typed: torchrun's options, with `-` or `_` between words.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    name = "ddprun",
    version,
    about = "Starts the ranks of a distributed program on this machine and looks after them",
    long_about = None,
    override_usage = "ddprun [OPTIONS] PROGRAM [ARGS]...\n       ddprun [OPTIONS] --example NAME [-- ARGS]...\n       ddprun [OPTIONS] --bin NAME [-- ARGS]...",
    after_help = AFTER_HELP,
    next_line_help = true,
    mut_args = |arg| arg.hide_env(true)
)]
pub(crate) struct Cli {
    /// Workers to start on this machine: a number, `gpu` (one per GPU, CUDA_VISIBLE_DEVICES respected), `cpu` (one
    /// per core that this process may use) or `auto` (`gpu` where there is one, else `cpu`).
    #[arg(
        long,
        alias = "nproc_per_node",
        env = "PET_NPROC_PER_NODE",
        value_name = "N|auto|cpu|gpu",
        default_value = "1",
        help_heading = RANKS
    )]
    pub(crate) nproc_per_node: Processes,

    /// Machines that take part. Start ddprun once on each, with the same options and its own --node-rank. A range
    /// MIN:MAX is not supported.
    #[arg(long, env = "PET_NNODES", value_name = "N", default_value = "1", help_heading = RANKS)]
    pub(crate) nnodes: String,

    /// This machine's number, from 0 to nnodes - 1. The machine with number 0 hosts the store at which ranks meet.
    /// [default: 0]
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", value_name = "N", help_heading = RANKS)]
    pub(crate) node_rank: Option<usize>,

    /// Name or address of machine 0, which the ranks of all machines must be able to reach. Needed with several
    /// machines. [default: 127.0.0.1]
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", value_name = "HOST", help_heading = RANKS)]
    pub(crate) master_addr: Option<String>,

    /// Port of the store on machine 0. [default: a free port on one machine, 29500 on several]
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", value_name = "PORT", help_heading = RANKS)]
    pub(crate) master_port: Option<u16>,

    /// A run on this machine alone, at a free port that is held from before the workers start until they have ended,
    /// so that several runs can share a machine. It is what ddprun does on one machine anyway; scripts written for
    /// torchrun say it.
    #[arg(long, env = "PET_STANDALONE", value_parser = BoolishValueParser::new(), help_heading = RANKS)]
    pub(crate) standalone: bool,

    /// Name of this run: TORCHELASTIC_RUN_ID of the workers, and the folder's name under --log-dir. [default: made
    /// from the time on one machine, `none` on several]
    #[arg(
        long,
        visible_alias = "rdzv-id",
        aliases = ["run_id", "rdzv_id"],
        env = "PET_RDZV_ID",
        value_name = "ID",
        help_heading = RANKS
    )]
    pub(crate) run_id: Option<String>,

    /// Role of the workers: ROLE_NAME in their environment and ${role_name} in prefixes.
    #[arg(long, env = "PET_ROLE", value_name = "NAME", default_value = "default", help_heading = RANKS)]
    pub(crate) role: String,

    /// Builds this example of the current cargo package and runs it. Its path comes from cargo, so that workspaces
    /// and CARGO_TARGET_DIR work. Arguments for it follow `--`.
    #[arg(long, value_name = "NAME", conflicts_with = "bin", help_heading = BUILD)]
    pub(crate) example: Option<String>,

    /// Builds this binary of the current cargo package and runs it. Arguments for it follow `--`.
    #[arg(long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) bin: Option<String>,

    /// The workspace's package that holds the example or the binary. [default: cargo's choice]
    #[arg(short, long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) package: Option<String>,

    /// Cargo features to build with, separated by commas; may be repeated. [default: the package's own]
    #[arg(long, value_name = "LIST", help_heading = BUILD)]
    pub(crate) features: Vec<String>,

    /// Cargo profile to build with. [default: release, since training in a debug build takes many times as long]
    #[arg(long, value_name = "NAME", conflicts_with = "debug", help_heading = BUILD)]
    pub(crate) profile: Option<String>,

    /// Builds without optimisation: short for --profile dev.
    #[arg(long, help_heading = BUILD)]
    pub(crate) debug: bool,

    /// Folder for log files: DIR/RUN_ID/attempt_0/LOCAL_RANK/{stdout.log,stderr.log,error.json}. Earlier logs are
    /// never overwritten: a RUN_ID that is taken gets a number behind it. [default: a new folder in the system's
    /// temporary one, when --redirects or --tee asks for files]
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", value_name = "DIR", help_heading = OUTPUT)]
    pub(crate) log_dir: Option<PathBuf>,

    /// Output that goes to log files instead of being shown: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank,
    /// as in `0:1,1:3`.
    #[arg(short, long, env = "PET_REDIRECTS", value_name = "STREAMS", default_value = "0", help_heading = OUTPUT)]
    pub(crate) redirects: StreamSelection,

    /// Output that goes to log files and is shown as well, each line with a prefix: same values as --redirects.
    #[arg(short, long, env = "PET_TEE", value_name = "STREAMS", default_value = "0", help_heading = OUTPUT)]
    pub(crate) tee: StreamSelection,

    /// What to put before each line that is shown, with ${role_name}, ${local_rank} and ${rank} filled in. [default:
    /// nothing, and `[${role_name}${local_rank}]:` for --tee]
    #[arg(long, alias = "log_line_prefix_template", value_name = "TEMPLATE", help_heading = OUTPUT)]
    pub(crate) log_line_prefix_template: Option<String>,

    /// Seconds that workers have between being told to end (SIGTERM, or the signal that ddprun was sent) and being
    /// killed: time to write a last checkpoint.
    #[arg(long, alias = "shutdown_timeout", value_name = "SECONDS", default_value = "30", help_heading = ENDING)]
    pub(crate) shutdown_timeout: f64,

    /// Signals that end the run: the first is passed on to the workers, and ddprun ends after them. A second one, of
    /// any kind, kills them at once; within half a second it counts as the first.
    #[arg(
        long,
        alias = "signals_to_handle",
        env = "PET_SIGNALS_TO_HANDLE",
        value_name = "LIST",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help_heading = ENDING
    )]
    pub(crate) signals_to_handle: String,

    /// Restarts of a failed run. Only 0 is supported as yet. [default: 0]
    #[arg(
        long,
        alias = "max_restarts",
        env = "PET_MAX_RESTARTS",
        value_name = "N",
        default_value = "0",
        hide_default_value = true,
        help_heading = ENDING
    )]
    pub(crate) max_restarts: u32,

    /// Accepted, since torchrun needs it for programs like yours: PROGRAM is always run as it is.
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = BoolishValueParser::new(), help_heading = RANKS)]
    pub(crate) no_python: bool,

    /// Makes one time line of those that all ranks left in this folder when CANDLE_DDP_TRACE named it: DIR/trace.json,
    /// for <https://ui.perfetto.dev>. Starts nothing.
    #[arg(
        long,
        alias = "merge_traces",
        value_name = "DIR",
        conflicts_with_all = ["command", "example", "bin"],
        help_heading = OUTPUT
    )]
    pub(crate) merge_traces: Option<PathBuf>,

    /// torchrun's way to run a Python module; refused with a hint.
    #[arg(short, long, env = "PET_MODULE", value_parser = BoolishValueParser::new(), hide = true)]
    pub(crate) module: bool,

    /// torchrun's ways to meet; refused with a hint, as are the next six.
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", value_name = "NAME", hide = true)]
    pub(crate) rdzv_backend: Option<String>,

    /// Where torchrun's nodes meet.
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", value_name = "HOST:PORT", hide = true)]
    pub(crate) rdzv_endpoint: Option<String>,

    /// Settings of that meeting.
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", value_name = "LIST", hide = true)]
    pub(crate) rdzv_conf: Option<String>,

    /// This machine's address in torchrun's meeting.
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", value_name = "HOST", hide = true)]
    pub(crate) local_addr: Option<String>,

    /// The ranks whose output torchrun shows.
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", value_name = "LIST", hide = true)]
    pub(crate) local_ranks_filter: Option<String>,

    /// torchrun's binding of workers to the cores near their GPU.
    #[arg(long, alias = "numa_binding", value_name = "NAME", hide = true)]
    pub(crate) numa_binding: Option<String>,

    /// torchrun's LOCAL_RANK=0 for every worker, with one GPU visible to each.
    #[arg(
        long,
        alias = "virtual_local_rank",
        env = "PET_VIRTUAL_LOCAL_RANK",
        value_parser = BoolishValueParser::new(),
        hide = true
    )]
    pub(crate) virtual_local_rank: bool,

    /// How often torchrun looks after its workers; changes nothing, since ddprun hears of their end at once.
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", value_name = "SECONDS", hide = true)]
    pub(crate) monitor_interval: Option<String>,

    /// How torchrun's Python starts processes; changes nothing.
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", value_name = "NAME", hide = true)]
    pub(crate) start_method: Option<String>,

    /// The program and its arguments; with --example or --bin the arguments alone.
    #[arg(value_name = "PROGRAM [ARGS]", trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

const RANKS: &str = "Ranks";
const BUILD: &str = "Building with cargo";
const OUTPUT: &str = "Output";
const ENDING: &str = "Ending";
