use super::base::{Base, open};
use super::calls::Buffer;
use super::comm::{Comm, WaitError};
use super::comm_stream::{CommStream, Job};
use super::comm_streams::CommStreams;
use super::identity;
use super::launcher::Launcher;
use super::limit::{Ctas, Limit, Room, check_order};
use super::p2p::{P2p, Pair};
use super::prepared::{Member, Prepared};
use super::stream::{Clock, Done, Streams};
use super::threads::{join_until, spawn};
use super::wait::cancellation_check;
use super::work::{Behind, NcclWork, Shared};
use super::{NcclOptions, batch, cuda_failure, device};
use crate::backend::batch::check_batch;
use crate::backend::check::{check, on_device};
use crate::backend::{Collective, Communicator, P2pOp, Role, Split, Work};
use crate::error::Failure;
use crate::flight_recorder::Recording;
use crate::kernels;
use crate::panic::lock;
use crate::rendezvous::Store;
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_ddp_base::debug_fields;
use candle_ddp_engine::device_group::{DeviceGroup, Fence, HealthStore, Watched};
use candle_ddp_engine::standing::Membership;
use candle_ddp_engine::{Call, Channel};
use cudarc::driver::CudaSlice;
use cudarc::nccl::sys::ncclDataType_t;
use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the end of a group waits for the other ranks of this host, since NCCL lets them leave together.
const LEAVING: Duration = Duration::from_secs(10);
/// Calls on the stream of the collectives. A stream has room for about a thousand entries, and a call takes five at most.
const MOST_IN_FLIGHT: usize = 192;
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
    group: Arc<DeviceGroup>,
    /// For collectives.
    comm_stream: Arc<CommStream>,
    /// For collectives; `None` in a world of one, in which NCCL waits for nothing and starts no thread.
    launcher: Option<Launcher>,
    /// Calls run in the order in which their threads had this lock.
    turn: Mutex<()>,
    comm_streams: Arc<CommStreams>,
    pairs: Mutex<HashMap<Channel, P2p>>,
    device: Device,
    store: Arc<dyn Store>,
    options: NcclOptions,
    /// The least number of all ranks.
    multiprocessors: u32,
    /// How long a rank may be silent.
    lost_after: Duration,
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

debug_fields!(NcclCommunicator: |this| rank = this.rank());

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
        Self::connect(recording, store, rank, world_size, device, options, Limit::Main)
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
        let opened = open(device, rank, &options, limit);
        let (streams, identities) = identity::exchange(&*store, rank, world_size, options.timeout, opened)?;
        identity::check(&identities, device::shared_gpus_allowed()?)?;
        if rank == 0
            && limit == Limit::Main
            && let Some(difference) = identity::difference(&identities)
        {
            warn_aloud(format_args!("{difference}"));
        }
        if rank == 0 && world_size > 1 {
            device::warn_of_loading();
        }
        let lost_after = options.lost_after.unwrap_or_else(|| identity::lost_after(&identities));
        // All ranks take part, or none.
        let tests_links = identities.iter().all(|identity| identity.tests_links);
        let multiprocessors = identities.iter().map(|identity| identity.multiprocessors).min().unwrap_or_default();
        let group = DeviceGroup::new(rank, world_size, options.timeout, recording);
        let device = device.clone();
        let base = Base { group, streams, store, device, options, limit, multiprocessors, lost_after, tests_links };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        let comm = base.connect();
        Self::assemble(base, comm, heartbeat_monitor)
    }

    /// Creates the communicator, or ends the group.
    fn assemble(
        base: Base,
        comm: std::result::Result<Comm, WaitError>,
        heartbeat_monitor: JoinHandle<()>,
    ) -> Result<Self> {
        let token = base.streams.token();
        let (comm, token) = match comm.and_then(|comm| Ok((comm, token.map_err(cuda_failure)?))) {
            Ok(parts) => parts,
            Err(error) => return Err(base.give_up(error, heartbeat_monitor)),
        };
        let DeviceGroup { rank, world_size, .. } = *base.group;
        let limit = (base.limit, base.ctas());
        let room = Room::take(base.streams.device(), [rank, world_size], limit, base.multiprocessors);
        let comm_stream = Arc::new(CommStream::new(comm, room, base.streams.clone()));
        let comm_streams = CommStreams::new(base.group.clone(), comm_stream.clone());
        let own = Arc::clone(&comm_stream);
        let launcher = match base.group.world_size {
            1 => None,
            _ => Some(Launcher::start(&base.group, "launcher", move || Ok(own))?),
        };
        let threads = vec![base.start_watchdog(&comm_streams)?, base.start_poller(&comm_streams)?, heartbeat_monitor];
        let address = base.streams.address(&token);
        let Base { group, store, device, options, multiprocessors, lost_after, .. } = base;
        Ok(Self {
            group,
            comm_stream,
            launcher,
            turn: Mutex::default(),
            comm_streams,
            pairs: Mutex::default(),
            device,
            store,
            options,
            multiprocessors,
            lost_after,
            token: Buffer { address, count: 1, dtype: ncclDataType_t::ncclFloat32, bytes_per_element: 4 },
            _token: token,
            clock: Mutex::default(),
            splits: AtomicU64::new(0),
            threads,
        })
    }

    fn start_behind(&self, collective: Collective, behind: Option<Behind>) -> Result<Work> {
        let DeviceGroup { rank, world_size, .. } = *self.group;
        let (call, channel) = check(rank, world_size, &|tensor| on_device(tensor, &self.device), &collective)?;
        let work = match channel {
            Channel::Collectives => self.start_collective(call, collective, behind)?,
            message => self.start_message(message, call, collective)?,
        };
        Ok(Work::new(Shared(work)))
    }

    fn start_collective(&self, call: Call, collective: Collective, behind: Option<Behind>) -> Result<Arc<NcclWork>> {
        let prepared = self.prepare(&collective)?;
        let blocks_host = matches!(collective, Collective::Barrier);
        let work = self.work(call, tensors(&collective), self.comm_stream.streams.clone(), blocks_host);
        self.launch(&[(call, Channel::Collectives)], prepared, behind, work)
    }

    /// Puts calls that NCCL runs as one kernel behind the collectives: `work` is that of all.
    fn launch(
        &self,
        calls: &[(Call, Channel)],
        prepared: Prepared,
        behind: Option<Behind>,
        work: Arc<NcclWork>,
    ) -> Result<Arc<NcclWork>> {
        // Before the lock is taken, for which an abort would wait: both streams may be full.
        self.group.await_room(MOST_IN_FLIGHT)?;
        let preparing = self.group.prepare();
        work.done.set_prepared(&preparing);
        let marked = self.comm_stream.streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)));
        let started = {
            let _turn = lock(&self.turn);
            let fence: Arc<dyn Fence> = work.done.clone();
            self.group.begin_together(calls, &fence)?;
            marked.and_then(|ready| {
                let job = Job { prepared, ready, behind, work: work.clone() };
                match &self.launcher {
                    Some(launcher) => launcher.push(job),
                    None => {
                        self.comm_stream.launch(&self.group, &job)?;
                        job.set_launched(&self.group);
                    }
                }
                Ok(())
            })
        };
        drop(preparing);
        started.map_err(|error| error.end_group(&self.group))?;
        Ok(work)
    }

    fn start_message(&self, channel: Channel, call: Call, collective: Collective) -> Result<Arc<NcclWork>> {
        let mut pairs = lock(&self.pairs);
        let pair = match pairs.entry(channel) {
            Entry::Occupied(pair) => pair.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.open_p2p(channel)?),
        };
        let prepared = self.prepare(&collective)?;
        let work = self.work(call, tensors(&collective), pair.streams.clone(), false);
        let preparing = self.group.prepare();
        work.done.set_prepared(&preparing);
        self.group.begin(channel, call, work.done.clone())?;
        let ready = pair.streams.mark().map_err(|error| WaitError::Nccl(cuda_failure(error)).end_group(&self.group))?;
        pair.launcher.push(Job { prepared, ready, behind: None, work: work.clone() });
        Ok(work)
    }

    fn prepare(&self, collective: &Collective) -> Result<Prepared> {
        let DeviceGroup { rank, world_size, .. } = *self.group;
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
        let (options, multiprocessors) = (self.options.clone(), self.multiprocessors);
        P2p::start(Pair { group, comm_streams, store, from, to, streams, options, multiprocessors })
    }

    fn recording_of(&self, name: &str, ranks: &[usize]) -> Option<Recording> {
        self.group.recording.as_ref().map(|recording| recording.of_subgroup(name, ranks))
    }

    fn try_split(&self, role: Role, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        let limit = Limit::Of(role);
        let ctas = Ctas::new(&self.options, limit, self.multiprocessors);
        let cannot = |error: &dyn Display| self.abort(&format!("it cannot make a sub-group: {error}"));
        check_order(self.comm_stream.streams.device()).inspect_err(|error| cannot(error))?;
        // NCCL can only split a communicator without calls in flight, and no new call may begin before the split.
        let turn = lock(&self.turn);
        self.comm_stream.streams.trim_pool();
        if let Some(failure) = self.group.drain() {
            return Err(failure.into());
        }
        // Every rank counts the same splits.
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let recording = self.recording_of(&format!("group{number}"), ranks);
        let member = ranks.iter().position(|rank| *rank == self.group.rank);
        let prepared = member.map(|rank| HealthStore::new(store.clone(), rank, ranks.len())).transpose();
        let health_store = prepared.inspect_err(|error| cannot(error))?;
        let what = format!("new_group({ranks:?})");
        let reason = "not all ranks of the group called it".to_string();
        let mut check = cancellation_check(&self.group, what, reason, Duration::MAX);
        let (place, config) = (member.unwrap_or(0), (&self.options, ctas));
        let split = self.comm_stream.split(&self.group, member.is_some(), place, config, &mut check);
        drop(turn);
        let comm = split.map_err(|error| error.end_group(&self.group))?;
        let (Some(comm), Some(rank), Some(health_store)) = (comm, member, health_store) else {
            return Ok(Split::NotMember);
        };
        let driver = |error| cuda_failure(error).into_error(rank);
        let streams = self.comm_stream.streams.another().map_err(driver)?;
        let group = DeviceGroup::new(rank, ranks.len(), self.options.timeout, recording);
        let (device, options, lost_after) = (self.device.clone(), self.options.clone(), self.lost_after);
        let (multiprocessors, tests_links) = (self.multiprocessors, false);
        let base = Base { group, streams, store, device, options, limit, multiprocessors, lost_after, tests_links };
        let heartbeat_monitor = base.start_heartbeat_monitor(health_store)?;
        Ok(Split::Member(Box::new(Self::assemble(base, Ok(comm), heartbeat_monitor)?)))
    }

    /// Connects anew, since a split would wait for the calls in flight.
    fn try_duplicate(&self, role: Role, store: Arc<dyn Store>) -> Result<Split> {
        let DeviceGroup { rank, world_size, .. } = *self.group;
        let name = if role == Role::Gathers { "gathers" } else { "companion" };
        let recording = self.recording_of(name, &(0..world_size).collect::<Vec<_>>());
        // Its calls run next to those of this group.
        let (device, options, limit) = (&self.device, self.options.clone(), Limit::Of(role));
        Ok(Split::Member(Box::new(Self::connect(recording, store, rank, world_size, device, options, limit)?)))
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
        self.start_behind(collective, None)
    }

    fn start_after(&self, collective: Collective, after: &Work) -> Result<Work> {
        let own = after.as_any().and_then(<dyn Any>::downcast_ref::<Shared>);
        if let Some(shared) = own.filter(|_| self.launcher.is_some()) {
            return self.start_behind(collective, Some(shared.behind()));
        }
        after.wait()?;
        self.start(collective)
    }

    fn start_batch(&self, batch: Vec<P2pOp>) -> Result<Work> {
        let DeviceGroup { rank, world_size, .. } = *self.group;
        let calls = check_batch(rank, world_size, &|tensor| on_device(tensor, &self.device), &batch)?;
        let Some((first, _)) = calls.first() else { return Ok(Work::done()) };
        let prepared = batch::prepare(&batch)?;
        let tensors = batch.iter().map(|message| message.tensor().clone()).collect();
        let work = self.work(*first, tensors, self.comm_stream.streams.clone(), false);
        Ok(Work::new(Shared(self.launch(&calls, prepared, None, work)?)))
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
        self.fail(Failure::PeerFailed { peer: self.group.rank, reason: reason.to_string() });
    }

    fn fail(&self, failure: Failure) {
        self.group.fail(failure);
    }

    fn enter_job(&self, membership: &Membership) -> Result<()> {
        Ok(self.group.enter_job(membership)?)
    }

    fn split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        self.try_split(Role::Group, ranks, store)
    }

    fn duplicate(&self, store: Arc<dyn Store>) -> Result<Split> {
        self.try_duplicate(Role::Companion, store)
    }

    fn make(&self, role: Role, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        match role {
            Role::Group | Role::Copies => self.try_split(role, ranks, store),
            Role::Companion | Role::Gathers => self.try_duplicate(role, store),
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        let failed = self.group.drain().is_some();
        let deadline = Instant::now() + ENDING;
        let pairs = lock(&self.pairs).drain().map(|(_, pair)| pair.launcher).collect::<Vec<_>>();
        self.launcher.take().into_iter().chain(pairs).for_each(|launcher| launcher.end(deadline));
        self.group.leave();
        self.group.leave_job();
        self.group.end();
        self.threads.drain(..).for_each(|thread| join_until(thread, deadline));
        // On a separate thread, since an abort may hang in NCCL.
        let (rank, patience) = (self.group.rank, LEAVING.min(self.group.timeout));
        let (group, comm_streams) = (Arc::clone(&self.group), Arc::clone(&self.comm_streams));
        let end = move || {
            if failed {
                comm_streams.abort();
                return;
            }
            let deadline = Instant::now() + patience;
            let late = Failure::PeerFailed { peer: rank, reason: "it left".to_string() };
            let in_time = &mut || if Instant::now() < deadline { Ok(()) } else { Err(late.clone()) };
            let all = comm_streams.all();
            let last = all.iter().filter_map(|comm_stream| comm_stream.finalize(&group, in_time)).collect::<Vec<_>>();
            // A rank that does not come to its end must not hold up the process.
            last.into_iter().for_each(|thread| join_until(thread, deadline));
        };
        match spawn(&self.group, "end", end) {
            Ok(thread) => join_until(thread, Instant::now() + ENDING),
            // The communicators are aborted when they are dropped.
            Err(error) => log::debug!("rank {rank}: {error}"),
        }
    }
}

/// All tensors of a collective.
fn tensors(collective: &Collective) -> Vec<Tensor> {
    collective.tensors().map(|(_, tensor, _)| tensor.clone()).collect()
}
