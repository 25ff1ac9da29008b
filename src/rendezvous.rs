//! Key-value stores, which PyTorch understands as well, and the secret of a job.
//!
//! [`init_process_group`](crate::init_process_group) finds the other ranks by itself, and
//! [`ProcessGroup::store`](crate::ProcessGroup::store) is the store of a group. A program makes its own store for
//! [`ProcessGroup::with_communicator`](crate::ProcessGroup::with_communicator). How ranks find each other, in the environments that
//! launchers set, is in the crate [candle-ddp-rendezvous](https://docs.rs/candle-ddp-rendezvous).
pub(crate) use candle_ddp_rendezvous::{
    AGENT_VARIABLE, BEGUN, Cancellation, Decision, Generations, InitWatcher, Meeting, Member, Reason, Rendezvous,
    RendezvousOptions, RunStore, StoreReports, absent_ranks, count_step, decode_report, decode_reports, encode_report,
    meet,
};
#[doc(no_inline)]
pub use candle_ddp_rendezvous::{
    Error, FileStore, HashStore, LastWill, PrefixStore, Result, Secret, Store, TcpStore, TcpStoreOptions,
    TcpStoreServer, TcpStoreServerOptions,
};
#[cfg(feature = "nccl")]
pub(crate) use candle_ddp_rendezvous::{discard, host_identity};
