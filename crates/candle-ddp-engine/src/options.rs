use crate::Result;
use crate::rendezvous::Secret;
use candle_ddp_env::Variables;
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
    /// How data travels. For tests and measurements. Default: the value of the environment variable
    /// `CANDLE_DDP_CPU_TRANSPORT` (`auto`, `tcp` or `shm`), or [`CpuTransport::Auto`].
    pub transport: Option<CpuTransport>,
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
            transport: None,
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
    /// Shared memory between ranks that can map each other's memory, and TCP between others.
    #[default]
    Auto,
    /// TCP, even between ranks of one host.
    Tcp,
    /// Shared memory. It is an error if ranks cannot share it, for example because they are on different hosts.
    SharedMemory,
}

impl CpuTransport {
    /// The transport that the program gives, or else the environment.
    pub(crate) fn resolve(given: Option<Self>, environment: Variables) -> Result<Self> {
        let chosen = environment.choice("CANDLE_DDP_CPU_TRANSPORT")?;
        Ok(given.unwrap_or(match chosen {
            Some("tcp") => Self::Tcp,
            Some("shm") => Self::SharedMemory,
            _ => Self::Auto,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn the_program_takes_precedence_over_the_environment() {
        let resolve = |given, value: &str| {
            CpuTransport::resolve(given, Variables::new(&|_| Some(OsString::from(value))))
                .map_err(|error| error.to_string())
        };
        let [auto, tcp, shm] = [CpuTransport::Auto, CpuTransport::Tcp, CpuTransport::SharedMemory];
        assert_eq!(["auto", "tcp", "shm", ""].map(|value| resolve(None, value)), [auto, tcp, shm, auto].map(Ok));
        assert_eq!([auto, tcp, shm].map(|given| resolve(Some(given), "tcp")), [auto, tcp, shm].map(Ok));
        let expected = "CANDLE_DDP_CPU_TRANSPORT=\"udp\": it must be auto, tcp or shm".to_string();
        assert_eq!(resolve(None, "udp"), Err(expected));
    }
}
