//! Process groups: the ranks of a job, and the collectives among them.
mod compare;
mod custom;
mod engine;
mod in_place;
mod init;
mod long_work;
mod objects;
mod on_error;
mod parent;
pub(crate) mod spawn;
mod threads;

pub use custom::CustomOptions;
pub use engine::Backend;
pub use init::{InitOptions, init_process_group};
pub(crate) use spawn::STACK_BYTES;
pub use spawn::{SpawnOptions, spawn, spawn_with};

use crate::backend::{Collective, Communicator, Construction, ReduceOp, Split, Work};
use crate::error::Failure;
use crate::rendezvous::{PrefixStore, Store, decode_reports, encode_report};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use engine::Settings;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A group of ranks that communicate with each other: PyTorch's `ProcessGroup`. Clones are handles to the same group.
///
/// Every rank of the group makes the same calls in the same order (`send` and `recv` pair up between two ranks).
/// Tensors are contiguous, live on [`device`](Self::device), have the same dtype and element count on every rank, and
/// are changed in place: every other tensor that shares their storage changes as well. A tensor through which gradients
/// flow, such as a loss, cannot be changed: give `loss.detach().copy()?`.
///
/// Each collective comes in two forms: the plain one returns when its results may be used; the one named `_async`
/// (`isend`, `irecv`) returns a [`Work`] at once, and the tensors must not be touched until it was waited for. With NCCL, the
/// first calls may wait until the ranks are connected.
///
/// # Errors
/// A call fails on every rank, within the group's time-out, when ranks make different calls, when a rank is gone, reports an
/// error of its own, or does not come in time: [`Error::Group`], with the [`Failure`]. The group is
/// then broken, and all its later calls return the same cause. A tensor that the group cannot take is refused on the calling
/// rank alone, before anything is sent ([`Error::InvalidTensor`], [`Error::UnsupportedDType`]).
#[derive(Clone)]
pub struct ProcessGroup(Arc<Inner>);

/// What `init_process_group` and `new_group` know about a group when they make it.
struct Inner {
    communicator: Box<dyn Communicator>,
    store: Arc<dyn Store>,
    settings: Settings,
    /// The ranks of this group, numbered as in the group of all ranks.
    global_ranks: Vec<usize>,
    /// How many sub-groups were made: every rank counts the same, so the number names the next one's keys.
    subgroups: AtomicU64,
    companion: Mutex<Option<ProcessGroup>>,
    cpu: Mutex<Option<ProcessGroup>>,
}

impl ProcessGroup {
    /// Builds the engine of a group whose rank `rank` is this process. `store` must be the group's own.
    fn connect(
        construction: Construction,
        store: Arc<dyn Store>,
        global_ranks: Vec<usize>,
        rank: usize,
        settings: Settings,
    ) -> Result<Self> {
        let communicator = engine::communicator(construction, Arc::clone(&store), rank, global_ranks.len(), &settings)?;
        Ok(Self::around(communicator, store, global_ranks, settings))
    }

    fn around(
        communicator: Box<dyn Communicator>,
        store: Arc<dyn Store>,
        global_ranks: Vec<usize>,
        settings: Settings,
    ) -> Self {
        let (subgroups, companion, cpu) = (AtomicU64::new(0), Mutex::default(), Mutex::default());
        Self(Arc::new(Inner { communicator, store, settings, global_ranks, subgroups, companion, cpu }))
    }

    /// This process's place in the group, from 0 to `world_size() - 1`.
    pub fn rank(&self) -> usize {
        self.0.communicator.rank()
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.0.communicator.world_size()
    }

    /// This process's place among those of the job on the same host.
    pub fn local_rank(&self) -> usize {
        self.0.settings.local_rank
    }

    /// How many processes of the job run on this host.
    pub fn local_world_size(&self) -> usize {
        self.0.settings.local_world_size
    }

    /// The ranks of this group, as they are numbered in the group that `init_process_group` made.
    pub fn global_ranks(&self) -> &[usize] {
        &self.0.global_ranks
    }

    /// The device on which the group's tensors live.
    pub fn device(&self) -> &Device {
        &self.0.settings.device
    }

    /// The engine that moves the group's tensors; never `Auto`.
    pub fn backend(&self) -> Backend {
        self.0.settings.backend
    }

    /// How long a collective may take.
    pub fn timeout(&self) -> Duration {
        self.0.settings.timeout
    }

    /// A key-value store that the ranks of this group share, for keys of the program's own.
    pub fn store(&self) -> PrefixStore {
        PrefixStore::new("user", Arc::clone(&self.0.store))
    }

    /// A group of some of this group's ranks, given as they are numbered here; rank `i` of the new group is `ranks[i]`.
    ///
    /// Every rank of this group calls it with the same `ranks`, also those that are not among them: they get `None`.
    ///
    /// # Errors
    /// Ranks that do not exist, or do not come within the time-out; or, at once, the failure of this group.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        if let Some(&rank) = ranks.iter().find(|rank| **rank >= self.world_size()) {
            return Err(Error::RankOutOfRange { rank, world_size: self.world_size() });
        }
        let mut seen = vec![false; self.world_size()];
        for &rank in ranks {
            if std::mem::replace(&mut seen[rank], true) {
                return Err(Error::invalid("ranks", format!("rank {rank} is in {ranks:?} twice")));
            }
        }
        if ranks.is_empty() {
            return Err(Error::invalid("ranks", "a group needs at least one rank"));
        }
        let number = self.0.subgroups.fetch_add(1, Ordering::Relaxed);
        let place = ranks.iter().position(|rank| *rank == self.rank());
        // The ranks are part of the key, so that processes which were given different ranks do not meet by accident.
        let members = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
        let store: Arc<dyn Store> =
            Arc::new(PrefixStore::new(format!("group{number}/{members}"), Arc::clone(&self.0.store)));
        let settings = self.0.settings.clone();
        let split = self.0.communicator.split(ranks, engine::engine_store(&store, &settings))?;
        let communicator = self.member(split, &store, place, ranks.len())?;
        let global_ranks = ranks.iter().map(|rank| self.0.global_ranks[*rank]).collect();
        Ok(communicator.map(|communicator| Self::around(communicator, store, global_ranks, settings)))
    }

    /// A second group of the same ranks, for collectives inside a model's forward and backward passes. DDP's buckets go
    /// through the first group at moments that differ from rank to rank, but ranks must make the calls of one group in the
    /// same order. All layers share it. The first call makes it and waits for that of every other rank; it ends with this
    /// group.
    pub(crate) fn companion(&self) -> Result<Self> {
        let mut companion = self.0.companion.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(companion) = &*companion {
            return Ok(companion.clone());
        }
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new("companion", Arc::clone(&self.0.store)));
        let (settings, global_ranks) = (self.0.settings.clone(), self.0.global_ranks.clone());
        let duplicate = self.0.communicator.duplicate(engine::engine_store(&store, &settings))?;
        let Some(made) = self.member(duplicate, &store, Some(self.rank()), self.world_size())? else {
            let reason = "Communicator::duplicate must make an engine for every rank".to_string();
            return Err(Failure::PeerFailed { peer: self.rank(), reason }.into());
        };
        Ok(companion.insert(Self::around(made, store, global_ranks, settings)).clone())
    }

    /// A group of the same ranks for tensors in host memory, over the CPU engine: PyTorch's second backend in
    /// `"cpu:gloo,cuda:nccl"`. It is this group where that works on the CPU. The first call makes it, and waits for that of
    /// every other rank; it ends with this group.
    ///
    /// # Errors
    /// Ranks that do not come within the time-out, or, at once, the failure of this group.
    pub fn cpu_group(&self) -> Result<Self> {
        if self.device().is_cpu() {
            return Ok(self.clone());
        }
        let mut cpu = self.0.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cpu) = &*cpu {
            return Ok(cpu.clone());
        }
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new("cpu-group", Arc::clone(&self.0.store)));
        let settings = Settings { backend: Backend::Cpu, device: Device::Cpu, ..self.0.settings.clone() };
        let failed = || self.failed();
        let construction = Construction { cancelled: Some(&failed), ..Default::default() };
        let global_ranks = self.0.global_ranks.clone();
        Ok(cpu.insert(Self::connect(construction, store, global_ranks, self.rank(), settings)?).clone())
    }

    /// Whether `other` is a handle to this group.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// This rank's engine of a group that was split off, in which it has the number `place`. If this group's engine cannot
    /// split, the new group gets connections of its own.
    fn member(
        &self,
        split: Split,
        store: &Arc<dyn Store>,
        place: Option<usize>,
        world_size: usize,
    ) -> Result<Option<Box<dyn Communicator>>> {
        match (split, place) {
            (Split::Member(communicator), _) => Ok(Some(communicator)),
            (Split::NotMember, _) | (Split::Unsupported, None) => Ok(None),
            (Split::Unsupported, Some(rank)) => {
                let failed = || self.failed();
                let construction = Construction { cancelled: Some(&failed), ..Default::default() };
                let store = Arc::clone(store);
                engine::communicator(construction, store, rank, world_size, &self.0.settings).map(Some)
            }
        }
    }

    /// The failure of this group, if there was one, after which not all ranks will come to make another group.
    fn failed(&self) -> Result<()> {
        self.0.communicator.failure().map_or(Ok(()), Err)
    }

    /// Starts any collective; the methods named after them read better.
    pub fn start(&self, collective: Collective) -> Result<Work> {
        in_place::check(self.rank(), &collective)?;
        self.0.communicator.start(collective)
    }

    /// Carries out any collective; the methods named after them read better.
    pub fn run(&self, collective: Collective) -> Result<()> {
        in_place::check(self.rank(), &collective)?;
        self.0.communicator.run(collective)
    }

    /// Has [`Work::span`] measured for the collectives that are started from now on, also on GPUs, where that costs two events
    /// for each.
    ///
    /// # Errors
    /// An error of the GPU.
    pub fn measure_spans(&self) -> Result<()> {
        self.0.communicator.measure_spans()
    }

    /// Ends the group on every rank: work in flight and all later calls fail, here and on the peers, with `reason`.
    /// For an error after which this rank cannot make the calls that the others wait for;
    /// [`abort_on_error`](Self::abort_on_error) calls it where a whole program fails.
    pub fn abort(&self, reason: &str) {
        self.0.communicator.abort(reason);
        // Without waiting: a thread that holds a lock is connecting, and learns of the failure from this group or its
        // time-out.
        for other in [&self.0.companion, &self.0.cpu] {
            if let Ok(other) = other.try_lock()
                && let Some(other) = &*other
            {
                other.abort(reason);
            }
        }
    }

    /// Waits until every rank has come here.
    pub fn barrier(&self) -> Result<()> {
        self.run(Collective::Barrier)
    }

    /// Sends `tensor` to rank `peer`, which calls `recv`. Returns when `tensor` may be changed again.
    pub fn send(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.run(Collective::Send { tensor: tensor.clone(), peer })
    }

    /// [`send`](Self::send), without waiting.
    pub fn isend(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.start(Collective::Send { tensor: tensor.clone(), peer })
    }

    /// Receives into `tensor` what rank `peer` sends.
    pub fn recv(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.run(Collective::Recv { tensor: tensor.clone(), peer })
    }

    /// [`recv`](Self::recv), without waiting.
    pub fn irecv(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.start(Collective::Recv { tensor: tensor.clone(), peer })
    }

    /// `root`'s `output` (`None` on the other ranks), of `world_size` × the elements of `input`, becomes all ranks'
    /// inputs in rank order.
    pub fn gather(&self, output: Option<&Tensor>, input: &Tensor, root: usize) -> Result<()> {
        self.run(Collective::Gather { output: output.cloned(), input: input.clone(), root })
    }

    /// `output` becomes this rank's part of `root`'s `input` (`None` on the other ranks), which has `world_size` × its
    /// elements.
    pub fn scatter(&self, output: &Tensor, input: Option<&Tensor>, root: usize) -> Result<()> {
        self.run(Collective::Scatter { output: output.clone(), input: input.cloned(), root })
    }

    /// This rank's `result`, or, if another rank has an error, that error as [`Error::RankFailed`]. Every rank calls it.
    pub(crate) fn agree<T>(&self, result: Result<T>) -> Result<T> {
        let reports = self.gather_reports(result.as_ref().map(|_| ""));
        let value = result?;
        match reports? {
            Ok(_) => Ok(value),
            Err((rank, reason)) => Err(Error::RankFailed { rank, reason }),
        }
    }

    /// Every rank's report, in rank order; or the first rank that has an error instead, and its text. Every rank calls it.
    pub(crate) fn gather_reports(
        &self,
        report: std::result::Result<&str, &Error>,
    ) -> Result<std::result::Result<Vec<String>, (usize, String)>> {
        let encoded = self.all_gather_bytes(&encode_report(report.map(str::as_bytes)))?;
        let text = |report: Vec<u8>| String::from_utf8_lossy(&report).into_owned();
        Ok(decode_reports(encoded).map(|reports| reports.into_iter().map(text).collect()))
    }

    /// Every rank's bytes, in rank order; they may differ in length.
    pub(crate) fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (world, device) = (self.world_size(), self.device());
        // After a mere `wait`, a GPU might still read what a failed call has left.
        let all_gather = |output: &Tensor, input: &Tensor| self.all_gather_async(output, input)?.synchronize();
        let lengths = Tensor::zeros(world, DType::I64, device)?;
        all_gather(&lengths, &Tensor::new(&[bytes.len() as i64], device)?)?;
        let lengths = lengths.to_vec1::<i64>()?.into_iter().enumerate();
        let lengths: Vec<usize> = lengths.map(|(rank, length)| report_length(rank, length)).collect::<Result<_>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = Tensor::zeros(world * longest, DType::U8, device)?;
        all_gather(&all, &Tensor::from_vec(padded, longest, device)?)?;
        let all = all.to_vec1::<u8>()?;
        Ok(lengths.iter().enumerate().map(|(rank, length)| all[rank * longest..][..*length].to_vec()).collect())
    }
}

/// Far more than the report of any model.
const LONGEST_REPORT: usize = 64 << 20;

/// The number of bytes that rank `rank` says its report has. It may be anything if that rank is in another call that looks
/// alike.
fn report_length(rank: usize, length: i64) -> Result<usize> {
    usize::try_from(length).ok().filter(|length| *length <= LONGEST_REPORT).ok_or_else(|| Error::RankFailed {
        rank,
        reason: format!(
            "it sent {length} as the length of a report, which is 0 to {LONGEST_REPORT} bytes: all ranks of a group must make the \
             same calls in the same order"
        ),
    })
}

/// Writes a collective's two forms.
macro_rules! collectives {
    ($($(#[$doc:meta])* $run:ident / $start:ident = $variant:ident { $($argument:ident : $kind:ty => $value:expr),* })*) => {
        impl ProcessGroup {
            $(
                $(#[$doc])*
                pub fn $run(&self, $($argument: $kind),*) -> Result<()> {
                    self.run(Collective::$variant { $($argument: $value),* })
                }

                #[doc = concat!("[`", stringify!($run), "`](Self::", stringify!($run), "), without waiting.")]
                pub fn $start(&self, $($argument: $kind),*) -> Result<Work> {
                    self.start(Collective::$variant { $($argument: $value),* })
                }
            )*
        }
    };
}

collectives! {
    /// Every rank's `tensor` becomes the reduction of all, bit for bit the same everywhere.
    all_reduce / all_reduce_async = AllReduce { tensor: &Tensor => tensor.clone(), op: ReduceOp => op }

    /// Every rank's `tensor` becomes that of rank `root`.
    broadcast / broadcast_async = Broadcast { tensor: &Tensor => tensor.clone(), root: usize => root }

    /// The `tensor` of rank `root` becomes the reduction of all; the others' stay as they are.
    reduce / reduce_async = Reduce { tensor: &Tensor => tensor.clone(), root: usize => root, op: ReduceOp => op }

    /// `output`, of `world_size` × the elements of `input`, becomes all ranks' inputs in rank order: PyTorch's
    /// `all_gather_into_tensor`. In place, `input` is this rank's own part of `output`.
    all_gather / all_gather_async = AllGather { output: &Tensor => output.clone(), input: &Tensor => input.clone() }

    /// `output` becomes this rank's part of the reduction of all inputs, which have `world_size` × its elements:
    /// PyTorch's `reduce_scatter_tensor`.
    reduce_scatter / reduce_scatter_async = ReduceScatter {
        output: &Tensor => output.clone(), input: &Tensor => input.clone(), op: ReduceOp => op
    }

    /// Part `p` of `input` goes to rank `p`, part `p` of `output` comes from rank `p`; the `world_size` parts are equal
    /// in size: PyTorch's `all_to_all_single`.
    all_to_all / all_to_all_async = AllToAll { output: &Tensor => output.clone(), input: &Tensor => input.clone() }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("backend", &self.backend())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}
