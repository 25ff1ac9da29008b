use crate::Result;
use crate::rendezvous::Secret;
use candle_ddp_env::PROCESS;
use std::net::IpAddr;
use std::time::Duration;

/// Options of the CPU engine, for [`Engine::new`](crate::Engine::new). They must be the same on all ranks unless stated
/// otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// How long the construction, and later each call, may take before the group fails. Default: 30 minutes, as in
    /// PyTorch's Gloo.
    pub timeout: Duration,
    /// A host that is unreachable for this long ends the group; a shorter outage of the network does not, unless it
    /// delays a call beyond `timeout`. Systems count in whole seconds, and close connections by themselves after about
    /// a quarter of an hour. May differ between ranks. Default: 2 minutes.
    pub lost_after: Duration,
    /// The address of this host to which its peers connect. May differ between ranks. Default: 127.0.0.1, for groups on
    /// one host.
    pub address: Option<IpAddr>,
    /// How data travels. For tests and measurements.
    pub transport: CpuTransport,
    /// The number of bytes sent at a time between two ranks if data is reduced or forwarded, for tests. Default: the value
    /// of the environment variable `CANDLE_DDP_CPU_SEGMENT_BYTES`, or the value that measured best for the transport.
    #[doc(hidden)]
    pub segment_bytes: Option<usize>,
    /// If each rank receives no more bytes than this in total, all ranks send all data to all others; for tests. Default:
    /// the value of the environment variable `CANDLE_DDP_CPU_SMALL_BYTES`, or the value that measured best for the
    /// transport.
    #[doc(hidden)]
    pub small_bytes: Option<usize>,
    /// The secret that ranks prove to each other when they connect. Default: the one in the environment
    /// ([`Secret::from_env`]), if any.
    pub secret: Option<Secret>,
    /// Ranks with different labels are treated as on different hosts, for tests. May differ between ranks. Default: the
    /// value of the environment variable `CANDLE_DDP_CPU_HOST`.
    #[doc(hidden)]
    pub host: Option<String>,
    /// How long the construction may take, if that differs from `timeout`: tests of calls that time out shorten only
    /// their time-out.
    #[doc(hidden)]
    pub construction_timeout: Option<Duration>,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30 * 60),
            lost_after: Duration::from_secs(120),
            address: None,
            transport: CpuTransport::Auto,
            segment_bytes: None,
            small_bytes: None,
            secret: None,
            host: None,
            construction_timeout: None,
        }
    }
}

/// How the data of the CPU engine travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuTransport {
    /// The value of the environment variable `CANDLE_DDP_CPU_TRANSPORT` (`auto`, `tcp` or `shm`; for tests and
    /// measurements). Its default, `auto`, uses shared memory between ranks that can map each other's memory, and TCP
    /// between others.
    #[default]
    Auto,
    /// TCP, even between ranks of one host.
    Tcp,
    /// Shared memory. It is an error if ranks cannot share it, for example because they are on different hosts.
    SharedMemory,
}

impl CpuTransport {
    /// Replaces `Auto` by the environment's choice, if any.
    pub(crate) fn resolve(self) -> Result<Self> {
        Ok(match (self, PROCESS.choice("CANDLE_DDP_CPU_TRANSPORT")?) {
            (Self::Auto, Some("tcp")) => Self::Tcp,
            (Self::Auto, Some("shm")) => Self::SharedMemory,
            (given, _) => given,
        })
    }
}
