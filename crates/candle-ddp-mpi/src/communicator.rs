use crate::comm::Comm;
use crate::group::Group;
use crate::lifetime::library;
use crate::options::MpiOptions;
use crate::queues::Outcome;
use candle_ddp::backend::{Collective, Communicator, Completion, Split};
use candle_ddp::rendezvous::Store;
use candle_ddp::{Error, Failure, Result, Work};
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::lock;
use candle_ddp_base::thread::spawn;
use mpi::ffi::MPI_Comm;
use mpi::raw::AsRaw;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// One rank of a group whose tensors are on the CPU, over MPI.
///
/// Calls are non-blocking functions of MPI. Collectives run in the order in which they are started; messages between two ranks
/// have their own order for each pair and direction. A thread that waits for a call moves all calls of the group on; calls
/// for which nobody waits are moved on by a thread of the engine, so that they overlap with the program's work. MPI must
/// allow calls from several threads: with `MPI_THREAD_MULTIPLE` they may come at the same time, with
/// `MPI_THREAD_SERIALIZED` the engine makes them one at a time, and the program must make none.
///
/// MPI reads and writes the tensors' own memory, without copies and without candle's lock. So a tensor must not be
/// touched before the call is over, as the trait says; other slices of its storage may be.
///
/// f16 and bf16 are added in f32 and rounded after each addition. The order of additions is MPI's. The usual libraries give
/// the same bits on all ranks and in every call with the same ranks, which the conformance suite checks.
///
/// The first failure ends the group for all its ranks: an error of MPI, a call that exceeds the time-out, or a rank that
/// leaves early. MPI does not find out that ranks made different calls: they get an error of MPI, or time out. The death
/// of a process ends all processes of the job.
///
/// Dropping it waits for the calls that were started and then tells the peers that this rank leaves, or, while
/// panicking, that it failed.
pub struct MpiCommunicator {
    group: Arc<Group>,
    /// Moves calls on for which nobody waits; started with the first of them.
    thread: Mutex<Option<JoinHandle<()>>>,
}

debug_fields!(MpiCommunicator: |this| rank = this.rank(), world_size = this.world_size());

impl MpiCommunicator {
    /// The engine of all processes that the launcher started (`MPI_COMM_WORLD`), which all of them must create. MPI is
    /// initialised, unless the program has done so, and then ends with the process.
    ///
    /// # Errors
    /// Returns [`Error::Unavailable`] if MPI cannot be initialised or does not allow calls from several threads, and
    /// [`Error::Engine`] for its other errors.
    pub fn world(options: MpiOptions) -> Result<Self> {
        Self::duplicate_of(Comm::world(library()?), options)
    }

    /// The engine of the ranks of a communicator of the crate [`mpi`], which is duplicated. All its ranks must call it.
    ///
    /// # Errors
    /// Returns the errors of [`world`](Self::world).
    pub fn of(communicator: &impl AsRaw<Raw = MPI_Comm>, options: MpiOptions) -> Result<Self> {
        Self::duplicate_of(Comm::of(library()?, communicator.as_raw()), options)
    }

    fn duplicate_of(comm: Comm, options: MpiOptions) -> Result<Self> {
        let own = comm.duplicate().map_err(|error| error.of_rank(0))?;
        Ok(Self { group: Group::new(own, options)?, thread: Mutex::default() })
    }

    fn ensure_thread(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let group = self.group.clone();
            *thread = Some(spawn(format!("ddp-{}-mpi", group.rank), move || group.work())?);
        }
        Ok(())
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        self.ensure_thread()?;
        let outcome = self.group.put(collective)?;
        self.group.wake();
        Ok(Work::new(Pending { outcome, group: self.group.clone() }))
    }

    fn run(&self, collective: Collective) -> Result<()> {
        let outcome = self.group.put(collective)?;
        self.group.wait(&outcome)
    }

    fn failure(&self) -> Option<Error> {
        self.group.failure()
    }

    fn abort(&self, reason: &str) {
        self.fail(Failure::PeerFailed { peer: self.rank(), reason: reason.to_string() });
    }

    fn fail(&self, failure: Failure) {
        self.group.abort(failure);
    }

    fn split(&self, ranks: &[usize], _: Arc<dyn Store>) -> Result<Split> {
        if let Some(failure) = self.group.failure() {
            return Err(failure);
        }
        let place = ranks.iter().position(|rank| *rank == self.rank());
        let Some(comm) = self.group.make(place)? else { return Ok(Split::NotMember) };
        let group = Group::new(comm, self.group.options.clone())?;
        Ok(Split::Member(Box::new(Self { group, thread: Mutex::default() })))
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        self.group.leave();
        let thread = lock(&self.thread).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            log::error!("rank {}: an engine thread panicked", self.rank());
        }
    }
}

/// A call that was started.
struct Pending {
    outcome: Arc<Outcome>,
    group: Arc<Group>,
}

impl Completion for Pending {
    fn wait(&self) -> Result<()> {
        self.group.wait(&self.outcome)
    }

    fn is_completed(&self) -> bool {
        if self.outcome.get().is_none() {
            self.group.nudge();
        }
        self.outcome.get().is_some()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.outcome.get().map(|(_, span)| *span)
    }
}
