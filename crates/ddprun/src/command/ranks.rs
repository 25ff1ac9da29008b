//! The options that say which ranks there are, and where they meet.
use super::hosts::{self, Hosts};
use super::options::trimmed;
use super::processes::Processes;
use clap::builder::BoolishValueParser;

/// Part of the command line of a run and of `ddprun check`.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct Ranks {
    /// Workers to start on this machine, which may be more or fewer than on others: a number, `gpu` (one per GPU in CUDA_VISIBLE_DEVICES), `cpu` (one per core
    /// that this process may use) or `auto` (`gpu` if there is one, otherwise `cpu`).
    #[arg(
        long,
        env = "PET_NPROC_PER_NODE",
        value_name = "N|auto|cpu|gpu",
        default_value = "1",
        allow_negative_numbers = true
    )]
    pub(crate) nproc_per_node: Processes,

    /// Number of machines. Start ddprun once on each, with the same options and its own --node-rank. A range MIN:MAX
    /// needs --rdzv-backend c10d: the run continues while at least MIN are there, and admits more, up to MAX.
    #[arg(long, env = "PET_NNODES", value_name = "N|MIN:MAX", default_value = "1")]
    pub(crate) nnodes: String,

    /// Rank of this machine, from 0 to nnodes - 1. Machine 0 hosts the rendezvous store. [default: 0]
    #[arg(long, env = "PET_NODE_RANK", value_name = "N", value_parser = trimmed::<usize>)]
    pub(crate) node_rank: Option<usize>,

    /// Name or address of machine 0; the ranks on all machines must be able to reach it. Required for several machines.
    /// [default: 127.0.0.1]
    #[arg(long, env = "PET_MASTER_ADDR", value_name = "HOST")]
    pub(crate) master_addr: Option<String>,

    /// Port of the store on machine 0. [default: a free port on one machine, 29500 on several]
    #[arg(long, env = "PET_MASTER_PORT", value_name = "PORT", value_parser = trimmed::<u16>)]
    pub(crate) master_port: Option<u16>,

    /// Runs on this machine alone. The store's port is a free one, reserved from before the workers start until they
    /// have exited, so several runs can share a machine. ddprun does this on a single machine anyway; the option exists
    /// for scripts written for torchrun.
    #[arg(long, env = "PET_STANDALONE", value_parser = BoolishValueParser::new())]
    pub(crate) standalone: bool,

    /// Name of this run: TORCHELASTIC_RUN_ID of the workers, and the name of the folder under --log-dir. [default:
    /// derived from the time on one machine, `none` on several]
    #[arg(long, visible_alias = "rdzv-id", alias = "rdzv_id", env = "PET_RDZV_ID", value_name = "ID")]
    pub(crate) run_id: Option<String>,

    /// How machines meet: `static` (a fixed number, each with its --node-rank, at --master-addr), or `c10d` (at
    /// --rdzv-endpoint, where they get their ranks). [default: static]
    #[arg(long, env = "PET_RDZV_BACKEND", value_name = "static|c10d")]
    pub(crate) rdzv_backend: Option<String>,

    /// Where machines meet with --rdzv-backend c10d. The machine that has this address hosts the store. [default port: 29400]
    #[arg(long, env = "PET_RDZV_ENDPOINT", value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,

    /// Times of the meeting, in seconds, as KEY=VALUE,…: join_timeout (600: for the required machines),
    /// last_call_timeout (30: for more of them), keep_alive_interval (0.5) and keep_alive_max_attempt (10): a machine
    /// is dead after so many intervals without a sign of life; exit_barrier_timeout (300: how long a machine that has
    /// finished waits for the others). is_host=true makes this machine host the store.
    #[arg(long, env = "PET_RDZV_CONF", value_name = "LIST")]
    pub(crate) rdzv_conf: Option<String>,

    /// Starts the run on these machines from here, over ssh: HOST or HOST:WORKERS, with commas between them. Without a number,
    /// --nproc-per-node holds there. The first one hosts the store. ddprun, the program and the current folder must have the same path
    /// on all of them; the secret reaches them over ssh. Of the environment, they get CANDLE_DDP_…, NCCL_…, PET_… and RUST_….
    #[arg(long, value_name = "LIST", value_parser = hosts::parse_list)]
    pub(crate) hosts: Option<Hosts>,

    /// Gives this variable of this machine, with its value, to the workers on all machines of --hosts. For several variables, give
    /// it several times. The values take the way of the secret, and are on no command line.
    #[arg(long, value_name = "NAME", requires = "hosts")]
    pub(crate) env: Vec<String>,

    /// The program that runs a command on a machine of --hosts, with its options; it is called with the machine's name and the
    /// command. [default: ssh -T -o BatchMode=yes …]
    #[arg(long, env = "CANDLE_DDP_RSH", value_name = "COMMAND")]
    pub(crate) rsh: Option<String>,
}
