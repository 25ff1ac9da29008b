//! Failures of the CPU engine: every rank returns, in time, an error that names the cause.

/// Runs this folder's tests over one kind of connection, with the ranks on the given hosts.
macro_rules! failures_over {
    ($(#[$doc:meta])* $name:ident, $transport:expr, $host:expr) => {
        $(#[$doc])*
        #[path = "."]
        mod $name {
            #[path = "construction.rs"]
            mod construction;
            #[path = "desync.rs"]
            mod desync;
            #[path = "leaving.rs"]
            mod leaving;
            #[path = "locked.rs"]
            mod locked;
            #[path = "support.rs"]
            mod support;
            #[path = "timeout.rs"]
            mod timeout;

            use support::*;

            const TRANSPORT: CpuTransport = $transport;

            fn host(rank: usize) -> usize {
                $host(rank)
            }
        }
    };
}

failures_over!(shared_memory, CpuTransport::SharedMemory, |_| 0);
failures_over!(tcp, CpuTransport::Tcp, |rank| rank);
failures_over!(
    /// Rank 1, which usually is the one that fails, shares its host with rank 2.
    two_hosts,
    CpuTransport::Auto,
    |rank: usize| [0, 1, 1, 0][rank]
);
