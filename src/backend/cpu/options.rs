use crate::{Error, Result};
use std::net::IpAddr;
use std::time::Duration;

/// How a [`CpuCommunicator`](super::CpuCommunicator) is built and works. Options must be the same on all ranks unless they say
/// otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// How long the construction, and later each call, may take before the group fails. 30 minutes by default, as with
    /// PyTorch's Gloo.
    pub timeout: Duration,
    /// A host that cannot be reached for this long ends the group; a shorter outage of the network does not, unless it delays
    /// a call beyond `timeout`. 2 minutes by default. Systems count in whole seconds, and give up connections by themselves
    /// after about a quarter of an hour. Need not be the same on all ranks.
    pub lost_after: Duration,
    /// The address of this host that its peers connect to. The default, 127.0.0.1, is for groups on one host. Need not be the
    /// same on all ranks.
    pub address: Option<IpAddr>,
    /// What the data travels through. For tests and measurements.
    pub transport: CpuTransport,
    /// Bytes that are sent at a time between two ranks where data is reduced or passed on. By default, the value of the
    /// environment variable `CANDLE_DDP_CPU_SEGMENT_BYTES`, or else what was measured to be best for the transport. For
    /// tests and measurements.
    pub segment_bytes: Option<usize>,
    /// Data is small, and all ranks send all of it to all others, if each rank receives no more bytes than this in total. By
    /// default, the value of the environment variable `CANDLE_DDP_CPU_SMALL_BYTES`, or else what was measured to be best for
    /// the transport. For tests and measurements.
    pub small_bytes: Option<usize>,
    /// Ranks with different labels are taken to be on different hosts, for tests. By default, the value of the environment
    /// variable `CANDLE_DDP_CPU_HOST`. Need not be the same on all ranks.
    #[doc(hidden)]
    pub host: Option<String>,
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
            host: None,
        }
    }
}

/// What the data of a [`CpuCommunicator`](super::CpuCommunicator) travels through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuTransport {
    /// The value of the environment variable `CANDLE_DDP_CPU_TRANSPORT` (`auto`, `tcp` or `shm`; for tests and measurements).
    /// The default, `auto`, is shared memory between ranks that can map each other's memory, and TCP between others.
    #[default]
    Auto,
    /// TCP, also between ranks of one host.
    Tcp,
    /// Shared memory. It is an error if ranks cannot share it, for example because they are on different hosts.
    SharedMemory,
}

impl CpuTransport {
    const VARIABLE: &'static str = "CANDLE_DDP_CPU_TRANSPORT";

    /// `Auto` becomes what the environment says.
    pub(super) fn resolve(self) -> Result<Self> {
        let (Self::Auto, Some(value)) = (self, std::env::var_os(Self::VARIABLE)) else { return Ok(self) };
        match value.to_str() {
            Some("" | "auto") => Ok(Self::Auto),
            Some("tcp") => Ok(Self::Tcp),
            Some("shm") => Ok(Self::SharedMemory),
            _ => Err(Error::InvalidEnvironment {
                variable: Self::VARIABLE.to_string(),
                value: value.to_string_lossy().into_owned(),
                reason: "it is one of auto, tcp, shm".to_string(),
            }),
        }
    }
}

/// `bytes`, or else the value of the environment variable, if it is set.
pub(super) fn or_environment(bytes: Option<usize>, variable: &str) -> Result<Option<usize>> {
    let (None, Some(value)) = (bytes, std::env::var_os(variable)) else { return Ok(bytes) };
    let value = value.to_string_lossy().into_owned();
    match value.parse() {
        Ok(bytes) => Ok(Some(bytes)),
        Err(_) => Err(Error::InvalidEnvironment {
            variable: variable.to_string(),
            value,
            reason: "it is a number of bytes".to_string(),
        }),
    }
}
