//! How ranks find each other: launcher environments, init methods, and key-value stores.
//!
//! The entry point is [`rendezvous`]. It returns a store for this run, the rank of this process, and its address.
mod cancellation;
mod environment;
mod file_log;
mod file_store;
mod generation;
mod hash_store;
mod hosting;
mod init_method;
mod init_store;
mod init_watcher;
mod join;
pub(crate) mod json;
mod last_will;
mod meeting;
mod mpi;
mod options;
mod plan;
mod prefix_store;
mod progress;
mod reports;
pub(crate) mod secret;
mod slurm;
mod store;
mod tcp_store;

pub(crate) use cancellation::{Cancellation, Reason};
pub use environment::{Environment, Launcher};
pub use file_store::FileStore;
pub(crate) use generation::{AGENT_VARIABLE, BEGUN, Decision, Generations, Member};
pub use hash_store::HashStore;
#[cfg(feature = "launcher")]
pub(crate) use hosting::{check_room, host as host_store};
pub use init_method::{InitMethod, Location};
pub(crate) use init_watcher::InitWatcher;
#[cfg(feature = "nccl")]
pub(crate) use join::host;
pub use last_will::LastWill;
pub(crate) use meeting::{Meeting, RunStore, meet};
pub use meeting::{Rendezvous, rendezvous};
pub use options::RendezvousOptions;
#[cfg(feature = "launcher")]
pub(crate) use plan::STORE_VARIABLE;
pub use prefix_store::PrefixStore;
pub(crate) use progress::count_step;
#[cfg(feature = "launcher")]
pub(crate) use progress::{RankStatus, milliseconds, rank_status_key};
pub(crate) use reports::{StoreReports, decode_report, decode_reports, encode_report};
pub use secret::Secret;
pub use store::Store;
pub(crate) use store::{absent_ranks, discard};
#[cfg(any(test, fuzzing))]
pub(crate) use tcp_store::fuzz_store_protocol;
pub(crate) use tcp_store::loopback;
#[cfg(feature = "launcher")]
pub(crate) use tcp_store::{Listening, RUN_ID};
pub use tcp_store::{TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions};
