//! `--hosts`: this ddprun starts one on each machine over ssh. These are the agents of an ordinary run with a fixed number of
//! nodes. This one forwards their output, and signals to them.
//!
//! A connection's standard input carries the secret in the first line, the variables of `--env` in the second, and then a line with
//! the name of each signal. When it ends, because this process or the connection does, the agent ends its workers.
mod remote;
mod start;

pub(crate) use remote::{follow, is_agent};
pub(crate) use start::run;

/// Is set for the agents.
const AGENT: &str = "CANDLE_DDP_HOSTS_AGENT";
const NNODES: &str = "PET_NNODES";
const NODE_RANK: &str = "PET_NODE_RANK";
const MASTER_ADDR: &str = "PET_MASTER_ADDR";

/// The variables by which agents know their part, which are not for their workers.
pub(crate) const OWN: [&str; 4] = [AGENT, NNODES, NODE_RANK, MASTER_ADDR];
