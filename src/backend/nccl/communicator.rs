use super::calls::Memory;
use super::comm::{Comm, OLDEST_VERSION, UniqueId, WaitError};
use super::comm_stream::{CommStream, CommStreams};
use super::group::{Group, SuspectedFailure};
use super::health_store::HealthStore;
use super::heartbeat::HeartbeatMonitor;
use super::identity::{self, Identity, Version};
use super::p2p::{Job, P2p, Worker};
use super::plan::{self, Place, Plan};
use super::status::{NcclFailure, version};
use super::stream::{Clock, Done, Streams};
use super::watchdog::{self, Watched};
use super::work::{NcclWork, Shared};
use super::{cuda_failure, device, lock};
use crate::backend::call::{Call, Channel};
use crate::backend::check::check;
use crate::backend::{Collective, Communicator, Split, Work};
use crate::deadline::deadline_after;
use crate::error::Failure;
use crate::rendezvous::{Store, host};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use cudarc::driver::CudaSlice;
use cudarc::nccl::sys::ncclDataType_t;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The key of NCCL's id; its value is empty if rank 0 could not make one.
const ID: &str = "id";
/// How long the end of a group waits for the other ranks of this host, which NCCL lets leave together.
const LEAVING: Duration = Duration::from_secs(10);
/// How long dropping a communicator waits for its threads, and then for the end of NCCL's communicators. Both should end at
/// once, but may hang in NCCL or in the store.
const ENDING: Duration = Duration::from_secs(30);

/// How an [`NcclCommunicator`] works. The options must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclOptions {
    /// How long the construction, and later each call, may take before the group fails. 10 minutes by default, as with
    /// PyTorch's NCCL.
    pub timeout: Duration,
    /// A rank that sends no heartbeat for this long is taken for dead, which ends the group. 10 seconds by default.
    pub lost_after: Duration,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), lost_after: Duration::from_secs(10) }
    }
}

/// One rank of a group whose tensors are on GPUs.
///
/// Collectives are put on a stream of their own in the order in which they are started; messages (`Send`, `Recv`) have
/// an order of their own for each pair of ranks and direction, and do not wait for collectives. [`Work::wait`] makes
/// candle's stream wait, but not the host; call it on the thread that goes on with the tensors. A barrier and
/// [`Work::synchronize`] block the host.
///
/// The group ends for all its ranks with the first failure: an error of NCCL or of a GPU, a rank that dies or leaves
/// early, a call that takes longer than the time-out. Every rank gets the same cause, as an [`Error`] that names the
/// culprit.
///
/// Dropping it waits for the calls that were started and leaves in good order, or, while panicking, tells the others that this
/// rank failed. Threads that hang in NCCL are left behind after a minute, with a warning.
pub struct NcclCommunicator {
    group: Arc<Group>,
    /// For collectives.
    comm_stream: Arc<CommStream>,
    comm_streams: Arc<CommStreams>,
    pairs: Mutex<HashMap<Channel, P2p>>,
    device: Device,
    store: Arc<dyn Store>,
    options: NcclOptions,
    token: CudaSlice<f32>,
    /// There once times are measured.
    clock: Mutex<Option<Arc<Clock>>>,
    watchdog: Option<JoinHandle<()>>,
    heartbeat_monitor: Option<JoinHandle<()>>,
}

impl NcclCommunicator {
    /// Connects rank `rank` to the other ranks of a group of `world_size`, each on a GPU of its own, and returns once all
    /// are there.
    ///
    /// `store` is shared by all ranks and private to this group; the ranks keep in touch through it until the group ends.
    ///
    /// # Errors
    /// All ranks get the same error when one of them cannot take part, when their versions of NCCL differ, or when two of them
    /// are on one GPU. Ranks that do not come in time are named.
    pub fn new(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        device: &Device,
        options: NcclOptions,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        let health_store = HealthStore::new(Arc::clone(&store), rank, world_size)?;
        let opened = open(device, rank);
        let (streams, identities) = identity::exchange(&*store, rank, world_size, options.timeout, opened)?;
        identity::check(&identities, device::shared_gpus_allowed())?;
        let group = Arc::new(Group::new(rank, world_size, options.timeout));
        let base = Base { group, streams, store, device: device.clone(), options };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        let comm = base.connect();
        base.assemble(comm, heartbeat_monitor)
    }

    fn place(&self, tensor: &Tensor) -> std::result::Result<(), String> {
        if tensor.device().same_device(&self.device) {
            return Ok(());
        }
        let (is, belongs) = (tensor.device().location(), self.device.location());
        Err(if is == belongs {
            format!(
                "is on {is:?} through another candle Device than this group's, and so on another stream: use the group's \
                 own (ProcessGroup::device) for all tensors"
            )
        } else {
            format!("is on {is:?}, and this group works on {belongs:?}: move it with to_device(pg.device())")
        })
    }

    fn start_collective(&self, call: Call, collective: Collective) -> Result<Arc<NcclWork>> {
        let streams = &self.comm_stream.streams;
        let plan = self.plan(&collective)?;
        let blocks_host = matches!(collective, Collective::Barrier);
        let work = self.work(call, collective, streams.clone(), blocks_host);
        let started = {
            let mut turn = self.comm_stream.turn();
            self.group.begin(Channel::Collectives, call, work.done.clone())?;
            let marked = streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)));
            marked.and_then(|ready| {
                turn.launch(&self.group, &ready, &work, |comm, target| {
                    // SAFETY: the work has the tensors, and lets go of them behind its fence.
                    unsafe { plan.start(comm, target) }
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
            Entry::Vacant(place) => place.insert(self.open_p2p(channel)?),
        };
        let plan = self.plan(&collective)?;
        let work = self.work(call, collective, pair.streams.clone(), false);
        self.group.begin(channel, call, work.done.clone())?;
        let ready = pair.streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)).end_group(&self.group))?;
        pair.push(Job { plan, ready, work: work.clone() });
        Ok(work)
    }

    fn plan(&self, collective: &Collective) -> Result<Plan> {
        let Group { rank, world_size, .. } = *self.group;
        let address = self.comm_stream.streams.address(&self.token);
        let token = Memory { address, count: 1, dtype: ncclDataType_t::ncclFloat32, bytes_per_element: 4 };
        Ok(Plan::new(collective, &Place { rank, world_size, token })?)
    }

    fn work(&self, call: Call, collective: Collective, streams: Streams, blocks_host: bool) -> Arc<NcclWork> {
        let tensors = plan::tensors(collective);
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

    fn try_split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        // NCCL only splits a communicator without calls under way, and no new call may begin before the split.
        let mut turn = self.comm_stream.turn();
        if let Some(failure) = self.group.drain() {
            return Err(failure.into());
        }
        let place = ranks.iter().position(|rank| *rank == self.group.rank);
        let prepared = place.map(|rank| HealthStore::new(store.clone(), rank, ranks.len())).transpose();
        let health_store = prepared.inspect_err(|error| self.abort(&format!("it cannot make a sub-group: {error}")))?;
        let what = format!("new_group({ranks:?})");
        let mut check = cancellation_check(&self.group, what, "not all ranks of the group called it");
        let split = turn.split(&self.group, place.is_some(), place.unwrap_or(0), &mut check);
        drop(turn);
        let comm = split.map_err(|error| error.end_group(&self.group))?;
        let (Some(comm), Some(rank), Some(health_store)) = (comm, place, health_store) else {
            return Ok(Split::NotMember);
        };
        let driver = |error| cuda_failure(error).into_error(rank);
        let streams = self.comm_stream.streams.another().map_err(driver)?;
        let group = Arc::new(Group::new(rank, ranks.len(), self.options.timeout));
        let base = Base { group, streams, store, device: self.device.clone(), options: self.options };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        Ok(Split::Member(Box::new(base.assemble(Ok(comm), heartbeat_monitor)?)))
    }
}

/// Opens the device, and finds out who this rank is.
fn open(device: &Device, rank: usize) -> Result<(Streams, Identity)> {
    let nccl_version = version()?;
    if nccl_version < OLDEST_VERSION {
        return Err(Error::Unavailable {
            what: format!("NCCL {}", Version(nccl_version)),
            hint: format!("{} or later is needed: install a newer libnccl.so.2", Version(OLDEST_VERSION)),
        });
    }
    let streams = Streams::new(device.as_cuda_device()?).map_err(|error| cuda_failure(error).into_error(rank))?;
    let pci_bus_id = streams.pci_bus_id().map_err(|error| cuda_failure(error).into_error(rank))?;
    Ok((streams, Identity { nccl_version, host: host(), pci_bus_id }))
}

/// A check that ends a wait when the group has failed, or its time-out is over.
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
        Err(Failure::TimedOut { rank, call: what.clone(), sequence: 0, timeout, reason })
    }
}

/// What a rank has before its communicator is connected.
struct Base {
    group: Arc<Group>,
    streams: Streams,
    store: Arc<dyn Store>,
    device: Device,
    options: NcclOptions,
}

impl Base {
    /// Connects to the other ranks in NCCL, by the id that rank 0 makes.
    fn connect(&self) -> std::result::Result<Comm, WaitError> {
        let group = &*self.group;
        let cannot = |error: Error| WaitError::Nccl(NcclFailure::other("exchanging NCCL's id", &error.to_string()));
        self.streams.bind().map_err(cuda_failure)?;
        if group.rank == 0 {
            let id = UniqueId::new();
            // Empty if there is no id: then the others fail, too.
            let bytes = id.as_ref().map_or(Vec::new(), UniqueId::to_bytes);
            self.store.set(ID, &bytes).map_err(cannot)?;
            id?;
        }
        let id = identity::await_id(&*self.store, ID, group, "exchanging NCCL's id")?;
        let mut check = cancellation_check(group, "init_process_group".to_string(), "not all ranks came into NCCL");
        Comm::connect(&id, group.rank, group.world_size, &mut check)
    }

    fn start_heartbeat_monitor(&self, health_store: HealthStore) -> Result<JoinHandle<()>> {
        let (group, lost_after) = (self.group.clone(), self.options.lost_after);
        spawn(&self.group, "heartbeat_monitor", move || {
            HeartbeatMonitor { group: &group, health_store: &health_store, lost_after }.run();
        })
    }

    fn start_watchdog(&self, comm_streams: &Arc<CommStreams>) -> Result<JoinHandle<()>> {
        let (group, comm_streams, streams) = (self.group.clone(), comm_streams.clone(), self.streams.clone());
        spawn(&self.group, "watchdog", move || {
            if let Err(error) = streams.bind() {
                group.suspect(SuspectedFailure::Broken(super::cuda_error(error)));
            }
            let unasked = |suspected: &SuspectedFailure| super::heartbeat::without_asking(&group, suspected);
            watchdog::run(&group, &*comm_streams, &unasked);
        })
    }

    /// Makes the communicator, or ends the group.
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
                let failure = match &error {
                    WaitError::Nccl(failure) => Failure::PeerFailed { peer: rank, reason: failure.to_string() },
                    WaitError::Group(failure) => failure.clone(),
                };
                let ours = self.group.fail(failure.clone()) == failure;
                self.group.leave();
                join(heartbeat_monitor);
                // This rank's own error is returned as what it is.
                let other = self.group.failure().filter(|_| !ours);
                return Err(other.map_or_else(|| error.into_error(rank), Error::from));
            }
        };
        let comm_stream = Arc::new(CommStream::new(comm, self.streams.clone()));
        let comm_streams = Arc::new(CommStreams::new(comm_stream.clone()));
        let watchdog = self.start_watchdog(&comm_streams)?;
        let Self { group, store, device, options, .. } = self;
        Ok(NcclCommunicator {
            group,
            comm_stream,
            comm_streams,
            pairs: Mutex::default(),
            device,
            store,
            options,
            token,
            clock: Mutex::default(),
            watchdog: Some(watchdog),
            heartbeat_monitor: Some(heartbeat_monitor),
        })
    }
}

/// Starts one of the group's own threads. A panic in it ends the group.
fn spawn(group: &Arc<Group>, name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let (rank, group) = (group.rank, group.clone());
    std::thread::Builder::new()
        .name(format!("nccl-{rank}-{name}"))
        .spawn(move || {
            if catch_unwind(AssertUnwindSafe(body)).is_err() {
                group.fail(Failure::PeerFailed { peer: rank, reason: format!("its {name} panicked") });
            }
        })
        .map_err(|error| Error::io(format!("starting the {name} thread"), error))
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        log::error!("a thread of the NCCL engine panicked");
    }
}

/// Like [`join`], but leaves a thread behind that has not ended at `deadline`.
fn join_until(thread: JoinHandle<()>, deadline: Instant) {
    const PAUSE: Duration = Duration::from_millis(1);
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            let name = thread.thread().name().unwrap_or("a thread of the NCCL engine").to_string();
            log::warn!("{name} does not end: NCCL, the GPU or the store does not answer. It is left behind");
            return;
        }
        std::thread::sleep(PAUSE);
    }
    join(thread);
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
        let (call, channel) = check(rank, world_size, &|tensor| self.place(tensor), &collective)?;
        let work = match channel {
            Channel::Collectives => self.start_collective(call, collective)?,
            message => self.start_message(message, call, collective)?,
        };
        Ok(Work::new(Shared(work)))
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

    /// Connects anew: a split would wait for the calls that are under way.
    fn duplicate(&self, store: Arc<dyn Store>) -> Result<Split> {
        let Group { rank, world_size, .. } = *self.group;
        Ok(Split::Member(Box::new(Self::new(store, rank, world_size, &self.device, self.options)?)))
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        lock(&self.pairs).drain().for_each(|(_, pair)| pair.end());
        let failed = self.group.drain().is_some();
        self.group.leave();
        self.group.end();
        let deadline = Instant::now() + ENDING;
        for thread in self.watchdog.take().into_iter().chain(self.heartbeat_monitor.take()) {
            join_until(thread, deadline);
        }
        // On a thread of its own, since an abort may hang in NCCL.
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
            // The communicators are aborted where they are dropped.
            Err(error) => log::debug!("rank {rank}: {error}"),
        }
    }
}
