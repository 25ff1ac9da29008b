use super::algorithm::Tuning;
use super::call::{Call, Operation};
use super::check::check;
use super::connect::{Connections, Connector};
use super::control::Control;
use super::failure::Failure;
use super::group::{Channel, Group};
use super::hello::Terms;
use super::lane::Lane;
use super::monitor;
use super::share::Ways;
use super::transport::Transport;
use crate::backend::{Collective, Communicator, Construction, Work};
use crate::deadline::deadline_after;
use crate::rendezvous::Store;
use crate::{Error, Result};
use std::net::{IpAddr, Ipv4Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How a [`CpuCommunicator`] is built and works. All but `address` and `lost_after` must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// How long the construction, and later each call, may take before the group fails. 30 minutes by default, as with
    /// PyTorch's Gloo.
    pub timeout: Duration,
    /// A host that cannot be reached for this long ends the group, and an outage of the network that is shorter does not
    /// (but a call that it delays beyond `timeout` ends the group all the same). 2 minutes by default; systems count in
    /// seconds, and give up connections by themselves after about a quarter of an hour. Need not be the same on all ranks.
    pub lost_after: Duration,
    /// The address of this host that its peers connect to. 127.0.0.1, the default, is for groups on one host.
    pub address: Option<IpAddr>,
    /// What the data travels through. For tests and measurements.
    pub transport: CpuTransport,
    /// Bytes that travel at a time between two ranks where data is reduced or handed on; by default what the environment
    /// variable `CANDLE_DDP_CPU_SEGMENT_BYTES` says, or else what was measured to be best for the transport. For tests
    /// and measurements.
    pub segment_bytes: Option<usize>,
    /// Messages are exchanged between all ranks at once while a rank receives no more than this in all; by default what
    /// the environment variable `CANDLE_DDP_CPU_SMALL_BYTES` says, or else what was measured to be best for the
    /// transport. For tests and measurements.
    pub small_bytes: Option<usize>,
    /// For tests: ranks with different labels are taken to be on different hosts. What the environment variable
    /// `CANDLE_DDP_CPU_HOST` says by default. Need not be the same on all ranks.
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

/// What the data of a [`CpuCommunicator`] travels through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuTransport {
    /// What the environment variable `CANDLE_DDP_CPU_TRANSPORT` says (`auto`, `tcp` or `shm`; for tests and
    /// measurements). `auto`, the default, is shared memory between ranks that can map each
    /// other's, TCP between others.
    #[default]
    Auto,
    /// TCP, also between ranks of one host.
    Tcp,
    /// Shared memory; that ranks cannot share it, for example because they are on different hosts, is an error.
    SharedMemory,
}

impl CpuTransport {
    const VARIABLE: &'static str = "CANDLE_DDP_CPU_TRANSPORT";

    /// With `Auto` looked up in the environment.
    fn resolve(self) -> Result<Self> {
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

/// `bytes`, or else what the environment variable says, if it is set.
fn or_environment(bytes: Option<usize>, variable: &str) -> Result<Option<usize>> {
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

/// One rank of a group whose tensors are on the CPU. Ranks on one host share memory; between hosts, data travels over
/// TCP.
///
/// Collectives are carried out in the order in which they are started: by [`run`](Communicator::run) on the calling
/// thread when nothing is before them, otherwise by an engine thread. Messages between two ranks (`Send`, `Recv`) have an
/// order of their own for each pair and direction, and do not wait for collectives.
///
/// Slices of one tensor may be in several calls at once. If they overlap, one of the calls changes the bytes in common, and
/// the calls are in different groups or channels, the later one is refused with [`Error::InvalidTensor`]. A tensor's storage
/// is locked only while bytes move, so a tensor in flight can be read half finished: wait for the call first. A call that
/// changes a tensor of which the program holds the guard of `storage_and_layout()` cannot end, and times out with an error
/// that says so.
///
/// Reductions take the ranks of each host in order and then the hosts in the order of their lowest ranks, f16 and bf16 are
/// accumulated in f32 and rounded for each host and at the end, and so results are bit-identical on all ranks and from run
/// to run with the same ranks on the same hosts.
///
/// The group ends for all its ranks with the first failure: a rank that leaves early or calls something else, a call that
/// needs more of a rank whose process has ended, or one that takes longer than the time-out. Every rank gets the same
/// cause, as an [`Error`] that names the culprit. What a rank had given before its process ended arrives.
///
/// Dropping it waits for what has been started and tells the peers goodbye, or, while panicking, that this rank failed.
pub struct CpuCommunicator {
    group: Arc<Group>,
    collectives: Lane,
    /// By peer. The lanes of this rank itself are never used.
    sends: Vec<Lane>,
    recvs: Vec<Lane>,
    monitor: Option<JoinHandle<()>>,
}

impl CpuCommunicator {
    /// Connects rank `rank` to the other ranks of a group of `world_size`, and returns once all are there.
    ///
    /// `store` is shared by all ranks and private to this group; it is not needed any more afterwards.
    pub fn new(store: Arc<dyn Store>, rank: usize, world_size: usize, options: CpuOptions) -> Result<Self> {
        Self::within(Construction::default(), store, rank, world_size, options)
    }

    /// [`new`](Self::new), which `construction` may end early.
    pub(crate) fn within(
        construction: Construction,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        options: CpuOptions,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        if u32::try_from(world_size).is_err() {
            return Err(Error::invalid("world_size", format!("{world_size} is more than a rank number can hold")));
        }
        let CpuOptions { timeout, lost_after, address, transport, segment_bytes, small_bytes, host } = options;
        let transport = transport.resolve()?;
        let host = host.or_else(|| std::env::var("CANDLE_DDP_CPU_HOST").ok());
        let segment_bytes = or_environment(segment_bytes, "CANDLE_DDP_CPU_SEGMENT_BYTES")?;
        let small_bytes = or_environment(small_bytes, "CANDLE_DDP_CPU_SMALL_BYTES")?;
        let tune = |by_default: Tuning| Tuning {
            segment: segment_bytes.unwrap_or(by_default.segment),
            small: small_bytes.unwrap_or(by_default.small),
        };
        let term = |bytes: Option<usize>| bytes.map_or(u64::MAX, |bytes| bytes as u64);
        let latest = deadline_after(timeout);
        let deadline = construction.deadline.map_or(latest, |deadline| deadline.min(latest));
        let connector = Connector {
            store: &*store,
            rank,
            terms: Terms { world_size, segment: term(segment_bytes), small: term(small_bytes) },
            address: address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            timeout,
            deadline,
            lost_after,
            construction,
        };
        let Ways { connections, hosts, room, layout } = match world_size {
            1 => Ways::none(),
            _ => {
                let connections = connector.connect()?;
                connector.share(connections, transport, tune(Tuning::SHARED).segment, host.as_deref())?
            }
        };
        let tuning = match layout {
            None => tune(Tuning::TCP),
            Some(_) if hosts.count() == 1 => tune(Tuning::SHARED),
            Some(layout) => tune(Tuning::HOSTS).within(layout),
        };
        let Connections { data, direct, control } = connections;
        let control = Control::new(control).map_err(|error| Error::io("making a pipe", error))?;
        let transports = [data, direct].map(Transport::new);
        let group = Arc::new(Group::new(rank, world_size, timeout, hosts, room, transports, control));
        let lane = |channel| Lane::new(group.clone(), channel, tuning);
        let mut communicator = Self {
            collectives: lane(Channel::Collectives),
            sends: (0..world_size).map(|peer| lane(Channel::SendTo(peer))).collect(),
            recvs: (0..world_size).map(|peer| lane(Channel::RecvFrom(peer))).collect(),
            monitor: None,
            group,
        };
        if world_size > 1 {
            communicator.monitor = Some(communicator.start_monitor()?);
        }
        // From here on a failure is one of the group, which all ranks hear of.
        match communicator.collectives.run_first(Call::bare(Operation::Connect), &Collective::Barrier, deadline) {
            Ok(()) => Ok(communicator),
            // It may have given up before it could tell the group.
            Err(error @ Error::PeerGone { .. }) => Err(construction.cause(error)),
            Err(error) => Err(error),
        }
    }

    fn start_monitor(&self) -> Result<JoinHandle<()>> {
        let group = self.group.clone();
        let body = move || {
            let reason = match catch_unwind(AssertUnwindSafe(|| monitor::run(&group))) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => format!("its monitor cannot listen: {error}"),
                Err(_) => "its monitor panicked".into(),
            };
            group.fail(Failure::PeerFailed { peer: group.rank, reason });
        };
        let name = format!("ddp-{}-monitor", self.group.rank);
        std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(|error| Error::io("starting a monitor thread", error))
    }

    fn lane(&self, channel: Channel) -> &Lane {
        match channel {
            Channel::Collectives => &self.collectives,
            Channel::SendTo(peer) => &self.sends[peer],
            Channel::RecvFrom(peer) => &self.recvs[peer],
        }
    }

    fn lanes(&self) -> impl Iterator<Item = &Lane> {
        std::iter::once(&self.collectives).chain(&self.sends).chain(&self.recvs)
    }
}

impl Communicator for CpuCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        if self.group.world_size == 1 {
            self.run(collective)?;
            return Ok(Work::done());
        }
        let (call, channel) = check(self.group.rank, self.group.world_size, &collective)?;
        self.lane(channel).start(call, collective)
    }

    fn run(&self, collective: Collective) -> Result<()> {
        let (call, channel) = check(self.group.rank, self.group.world_size, &collective)?;
        self.lane(channel).run(call, collective)
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure().map(Error::from)
    }

    fn abort(&self, reason: &str) {
        self.group.fail(Failure::PeerFailed { peer: self.group.rank, reason: reason.to_string() });
    }
}

impl Drop for CpuCommunicator {
    fn drop(&mut self) {
        let group = &self.group;
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        // Each call has a deadline of its own; together they get no more than one time-out.
        let deadline = deadline_after(group.timeout);
        if !self.lanes().all(|lane| lane.drain(deadline)) {
            self.abort("it left while its calls were not over");
        }
        self.lanes().for_each(Lane::close);
        if let Some(monitor) = self.monitor.take() {
            group.leave();
            group.end_monitor();
            if monitor.join().is_err() {
                log::error!("rank {}: the monitor thread panicked", group.rank);
            }
        }
    }
}
