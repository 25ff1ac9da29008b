//! Process groups: the ranks of a job, and the collectives among them.
mod batch;
mod collectives;
mod compare;
mod custom;
mod engine;
mod graph;
mod init;
pub(crate) mod job;
mod join;
mod long_work;
mod mesh;
mod monitored_barrier;
mod objects;
mod on_error;
mod parent;
mod place;
mod reports;
pub(crate) mod spawn;
mod speed;
mod stack;
mod stop;
mod subgroups;
mod tensors;
mod threads;
mod varied;
mod whole;
mod with_grad;

pub use custom::CustomOptions;
pub use engine::Backend;
pub(crate) use init::Joining;
pub use init::{InitOptions, init_process_group};
pub(crate) use join::{Active, Join, Kind, Operation};
#[cfg(test)]
pub(crate) use long_work::tests::queued;
pub use mesh::DeviceMesh;
pub use on_error::run;
pub(crate) use reports::{report_length, same_on_all};
pub(crate) use spawn::STACK_BYTES;
pub use spawn::{SpawnOptions, spawn, spawn_with};
pub(crate) use stop::Stop;
pub use stop::StopSignals;
pub use with_grad::WithGrad;

use crate::backend::{CallSite, Collective, Communicator, Construction, Role, Work};
use crate::error::Failure;
use crate::flight_recorder::Recording;
use crate::panic::lock;
use crate::rendezvous::{PrefixStore, Store};
use crate::virtual_ranks::VirtualRanks;
use crate::{Error, Result};
use candle_core::Device;
use candle_ddp_base::debug_fields;
use engine::Settings;
use job::Job;
use place::Place;
use std::collections::BTreeMap;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A group of ranks that communicate with each other: PyTorch's `ProcessGroup`. Clones are handles to the same group.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_ddp::ReduceOp;
///
/// fn main() -> candle_ddp::Result<()> {
///     candle_ddp::spawn(2, |pg| {
///         let mine = Tensor::full(pg.rank() as f32 + 1., 2, pg.device())?;
///         let all = Tensor::zeros((2, 2), DType::F32, pg.device())?;
///         pg.all_gather(&all, &mine)?;
///         assert_eq!(all.to_vec2::<f32>()?, [[1., 1.], [2., 2.]]);
///         pg.broadcast(&mine, 0)?; // in place: rank 1 gets rank 0's values
///         let sum = pg.all_reduce_async(&mine, ReduceOp::Sum)?;
///         // Other work goes here. `mine` belongs to the collective until it has been waited for.
///         sum.wait()?;
///         assert_eq!(mine.to_vec1::<f32>()?, [2., 2.]);
///         Ok(())
///     })?;
///     Ok(())
/// }
/// ```
/// Every rank of the group must make the same calls in the same order (`send` and `recv` pair up between two ranks).
/// Tensors must be contiguous, live on [`device`](Self::device), and have the same dtype and shape on every rank; dimensions of
/// size 1 do not count, and a one-dimensional tensor fits every shape with as many elements. They are changed in place, and so is
/// every other tensor that shares their storage. No gradient flows through a collective, so a tensor through which gradients flow,
/// such as a loss or the output of a model, is refused, wherever a collective would read or change it: pass `z.detach()` to be
/// read, `loss.detach().copy()?` to be changed, or use [`with_grad`](Self::with_grad), through which gradients flow. A `Var` may be passed itself: its values are used.
///
/// Where a tensor holds a part for each rank, the parts are equally many rows: dimension 0 divides by the number of ranks.
/// Part and rows have the same shape, apart from dimensions of size 1, or one of the two tensors is one-dimensional, and
/// then only the number of elements counts.
///
/// Each collective comes in two forms: the plain one returns when its results may be used; the one named `_async`
/// (`isend`, `irecv`) returns a [`Work`] at once, and the tensors must not be touched before it was waited for. With
/// NCCL, the first calls may wait until the ranks are connected.
///
/// # Errors
/// A call returns [`Error::Group`] with the [`Failure`](crate::Failure), on every rank and within the group's
/// time-out, if ranks make different calls, or if a rank is gone, reports its own error, or does not call in time. The
/// group is then broken, and all later calls return the same cause. For a tensor that the group does not accept, only
/// the calling rank gets an error, [`Error::InvalidTensor`] or [`Error::UnsupportedDType`], before anything is sent.
#[derive(Clone)]
pub struct ProcessGroup(Arc<Inner>);

/// A handle to a group that does not keep the group alive.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeakProcessGroup(Weak<Inner>);

impl WeakProcessGroup {
    /// The group, if it still exists.
    pub(crate) fn upgrade(&self) -> Option<ProcessGroup> {
        self.0.upgrade().map(ProcessGroup)
    }
}

/// The state of a group.
struct Inner {
    communicator: Arc<dyn Communicator>,
    store: Arc<dyn Store>,
    settings: Settings,
    /// The recording for the flight recorder, if there is one.
    recording: Option<Recording>,
    /// Which group of its job it is.
    place: Arc<Place>,
    /// The number of subgroups created so far. It is the same on every rank, so it identifies the next one's keys.
    subgroups: AtomicU64,
    /// The number of monitored barriers so far, for the same reason.
    barriers: AtomicU64,
    /// The join that this rank is in.
    join: Mutex<Option<Arc<Join>>>,
    companions: Mutex<BTreeMap<Role, ProcessGroup>>,
    cpu: Mutex<Option<ProcessGroup>>,
    /// Whether the program itself has ended the group.
    was_aborted: AtomicBool,
    /// The speeds of the ranks, as they have said.
    speeds: Mutex<Option<Arc<[f64]>>>,
    stop: Stop,
    kept: Mutex<Kept>,
}

/// The counts of models, each in its place: an elastic run gives it to the models that take their places in its next group.
#[derive(Default)]
struct Kept {
    models: usize,
    /// The counts of models that have counted anything.
    numbers: BTreeMap<usize, [u64; 3]>,
}

impl ProcessGroup {
    /// Creates the group of all ranks of `job`, and its engine, in which this process has rank `rank`. `store` must be the
    /// group's own.
    fn connect(
        construction: Construction,
        store: Arc<dyn Store>,
        world_size: usize,
        rank: usize,
        settings: Settings,
        job: Job,
    ) -> Result<Self> {
        VirtualRanks::check(settings.virtual_ranks, world_size)?;
        let (place, recording) = (Place::of_all(job, rank, world_size), construction.recording.cloned());
        let construction = Construction { membership: Some(&place.membership), ..construction };
        let communicator = engine::communicator(construction, Arc::clone(&store), rank, world_size, &settings)?;
        Self::around(communicator, store, place, settings, recording)
    }

    fn around(
        communicator: Box<dyn Communicator>,
        store: Arc<dyn Store>,
        place: Place,
        settings: Settings,
        recording: Option<Recording>,
    ) -> Result<Self> {
        communicator.enter_job(&place.membership)?;
        Ok(Self(Arc::new(Inner {
            communicator: communicator.into(),
            store,
            settings,
            recording,
            place: Arc::new(place),
            subgroups: AtomicU64::new(0),
            barriers: AtomicU64::new(0),
            join: Mutex::default(),
            companions: Mutex::default(),
            cpu: Mutex::default(),
            was_aborted: AtomicBool::new(false),
            speeds: Mutex::default(),
            stop: Stop::default(),
            kept: Mutex::default(),
        })))
    }

    /// This process's rank in the group, from 0 to `world_size() - 1`.
    pub fn rank(&self) -> usize {
        self.0.communicator.rank()
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.0.communicator.world_size()
    }

    /// This process's rank among the job's ranks on the same host.
    pub fn local_rank(&self) -> usize {
        self.0.settings.local_rank
    }

    /// The number of processes of the job on this host.
    pub fn local_world_size(&self) -> usize {
        self.0.settings.local_world_size
    }

    /// The ranks of this group as numbered in the group that `init_process_group` created.
    pub fn global_ranks(&self) -> &[usize] {
        &self.0.place.global_ranks
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

    /// The number of [virtual ranks](InitOptions::virtual_ranks). Groups that are split off have the same.
    pub fn virtual_ranks(&self) -> Option<usize> {
        self.0.settings.virtual_ranks
    }

    /// A key-value store that the ranks of this group share, for the program's own keys.
    pub fn store(&self) -> PrefixStore {
        PrefixStore::new("user", Arc::clone(&self.0.store))
    }

    /// Whether `other` is a handle to this group.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Writes the last calls that this rank made in all of its groups to `rank<N>.flight.json` in `folder`, which is
    /// created if it does not exist, and returns the file's path. See [`flight_recorder`](crate::flight_recorder).
    ///
    /// # Errors
    /// Returns [`Error::Io`], or [`Error::Unavailable`] if the recorder is off or the engine comes from outside.
    pub fn write_flight_record(&self, folder: &Path) -> Result<PathBuf> {
        match &self.0.recording {
            Some(recording) => Ok(recording.write(folder, "the program asked for it")?),
            None => Err(Error::Unavailable {
                what: "the flight recorder".to_string(),
                hint: "it is for this crate's engines, with InitOptions.flight_recorder.entries above 0".to_string(),
            }),
        }
    }

    /// Whether this rank has called [`abort`](Self::abort) before the group had failed.
    pub(crate) fn was_aborted(&self) -> bool {
        self.0.was_aborted.load(Ordering::Relaxed)
    }

    /// A handle that does not keep the group alive.
    pub(crate) fn downgrade(&self) -> WeakProcessGroup {
        WeakProcessGroup(Arc::downgrade(&self.0))
    }

    /// Waits until a GPU has done all its work, and returns the failure of the group, if any. Until then, the results
    /// of collectives may be missing although [`Work::wait`] has returned: the host does not wait for them, and a
    /// failure ends them on the GPU.
    pub(crate) fn settle(&self) -> Result<()> {
        if self.device().is_cpu() {
            return Ok(());
        }
        self.device().synchronize()?;
        self.failed()
    }

    /// How many handles to this group there are.
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Returns the [failure](Self::failure) of this group, if any; after a failure, not all ranks would join another group. The launcher
    /// is told of an error that the program returns only if it has been [noted](Self::note).
    pub(crate) fn failed(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |error| Err(self.note(error)))
    }

    /// Starts any collective. The methods named after the collectives are easier to read.
    #[track_caller]
    pub(crate) fn start(&self, collective: Collective) -> Result<Work> {
        graph::check(self.rank(), &collective)?;
        let place = &self.0.place;
        let started = CallSite::during(Location::caller(), || self.0.communicator.start(collective));
        Ok(place.noting(started.map_err(|error| place.note(error))?))
    }

    /// Starts a collective behind a call of another group, whenever that ends, if the engine [can](Self::starts_behind).
    #[track_caller]
    pub(crate) fn start_after(&self, collective: Collective, after: &Work) -> Result<Work> {
        graph::check(self.rank(), &collective)?;
        let place = &self.0.place;
        let start = || self.0.communicator.start_after(collective, after);
        Ok(place.noting(CallSite::during(Location::caller(), start).map_err(|error| place.note(error))?))
    }

    /// Whether a call can be started behind one of another group, which then need not have ended.
    pub(crate) fn starts_behind(&self) -> bool {
        self.backend() == Backend::Nccl
    }

    /// Runs any collective. The methods named after the collectives are easier to read.
    #[track_caller]
    pub(crate) fn run(&self, collective: Collective) -> Result<()> {
        graph::check(self.rank(), &collective)?;
        let ran = CallSite::during(Location::caller(), || self.0.communicator.run(collective));
        self.0.place.noted(ran)
    }

    /// Makes [`Work::span`] available for collectives started from now on. On GPUs this costs two events for each.
    ///
    /// # Errors
    /// Returns an error of the GPU.
    pub(crate) fn measure_spans(&self) -> Result<()> {
        self.0.communicator.measure_spans()
    }

    /// The ranks that are known to have ended, or to have left the group after it had failed.
    pub(crate) fn gone(&self) -> Vec<usize> {
        self.0.communicator.gone()
    }

    /// The reason why this group, or one that is a part of it, such as the one that its layers use, has failed, if known.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.0.communicator.failure().or_else(|| self.0.place.failure_of_parts())
    }

    /// The reason why the group of all ranks has failed, or must end: a part of it has failed, or a process has ended, as a call in any group
    /// of the job has found.
    pub(crate) fn end_of_job(&self) -> Option<Error> {
        self.failure().or_else(|| Some(self.0.place.ended()?.into()))
    }

    /// Whether a call has said, in any group of the job, that another rank has failed or left that group.
    pub(crate) fn has_echo(&self) -> bool {
        self.0.place.job.has_echo()
    }

    /// The place of a new model, and what the model there has counted in the last group of an elastic run. All ranks make their models
    /// in the same order.
    pub(crate) fn keep(&self) -> (usize, [u64; 3]) {
        let mut kept = lock(&self.0.kept);
        let place = kept.models;
        kept.models += 1;
        (place, kept.numbers.get(&place).copied().unwrap_or_default())
    }

    /// Keeps what the model in `place` has counted.
    pub(crate) fn keep_numbers(&self, place: usize, numbers: [u64; 3]) {
        let mut kept = lock(&self.0.kept);
        match numbers {
            [0, 0, 0] => drop(kept.numbers.remove(&place)),
            _ => drop(kept.numbers.insert(place, numbers)),
        }
    }

    /// The counts of models, with their places.
    pub(crate) fn kept(&self) -> BTreeMap<usize, [u64; 3]> {
        lock(&self.0.kept).numbers.clone()
    }

    /// Begins with what the models of another group have counted.
    pub(crate) fn take_over(&self, numbers: BTreeMap<usize, [u64; 3]>) {
        lock(&self.0.kept).numbers = numbers;
    }

    /// Ends the group on every rank: work in flight and all later calls fail with `reason`, here and on the peers. Use
    /// it after an error that prevents this rank from making calls for which the others wait;
    /// [`abort_on_error`](Self::abort_on_error) does so when a whole program fails.
    ///
    /// If a call of this rank has found in another group of the job that a process of this one has ended, that is the
    /// reason instead.
    pub fn abort(&self, reason: &str) {
        let place = &self.0.place;
        // This rank's error may come from there.
        let cause = place.ended().or_else(|| place.failure_of_parts()?.failure().cloned());
        if cause.is_none() && self.0.communicator.failure().is_none() {
            self.0.was_aborted.store(true, Ordering::Relaxed);
        }
        let failure = cause.unwrap_or_else(|| self.own_failure(reason));
        self.0.communicator.fail(failure.clone());
        place.end_parts(&failure);
    }

    /// Ends the group of all ranks, and all groups that are split off from it, because of something outside them. If the engine
    /// is looking for the reason of a failure, does not wait for that.
    pub(crate) fn supersede(&self, reason: &str) {
        let place = &self.0.place;
        let failure = place.ended().unwrap_or_else(|| self.own_failure(reason));
        self.0.communicator.fail(failure.clone());
        place.job.end_groups(None, &failure);
    }

    fn own_failure(&self, reason: &str) -> Failure {
        Failure::PeerFailed { peer: self.rank(), reason: reason.to_string() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tell_end();
    }
}

debug_fields!(ProcessGroup: |this| rank = this.rank(), world_size = this.world_size(), backend = this.backend(),
    device = this.device());
