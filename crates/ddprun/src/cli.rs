//! The command line as typed. [`Config`](super::Config) holds its meaning.
use super::mode::{FormerFlags, Mode};
use super::options::{BUILD, Options, RANKS, trimmed};
use super::processes::Processes;
use clap::builder::BoolishValueParser;
use std::ffi::OsString;

const AFTER_HELP: &str = "\
Examples:
  ddprun --nproc-per-node 2 target/release/train --epochs 3
  ddprun --nproc-per-node 2 --example digits -- --epochs 3
  ddprun --nproc-per-node 2 python train.py
  ddprun status node0:29500

A command must be the first argument. To start a program of that name, write `ddprun -- status` or `ddprun ./status`.

Every worker gets torchrun's environment variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on. \
Its standard input is empty. ddprun forwards its output line by line; if ddprun runs on a terminal, so does the worker.

When a run ends, ddprun also ends every process that its workers started, even those in their own session: with \
SIGTERM, then with SIGKILL after --shutdown-timeout. After a successful run it waits one second first, and names the \
processes that it ends; start services that should outlive the run separately. If ddprun itself is killed by SIGKILL, \
the kernel kills the workers, but grandchildren survive; use `exec` in wrapper scripts.

If ddprun's output is not read, the workers block, as on any full pipe. At the end of a run ddprun waits while the \
reader keeps reading. If nothing is read for --shutdown-timeout (at most 5 s after a signal), it discards the rest and \
reports how many bytes were lost.

Options can also be set by torchrun's environment variables, such as PET_NNODES; the command line takes precedence. \
torchrun's --monitor-interval and --start-method are accepted and ignored.

SIGUSR1 and SIGUSR2 are forwarded to the processes that have a handler for them, and do not end the run.

Exit code: 0 if every worker exited with 0, even after a signal; otherwise 128 + N if the run was ended by signal N, or \
the exit code of the first worker that failed (128 + N if it was killed by signal N); 2 for an invalid command line; cargo's own code if the build \
failed; 126 if the program is not executable, 127 if it was not found; 1 for everything else.";

/// The command line of `ddprun`: torchrun's options, with `-` or `_` between words.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    name = "ddprun",
    version,
    about = "Starts and supervises the ranks of a distributed program on this machine",
    long_about = None,
    override_usage = "ddprun [OPTIONS] PROGRAM [ARGS]...\n       ddprun [OPTIONS] --example NAME [-- ARGS]...\n       ddprun [OPTIONS] --bin NAME [-- ARGS]...\n       ddprun [OPTIONS] --bench NAME [-- ARGS]...\n       ddprun status [--no-secret] HOST:PORT\n       ddprun explain DIR\n       ddprun merge-traces DIR",
    after_help = AFTER_HELP,
    next_line_help = true,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    subcommand_help_heading = "Commands, which start no workers",
    mut_args = |arg| arg.hide_env(true)
)]
pub(crate) struct Cli {
    /// Workers to start on this machine: a number, `gpu` (one per GPU in CUDA_VISIBLE_DEVICES), `cpu` (one per core
    /// that this process may use) or `auto` (`gpu` if there is one, otherwise `cpu`).
    #[arg(
        long,
        alias = "nproc_per_node",
        env = "PET_NPROC_PER_NODE",
        value_name = "N|auto|cpu|gpu",
        default_value = "1",
        allow_negative_numbers = true,
        help_heading = RANKS
    )]
    pub(crate) nproc_per_node: Processes,

    /// Number of machines. Start ddprun once on each, with the same options and its own --node-rank. A range MIN:MAX
    /// needs --rdzv-backend c10d: the run continues while at least MIN are there, and admits more, up to MAX.
    #[arg(long, env = "PET_NNODES", value_name = "N|MIN:MAX", default_value = "1", help_heading = RANKS)]
    pub(crate) nnodes: String,

    /// Rank of this machine, from 0 to nnodes - 1. Machine 0 hosts the rendezvous store. [default: 0]
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", value_name = "N", value_parser = trimmed::<usize>, help_heading = RANKS)]
    pub(crate) node_rank: Option<usize>,

    /// Name or address of machine 0; the ranks on all machines must be able to reach it. Required for several machines.
    /// [default: 127.0.0.1]
    #[arg(long, alias = "master_addr", env = "PET_MASTER_ADDR", value_name = "HOST", help_heading = RANKS)]
    pub(crate) master_addr: Option<String>,

    /// Port of the store on machine 0. [default: a free port on one machine, 29500 on several]
    #[arg(long, alias = "master_port", env = "PET_MASTER_PORT", value_name = "PORT", value_parser = trimmed::<u16>, help_heading = RANKS)]
    pub(crate) master_port: Option<u16>,

    /// Runs on this machine alone. The store's port is a free one, reserved from before the workers start until they
    /// have exited, so several runs can share a machine. ddprun does this on a single machine anyway; the option exists
    /// for scripts written for torchrun.
    #[arg(long, env = "PET_STANDALONE", value_parser = BoolishValueParser::new(), help_heading = RANKS)]
    pub(crate) standalone: bool,

    /// Name of this run: TORCHELASTIC_RUN_ID of the workers, and the name of the folder under --log-dir. [default:
    /// derived from the time on one machine, `none` on several]
    #[arg(
        long,
        visible_alias = "rdzv-id",
        aliases = ["run_id", "rdzv_id"],
        env = "PET_RDZV_ID",
        value_name = "ID",
        help_heading = RANKS
    )]
    pub(crate) run_id: Option<String>,

    /// Builds and runs this example of the current cargo package. cargo reports the path, so workspaces and
    /// CARGO_TARGET_DIR work. Arguments for the example follow `--`.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["bin", "bench"], help_heading = BUILD)]
    pub(crate) example: Option<String>,

    /// Builds and runs this binary of the current cargo package. Arguments for the binary follow `--`.
    #[arg(long, value_name = "NAME", conflicts_with = "bench", help_heading = BUILD)]
    pub(crate) bin: Option<String>,

    /// Builds and runs this bench of the current cargo package, one with `harness = false`. Arguments for it follow `--`.
    #[arg(long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) bench: Option<String>,

    /// Workspace package that contains the example, binary or bench. [default: cargo's choice]
    #[arg(short, long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) package: Option<String>,

    /// Cargo features to build with, separated by commas; may be repeated. [default: the package's own]
    #[arg(long, value_name = "LIST", help_heading = BUILD)]
    pub(crate) features: Vec<String>,

    /// Cargo profile to build with. [default: release, because training in a debug build is many times slower]
    #[arg(long, value_name = "NAME", conflicts_with = "debug", help_heading = BUILD)]
    pub(crate) profile: Option<String>,

    /// Builds without optimisation; short for --profile dev.
    #[arg(long, help_heading = BUILD)]
    pub(crate) debug: bool,

    #[command(flatten)]
    pub(crate) options: Options,

    /// Sets LOCAL_RANK=0 for every worker, and CUDA_VISIBLE_DEVICES to the one GPU that it may use.
    #[arg(
        long,
        alias = "virtual_local_rank",
        env = "PET_VIRTUAL_LOCAL_RANK",
        value_parser = BoolishValueParser::new(),
        help_heading = RANKS
    )]
    pub(crate) virtual_local_rank: bool,

    /// Accepted for compatibility with torchrun, which needs it for compiled programs: ddprun always runs PROGRAM
    /// directly.
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = BoolishValueParser::new(), help_heading = RANKS)]
    pub(crate) no_python: bool,

    #[command(flatten)]
    pub(crate) former: FormerFlags,

    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,

    /// torchrun's option to run a Python module; refused with a hint.
    #[arg(short, long, env = "PET_MODULE", value_parser = BoolishValueParser::new(), hide = true)]
    pub(crate) module: bool,

    /// How machines meet: `static` (a fixed number, each with its --node-rank, at --master-addr), or `c10d` (at
    /// --rdzv-endpoint, where they get their ranks). [default: static]
    #[arg(long, alias = "rdzv_backend", env = "PET_RDZV_BACKEND", value_name = "static|c10d", help_heading = RANKS)]
    pub(crate) rdzv_backend: Option<String>,

    /// Where machines meet with --rdzv-backend c10d. The machine that has this address hosts the store. [default port: 29400]
    #[arg(long, alias = "rdzv_endpoint", env = "PET_RDZV_ENDPOINT", value_name = "HOST[:PORT]", help_heading = RANKS)]
    pub(crate) rdzv_endpoint: Option<String>,

    /// Times of the meeting, in seconds, as KEY=VALUE,…: join_timeout (600: for the required machines),
    /// last_call_timeout (30: for more of them), keep_alive_interval (0.5) and keep_alive_max_attempt (10): a machine
    /// is dead after so many intervals without a sign of life; exit_barrier_timeout (300: how long a machine that has
    /// finished waits for the others). is_host=true makes this machine host the store.
    #[arg(long, alias = "rdzv_conf", env = "PET_RDZV_CONF", value_name = "LIST", help_heading = RANKS)]
    pub(crate) rdzv_conf: Option<String>,

    /// This machine's address in torchrun's rendezvous; refused with a hint, like the next option.
    #[arg(long, alias = "local_addr", env = "PET_LOCAL_ADDR", value_name = "HOST", hide = true)]
    pub(crate) local_addr: Option<String>,

    /// The ranks whose output torchrun shows.
    #[arg(long, alias = "local_ranks_filter", env = "PET_LOCAL_RANKS_FILTER", value_name = "LIST", hide = true)]
    pub(crate) local_ranks_filter: Option<String>,

    /// torchrun's polling interval for its workers; ignored, because ddprun is notified when a worker exits.
    #[arg(long, alias = "monitor_interval", env = "PET_MONITOR_INTERVAL", value_name = "SECONDS", hide = true)]
    pub(crate) monitor_interval: Option<String>,

    /// torchrun's start method for Python processes; ignored.
    #[arg(long, alias = "start_method", env = "PET_START_METHOD", value_name = "NAME", hide = true)]
    pub(crate) start_method: Option<String>,

    /// The program and its arguments; with --example, --bin or --bench, only the arguments.
    #[arg(value_name = "PROGRAM [ARGS]", trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}
