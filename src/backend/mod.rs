//! The engines that move tensors between ranks, behind one trait.
pub(crate) mod batch;
mod bytes;
mod check;
pub(crate) mod collective;
pub mod cpu;
mod label;
// Without the feature, the same names return errors. This is the only difference between the two builds.
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(not(feature = "nccl"))]
#[path = "nccl/absent.rs"]
pub mod nccl;
pub(crate) mod single;
pub(crate) mod work;

pub(crate) use batch::P2pOp;
pub use bytes::{bytes, bytes_mut};
pub(crate) use candle_ddp_engine::ReduceOp;
pub(crate) use candle_ddp_engine::{CallSite, Construction, Label};
pub(crate) use check::on_device;
pub(crate) use collective::Access;
pub use collective::Collective;
pub(crate) use label::Purpose;
pub use work::Completion;
pub(crate) use work::Work;

use crate::error::Failure;
use crate::rendezvous::Store;
use crate::{Error, Result};
use std::sync::Arc;

/// Whether the engines support tensors of `dtype`.
pub(crate) fn takes(dtype: candle_core::DType) -> bool {
    check::element(dtype).is_some()
}

/// The result of [`Communicator::split`].
#[non_exhaustive]
pub enum Split {
    /// The engine cannot split groups.
    Unsupported,
    /// This rank's engine of the new group.
    Member(Box<dyn Communicator>),
    /// This rank is not in the new group.
    NotMember,
}

impl std::fmt::Debug for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsupported => f.write_str("Unsupported"),
            Self::Member(engine) => {
                let (rank, world_size) = (engine.rank(), engine.world_size());
                f.debug_struct("Member").field("rank", &rank).field("world_size", &world_size).finish_non_exhaustive()
            }
            Self::NotMember => f.write_str("NotMember"),
        }
    }
}

/// The purpose of a group that is made from another one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A group of some ranks.
    Group,
    /// The ranks that have copies of the same pieces of a model, often on different hosts.
    Copies,
    /// The same ranks, for calls inside a model.
    Companion,
    /// The same ranks, for the gathers of a model's blocks.
    Gathers,
}

/// An engine that runs the collectives of one group, in the order in which they are started.
///
/// All ranks of the group must start the same collectives in the same order (`Send` and `Recv` pair up between two
/// ranks only, in their own order). After an error the group is broken: every later call returns the same cause.
pub trait Communicator: Send + Sync {
    /// This process's rank in the group.
    fn rank(&self) -> usize;

    /// The number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Starts `collective`. Its tensors must not be touched until the returned [`Work`] is waited for: an engine may read and
    /// write their memory without candle's lock, as MPI does, so even reading them is a data race. Gradients end here: an engine
    /// moves values. [`ProcessGroup`](crate::ProcessGroup) gives it no tensor through which gradients flow.
    ///
    /// # Errors
    /// Returns an error for a collective that cannot be started, and the cause if the group is broken.
    fn start(&self, collective: Collective) -> Result<Work>;

    /// Starts `collective` behind `after`, a call of another group on the same device: in their order, whenever `after` ends. By default,
    /// waits for that first.
    #[doc(hidden)]
    fn start_after(&self, collective: Collective, after: &Work) -> Result<Work> {
        after.wait()?;
        self.start(collective)
    }

    /// Runs `collective` and waits for it; an engine may do so on the calling thread. Gradients end here, as in
    /// [`start`](Self::start).
    ///
    /// # Errors
    /// As [`start`](Self::start) and [`Work::wait`].
    fn run(&self, collective: Collective) -> Result<()> {
        self.start(collective)?.wait()
    }

    /// Starts `batch`, whose messages progress together: [`ProcessGroup::batch_isend_irecv`], which has checked them as
    /// [`Collective::check`] does. By default, each message is [started](Self::start) as a call, those that are sent first; this
    /// suits an engine whose messages of different ranks and directions do not wait for each other. Gradients end here, as in
    /// [`start`](Self::start).
    ///
    /// [`ProcessGroup::batch_isend_irecv`]: crate::ProcessGroup::batch_isend_irecv
    ///
    /// # Errors
    /// As [`start`](Self::start).
    fn start_batch(&self, batch: Vec<P2pOp>) -> Result<Work> {
        let (sends, recvs): (Vec<_>, Vec<_>) = batch.into_iter().partition(|message| !message.is_recv());
        let works = sends.into_iter().chain(recvs).map(|message| self.start(message.into()));
        Ok(Work::all(works.collect::<Result<_>>()?))
    }

    /// Makes [`Work::span`] available for collectives started from now on, if measuring costs something, as on GPUs.
    /// Call it again from time to time to keep the times exact.
    ///
    /// # Errors
    /// An error of the device, which measures.
    fn measure_spans(&self) -> Result<()> {
        Ok(())
    }

    /// The reason why the group has failed, or why calls of all its ranks can no longer succeed, as far as the engine knows
    /// without asking the other ranks.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// The peers that are known to have ended, or to have left the group after it had failed. Empty if the engine does
    /// not know.
    fn gone(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Ends the group on every rank: work in flight and all later calls fail, here and on the peers, with `reason`.
    fn abort(&self, reason: &str);

    /// Like [`abort`](Self::abort), with the failure of another group, whose ranks are numbered here as in this one: for
    /// example the end of a peer's process, which was seen there first. By default, aborts with its text, so that the peers
    /// take this rank for the one that failed.
    fn fail(&self, failure: Failure) {
        match failure {
            Failure::PeerFailed { peer, reason } if peer == self.rank() => self.abort(&reason),
            failure => self.abort(&failure.to_string()),
        }
    }

    /// Tells the engine which place its group has among the groups of the job. An engine of this crate then notices ranks that wait for each
    /// other in two groups.
    #[doc(hidden)]
    #[allow(unused_variables)]
    fn enter_job(&self, membership: &candle_ddp_engine::standing::Membership) -> Result<()> {
        Ok(())
    }

    /// Creates the engine of a new group from this one. Rank `i` of the new group is rank `ranks[i]` of this one, and
    /// only the new group uses `store`. Every rank of this group must call it with the same `ranks`, even if it is not
    /// one of them.
    ///
    /// # Errors
    /// Returns an error if the group has failed, or the new one cannot be created.
    #[allow(unused_variables)]
    fn split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        Ok(Split::Unsupported)
    }

    /// Creates a second engine of the same ranks, whose calls are independent of this one's: MPI's `MPI_Comm_dup`. Only
    /// the new group uses `store`. Every rank of this group must call it; calls of this group may be in flight
    /// meanwhile. By default, the group of all ranks is [split](Self::split) off.
    ///
    /// # Errors
    /// Returns an error if the group has failed, or the new one cannot be created.
    fn duplicate(&self, store: Arc<dyn Store>) -> Result<Split> {
        self.split(&(0..self.world_size()).collect::<Vec<_>>(), store)
    }

    /// [Splits](Self::split) a group off, or [duplicates](Self::duplicate) this one, as an engine does that makes groups of several roles.
    #[doc(hidden)]
    fn make(&self, role: Role, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        match role {
            Role::Group | Role::Copies => self.split(ranks, store),
            Role::Companion | Role::Gathers => self.duplicate(store),
        }
    }
}
