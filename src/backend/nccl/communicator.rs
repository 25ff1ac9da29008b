use super::calls::Buffer;
use super::comm::{BLOCKING, Comm, Limit, OLDEST_VERSION, UniqueId, WaitError, blocking};
use super::comm_stream::CommStream;
use super::comm_streams::CommStreams;
use super::group::{Fence, Group, SuspectedFailure};
use super::health_store::HealthStore;
use super::heartbeat::HeartbeatMonitor;
use super::identity::{self, Identity, Version};
use super::p2p::{Job, P2p, Worker};
use super::prepared::{self, Member, Prepared};
use super::status::{NcclFailure, version};
use super::stream::{Clock, Done, Streams};
use super::threads::{join, join_until, spawn};
use super::watchdog::{self, Watched};
use super::work::{NcclWork, Shared};
use super::{NcclOptions, batch, cuda_failure, device};
use crate::backend::batch::check_batch;
use crate::backend::call::{Call, Channel};
use crate::backend::check::{check, on_device};
use crate::backend::{Collective, Communicator, P2pOp, Split, Work};
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::flight_recorder::Recording;
use crate::kernels;
use crate::panic::lock;
use crate::rendezvous::{self, Store, discard, host_identity};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use cudarc::driver::CudaSlice;
use cudarc::nccl::sys::ncclDataType_t;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The key of NCCL's id; its value is empty if rank 0 could not create one.
const ID: &str = "id";
/// How long the end of a group waits for the other ranks of this host, since NCCL lets them leave together.
const LEAVING: Duration = Duration::from_secs(10);
/// How long dropping a communicator waits for its threads, and then for the end of NCCL's communicators. Both should
/// end at once, but may hang in NCCL or in the store.
const ENDING: Duration = Duration::from_secs(30);

/// One rank of a group whose tensors are on GPUs.
///
/// Collectives run on their own stream, in the order in which they are started. Messages (`Send`, `Recv`) have their
/// own order for each pair of ranks and direction, independently of collectives; a batch of messages
/// ([`start_batch`](Communicator::start_batch)) has the order of the collectives. [`Work::wait`] makes only candle's
/// stream wait; call it on the thread that then uses the tensors. A barrier and [`Work::synchronize`] block the host.
///
/// The first failure ends the group for all its ranks: an error of NCCL or of a GPU, a rank that dies or leaves early,
/// or a call that exceeds the time-out. Every rank gets the same cause, as an [`Error`] that names the culprit.
///
/// Dropping it waits for the calls that were started and leaves in good order, or, while panicking, tells the others
/// that this rank failed. Threads that hang in NCCL are left behind after a minute, with a warning.
pub struct NcclCommunicator {
    group: Arc<Group>,
    /// For collectives.
    comm_stream: Arc<CommStream>,
    comm_streams: Arc<CommStreams>,
    pairs: Mutex<HashMap<Channel, P2p>>,
    device: Device,
    store: Arc<dyn Store>,
    options: NcclOptions,
    /// For barriers.
    token: Buffer,
    /// The memory of the token.
    _token: CudaSlice<f32>,
    /// Set once times are measured.
    clock: Mutex<Option<Arc<Clock>>>,
    /// The number of groups that were split off.
    splits: AtomicU64,
    /// The watchdog, the poller and the heartbeat monitor.
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator").field("rank", &self.rank()).finish_non_exhaustive()
    }
}

impl NcclCommunicator {
    /// Connects rank `rank` to the others of `world_size` ranks, each on its own GPU. Returns once all are connected.
    ///
    /// All ranks of the group, and nobody else, must use `store`: they stay in touch through it until the group ends.
    ///
    /// # Errors
    /// All ranks get the same error if one of them cannot take part, if their versions of NCCL differ, or if two of
    /// them are on one GPU or in one process. The error names ranks that do not arrive in time.
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        device: &Device,
        options: NcclOptions,
    ) -> Result<Self> {
        Self::within(None, store, rank, world_size, device, options)
    }

    /// Like [`new`](Self::new), with calls that are recorded.
    pub(crate) fn within(
        recording: Option<Recording>,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        device: &Device,
        options: NcclOptions,
    ) -> Result<Self> {
        Self::connect(recording, store, rank, world_size, device, options, Limit::None)
    }

    #[allow(clippy::too_many_arguments)] // private
    fn connect(
        recording: Option<Recording>,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        device: &Device,
        options: NcclOptions,
        limit: Limit,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let health_store = HealthStore::new(Arc::clone(&store), rank, world_size)?.leave_will();
        if world_size > 1
            && let Err(error) = kernels::preload(device, &[DType::F32])
        {
            // A program may use none of them.
            log::warn!("a kernel that is loaded during a collective may wait for other ranks: {error}");
        }
        let opened = open(device, rank);
        let (streams, identities) = identity::exchange(&*store, rank, world_size, options.timeout, opened)?;
        identity::check(&identities, device::shared_gpus_allowed())?;
        let group = Group::new(rank, world_size, options.timeout, recording);
        let base = Base { group, streams, store, device: device.clone(), options, limit };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        let comm = base.connect();
        base.assemble(comm, heartbeat_monitor)
    }

    fn start_collective(&self, call: Call, collective: Collective) -> Result<Arc<NcclWork>> {
        let prepared = self.prepare(&collective)?;
        let blocks_host = matches!(collective, Collective::Barrier);
        let work = self.work(call, prepared::tensors(collective), self.comm_stream.streams.clone(), blocks_host);
        self.launch(&[(call, Channel::Collectives)], &prepared, work)
    }

    /// Puts calls that NCCL runs as one kernel behind the collectives: `work` is that of all.
    fn launch(&self, calls: &[(Call, Channel)], prepared: &Prepared, work: Arc<NcclWork>) -> Result<Arc<NcclWork>> {
        // Before the lock is taken, for which an abort would wait: candle's stream may be full.
        let marked = self.comm_stream.streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)));
        let started = {
            let mut turn = self.comm_stream.turn();
            let fence: Arc<dyn Fence> = work.done.clone();
            self.group.begin_together(calls, &fence)?;
            marked.and_then(|ready| {
                turn.launch(&self.group, &ready, &work, |comm, target| {
                    // SAFETY: the work has the tensors, and lets go of them behind its fence.
                    unsafe { prepared.start(comm, target) }
                })
            })
        };
        started.map_err(|error| error.end_group(&self.group))?;
        work.done.set_started();
        Ok(work)
    }

    fn start_message(&self, channel: Channel, call: Call, collective: Collective) -> Result<Arc<NcclWork>> {
        let mut pairs = lock(&self.pairs);
        let pair = match pairs.entry(channel) {
            Entry::Occupied(pair) => pair.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.open_p2p(channel)?),
        };
        let prepared = self.prepare(&collective)?;
        let work = self.work(call, prepared::tensors(collective), pair.streams.clone(), false);
        self.group.begin(channel, call, work.done.clone())?;
        let ready = pair.streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)).end_group(&self.group))?;
        pair.push(Job { prepared, ready, work: work.clone() });
        Ok(work)
    }

    fn prepare(&self, collective: &Collective) -> Result<Prepared> {
        let Group { rank, world_size, .. } = *self.group;
        Ok(Prepared::new(collective, &Member { rank, world_size, token: self.token })?)
    }

    fn work(&self, call: Call, tensors: Vec<Tensor>, streams: Streams, blocks_host: bool) -> Arc<NcclWork> {
        let (group, done) = (self.group.clone(), Arc::new(Done::new(lock(&self.clock).clone())));
        Arc::new(NcclWork { group, streams, done, call, blocks_host, _tensors: tensors })
    }

    fn open_p2p(&self, channel: Channel) -> Result<P2p> {
        let own = self.group.rank;
        let (from, to) = match channel {
            Channel::SendTo(peer) => (own, peer),
            Channel::RecvFrom(peer) => (peer, own),
            Channel::Collectives => (own, own),
        };
        let streams = self.comm_stream.streams.another().map_err(|error| cuda_failure(error).into_error(own))?;
        let (group, comm_streams, store) = (self.group.clone(), self.comm_streams.clone(), self.store.clone());
        P2p::start(Worker { group, comm_streams, store, from, to, streams })
    }

    fn recording_of(&self, name: &str, ranks: &[usize]) -> Option<Recording> {
        self.group.recording.as_ref().map(|recording| recording.of_subgroup(name, ranks))
    }

    fn try_split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        // NCCL can only split a communicator without calls in flight, and no new call may begin before the split.
        let mut turn = self.comm_stream.turn();
        if let Some(failure) = self.group.drain() {
            return Err(failure.into());
        }
        // Every rank counts the same splits.
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let recording = self.recording_of(&format!("group{number}"), ranks);
        let member = ranks.iter().position(|rank| *rank == self.group.rank);
        let prepared = member.map(|rank| HealthStore::new(store.clone(), rank, ranks.len())).transpose();
        let health_store = prepared.inspect_err(|error| self.abort(&format!("it cannot make a sub-group: {error}")))?;
        let what = format!("new_group({ranks:?})");
        let mut check = cancellation_check(&self.group, what, "not all ranks of the group called it");
        let split = turn.split(&self.group, member.is_some(), member.unwrap_or(0), &mut check);
        drop(turn);
        let comm = split.map_err(|error| error.end_group(&self.group))?;
        let (Some(comm), Some(rank), Some(health_store)) = (comm, member, health_store) else {
            return Ok(Split::NotMember);
        };
        let driver = |error| cuda_failure(error).into_error(rank);
        let streams = self.comm_stream.streams.another().map_err(driver)?;
        let group = Group::new(rank, ranks.len(), self.options.timeout, recording);
        // A split communicator has its parent's limit.
        let (device, options, limit) = (self.device.clone(), self.options, Limit::None);
        let base = Base { group, streams, store, device, options, limit };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        Ok(Split::Member(Box::new(base.assemble(Ok(comm), heartbeat_monitor)?)))
    }
}

/// Opens the device and determines this rank's identity.
fn open(device: &Device, rank: usize) -> Result<(Streams, Identity)> {
    let nccl_version = version()?;
    if nccl_version < OLDEST_VERSION {
        return Err(Error::Unavailable {
            what: format!("NCCL {}", Version(nccl_version)),
            hint: format!("{} or later is needed: install a newer libnccl.so.2", Version(OLDEST_VERSION)),
        });
    }
    warn_of_old(nccl_version);
    if std::env::var(BLOCKING).is_ok_and(|value| value.trim() == "1") {
        return Err(blocking().into_error(rank));
    }
    let streams = Streams::new(device.as_cuda_device()?).map_err(|error| cuda_failure(error).into_error(rank))?;
    let pci_bus_id = streams.pci_bus_id().map_err(|error| cuda_failure(error).into_error(rank))?;
    Ok((streams, Identity { nccl_version, host: host_identity(), pci_bus_id, process: identity::process()? }))
}

/// Warns of versions of NCCL that have known errors.
fn warn_of_old(version: i32) {
    /// The first version that keeps the state of a call in progress in memory that is not one thread's.
    const SOUND: i32 = 22_703;
    if version < SOUND {
        let known = if version == 22_501 { ": in this one, ending a group after a failure hangs" } else { "" };
        log::warn!("NCCL {}: {} or later is recommended{known}", Version(version), Version(SOUND));
    }
}

/// A check that ends a wait if the group has failed or its time-out has expired.
fn cancellation_check(
    group: &Group,
    what: String,
    reason: &'static str,
) -> impl FnMut() -> std::result::Result<(), Failure> {
    let deadline = deadline_after(group.timeout);
    move || {
        if let Some(failure) = group.failure() {
            return Err(failure);
        }
        if Instant::now() < deadline {
            return Ok(());
        }
        let Group { rank, timeout, .. } = *group;
        let reason = format!("{reason}: look for the first error in the output of the others");
        let waiting_for = Vec::new();
        Err(Failure::TimedOut { rank, call: what.clone(), sequence: 0, timeout, waiting_for, reason })
    }
}

/// What a rank has before its communicator is connected.
struct Base {
    group: Arc<Group>,
    streams: Streams,
    store: Arc<dyn Store>,
    device: Device,
    options: NcclOptions,
    limit: Limit,
}

impl Base {
    /// Connects to the other ranks in NCCL, with the id that rank 0 creates.
    fn connect(&self) -> std::result::Result<Comm, WaitError> {
        let group = &*self.group;
        let cannot =
            |error: rendezvous::Error| WaitError::Nccl(NcclFailure::other("exchanging NCCL's id", &error.to_string()));
        self.streams.bind().map_err(cuda_failure)?;
        if group.rank == 0 {
            let id = UniqueId::new();
            // Empty if there is no id, so that the others fail too.
            let bytes = id.as_ref().map_or(Vec::new(), UniqueId::to_bytes);
            self.store.set(ID, &bytes).map_err(cannot)?;
            id?;
        }
        let id = identity::await_id(&*self.store, ID, group, "exchanging NCCL's id")?;
        let mut check = cancellation_check(group, "init_process_group".to_string(), "not all ranks came into NCCL");
        let comm = Comm::connect(&id, group.rank, group.world_size, self.limit, &mut check)?;
        // All ranks have come into NCCL, so they have read these.
        if group.rank == 0 {
            discard(&*self.store, ID);
        }
        discard(&*self.store, &identity::reports(&*self.store, group.rank, group.world_size).key(group.rank));
        Ok(comm)
    }

    fn start_heartbeat_monitor(&self, health_store: HealthStore) -> Result<JoinHandle<()>> {
        let (group, lost_after) = (self.group.clone(), self.options.lost_after);
        spawn(&self.group, "heartbeat_monitor", move || {
            HeartbeatMonitor { group: &group, health_store: &health_store, lost_after }.run();
        })
    }

    fn start_poller(&self, comm_streams: &Arc<CommStreams>) -> Result<JoinHandle<()>> {
        let (group, comm_streams, streams) = (self.group.clone(), comm_streams.clone(), self.streams.clone());
        spawn(&self.group, "poller", move || {
            if let Err(error) = streams.bind() {
                group.suspect(SuspectedFailure::Broken(super::cuda_error(error)));
            }
            watchdog::poll(&group, &*comm_streams);
        })
    }

    fn start_watchdog(&self, comm_streams: &Arc<CommStreams>) -> Result<JoinHandle<()>> {
        let (group, comm_streams) = (self.group.clone(), comm_streams.clone());
        spawn(&self.group, "watchdog", move || {
            let unasked = |suspected: &SuspectedFailure| super::heartbeat::without_asking(&group, suspected);
            watchdog::run(&group, &*comm_streams, &unasked);
        })
    }

    /// Creates the communicator, or ends the group.
    fn assemble(
        self,
        comm: std::result::Result<Comm, WaitError>,
        heartbeat_monitor: JoinHandle<()>,
    ) -> Result<NcclCommunicator> {
        let rank = self.group.rank;
        let token = self.streams.token();
        let parts = comm.and_then(|comm| {
            let token = token.map_err(cuda_failure)?;
            Ok((comm, token))
        });
        let (comm, token) = match parts {
            Ok(parts) => parts,
            Err(error) => {
                let error = match error {
                    // The rank that has failed says so in the store, or sends no more heartbeats.
                    WaitError::Nccl(remote) if remote.is_remote => {
                        WaitError::Group(WaitError::Nccl(remote).end_group(&self.group))
                    }
                    own => own,
                };
                let failure = match &error {
                    WaitError::Nccl(failure) => Failure::PeerFailed { peer: rank, reason: failure.to_string() },
                    WaitError::Group(failure) => failure.clone(),
                };
                let ours = self.group.fail(failure.clone()) == failure;
                self.group.leave();
                join(heartbeat_monitor);
                // This rank's own error is returned unchanged.
                let other = self.group.failure().filter(|_| !ours);
                return Err(other.map_or_else(|| error.into_error(rank), Error::from));
            }
        };
        let comm_stream = Arc::new(CommStream::new(comm, self.streams.clone()));
        let comm_streams = CommStreams::new(self.group.clone(), comm_stream.clone());
        let threads = vec![self.start_watchdog(&comm_streams)?, self.start_poller(&comm_streams)?, heartbeat_monitor];
        let address = self.streams.address(&token);
        let Self { group, store, device, options, .. } = self;
        Ok(NcclCommunicator {
            group,
            comm_stream,
            comm_streams,
            pairs: Mutex::default(),
            device,
            store,
            options,
            token: Buffer { address, count: 1, dtype: ncclDataType_t::ncclFloat32, bytes_per_element: 4 },
            _token: token,
            clock: Mutex::default(),
            splits: AtomicU64::new(0),
            threads,
        })
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        let Group { rank, world_size, .. } = *self.group;
        let (call, channel) = check(rank, world_size, &|tensor| on_device(tensor, &self.device), &collective)?;
        let work = match channel {
            Channel::Collectives => self.start_collective(call, collective)?,
            message => self.start_message(message, call, collective)?,
        };
        Ok(Work::new(Shared(work)))
    }

    fn start_batch(&self, batch: Vec<P2pOp>) -> Result<Work> {
        let Group { rank, world_size, .. } = *self.group;
        let calls = check_batch(rank, world_size, &|tensor| on_device(tensor, &self.device), &batch)?;
        let Some((first, _)) = calls.first() else { return Ok(Work::done()) };
        let prepared = batch::prepare(&batch)?;
        let tensors = batch.iter().map(|message| message.tensor().clone()).collect();
        let work = self.work(*first, tensors, self.comm_stream.streams.clone(), false);
        Ok(Work::new(Shared(self.launch(&calls, &prepared, work)?)))
    }

    fn measure_spans(&self) -> Result<()> {
        let mut clock = lock(&self.clock);
        if clock.as_ref().is_none_or(|clock| clock.is_old()) {
            let new =
                self.comm_stream.streams.clock().map_err(|error| cuda_failure(error).into_error(self.group.rank))?;
            *clock = Some(Arc::new(new));
        }
        Ok(())
    }

    fn failure(&self) -> Option<Error> {
        self.group.root_cause().map(Error::from)
    }

    fn abort(&self, reason: &str) {
        self.group.fail(Failure::PeerFailed { peer: self.group.rank, reason: reason.to_string() });
    }

    fn split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        self.try_split(ranks, store)
    }

    /// Connects anew, since a split would wait for the calls in flight.
    fn duplicate(&self, store: Arc<dyn Store>) -> Result<Split> {
        let Group { rank, world_size, .. } = *self.group;
        let recording = self.recording_of("companion", &(0..world_size).collect::<Vec<_>>());
        // Its calls run next to those of this group.
        let (device, options, limit) = (&self.device, self.options, Limit::Few);
        Ok(Split::Member(Box::new(Self::connect(recording, store, rank, world_size, device, options, limit)?)))
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        let messages: Vec<_> = lock(&self.pairs).drain().map(|(_, pair)| pair.end()).collect();
        let failed = self.group.drain().is_some();
        let deadline = Instant::now() + ENDING;
        messages.into_iter().for_each(|thread| join_until(thread, deadline));
        self.group.leave();
        self.group.end();
        self.threads.drain(..).for_each(|thread| join_until(thread, deadline));
        // On a separate thread, since an abort may hang in NCCL.
        let (rank, patience, comm_streams) =
            (self.group.rank, LEAVING.min(self.group.timeout), Arc::clone(&self.comm_streams));
        let end = move || {
            if failed {
                comm_streams.abort();
                return;
            }
            let deadline = Instant::now() + patience;
            let late = Failure::PeerFailed { peer: rank, reason: "it left".to_string() };
            for comm_stream in comm_streams.all() {
                comm_stream.finalize(&mut || if Instant::now() < deadline { Ok(()) } else { Err(late.clone()) });
            }
        };
        match spawn(&self.group, "end", end) {
            Ok(thread) => join_until(thread, Instant::now() + ENDING),
            // The communicators are aborted when they are dropped.
            Err(error) => log::debug!("rank {rank}: {error}"),
        }
    }
}
