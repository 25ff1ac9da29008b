//! How ranks find each other: launcher environments, init methods, and key-value stores.
//!
//! The entry point is [`rendezvous`]. It returns a store for this run, the rank of this process, and its address.
#[cfg(feature = "nccl")]
pub(crate) use candle_ddp_rendezvous::host_identity;
pub(crate) use candle_ddp_rendezvous::{
    AGENT_VARIABLE, BEGUN, Cancellation, Decision, Generations, InitWatcher, Meeting, Member, Reason, RunStore,
    StoreReports, absent_ranks, count_step, decode_report, decode_reports, discard, encode_report, loopback, meet,
    secret,
};
#[doc(inline)]
pub use candle_ddp_rendezvous::{
    Environment, Error, FileStore, HashStore, InitMethod, LastWill, Launcher, Location, PrefixStore, Rendezvous,
    RendezvousOptions, Result, Secret, Store, TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions,
    rendezvous,
};
