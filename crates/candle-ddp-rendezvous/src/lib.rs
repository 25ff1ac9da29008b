//! How the ranks of a distributed program find each other: launcher environments, init methods, and key-value stores that
//! PyTorch understands.
//!
//! The entry point is [`rendezvous()`]. It returns a store for this run, the rank of this process, and its address.
//!
//! This is the part that [candle-ddp](https://docs.rs/candle-ddp) and its launcher, `ddprun`, have in common; programs
//! use its stores as `candle_ddp::rendezvous`. It does not depend on candle. Items hidden from the documentation are for these
//! two only, and change with them.
mod cancellation;
mod environment;
pub mod error;
mod file_log;
mod file_store;
mod generation;
mod hash_store;
mod hosting;
mod init_method;
mod init_store;
mod init_watcher;
mod join;
#[doc(hidden)]
pub mod json;
mod last_will;
#[doc(hidden)]
pub mod liveness;
mod meeting;
mod mpi;
mod options;
mod plan;
mod prefix_store;
mod progress;
mod reports;
#[doc(hidden)]
pub mod secret;
mod slurm;
mod store;
mod tcp_store;

pub use environment::{Environment, Launcher};
pub use error::{Error, Failure, Result};
pub use file_store::FileStore;
pub use hash_store::HashStore;
pub use init_method::{InitMethod, Location};
pub use last_will::LastWill;
pub use meeting::{Rendezvous, rendezvous};
pub use options::RendezvousOptions;
pub use prefix_store::PrefixStore;
pub use secret::Secret;
pub use store::Store;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use tcp_store::fuzz_store_protocol;
pub use tcp_store::{TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions};

/// For candle-ddp, its engines and ddprun.
#[doc(hidden)]
pub use self::{
    cancellation::{Cancellation, Reason},
    generation::{AGENT_VARIABLE, BEGUN, Decision, Generations, Member},
    hosting::{check_room, host as host_store},
    init_watcher::InitWatcher,
    join::host as host_identity,
    meeting::{Meeting, RunStore, meet},
    plan::STORE_VARIABLE,
    progress::{RankStatus, count_step, count_wait, know_waits, milliseconds, rank_status_key},
    reports::{Reports, StoreReports, decode_report, decode_reports, encode_report},
    store::{absent_ranks, discard},
    tcp_store::{Listening, RUN_ID, loopback},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs this crate's fuzz functions on the seeds in `fuzz/`.
#[cfg(test)]
mod fuzz_seeds {
    use std::path::Path;

    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
        let seeds: Vec<_> =
            folder.read_dir().unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
        assert!(!seeds.is_empty(), "{} is empty", folder.display());
        seeds
    }

    #[test]
    fn no_seed_fails() {
        for seed in seeds("store_protocol") {
            crate::fuzz_store_protocol(&seed);
        }
    }
}
