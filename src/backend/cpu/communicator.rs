use super::check::{check, check_batch};
use super::in_flight::{Caller, InFlight};
use super::memory::with_operands;
use crate::backend::{Collective, Communicator, Completion, Construction, P2pOp, Work};
use crate::error::Failure;
use crate::rendezvous::Store;
use crate::{Error, Result};
use candle_ddp_base::debug_fields;
use candle_ddp_engine::{self as engine, Call, Channel, CpuOptions, Engine, Operands, Tensors};
use std::sync::Arc;
use std::time::Instant;

/// One rank of a group whose tensors are on the CPU. Ranks on one host share memory; between hosts, data travels over
/// TCP.
///
/// Collectives run in the order in which they are started: with [`run`](Communicator::run) on the calling thread if no
/// other call is queued, otherwise on an engine thread. Messages between two ranks (`Send`, `Recv`) have their own
/// order for each pair and direction, and do not wait for collectives.
///
/// Slices of one tensor may be in several calls at once. The later of two calls is refused with
/// [`Error::InvalidTensor`] if the slices overlap, one of the calls changes the common bytes, and the calls are in
/// different groups or channels. A tensor's storage is locked only while bytes move, so reading a tensor in flight may
/// give partial results: wait for the call first. A call cannot change a tensor while the program holds the guard that
/// `storage_and_layout()` returned; it then times out with an error that says so.
///
/// Reductions take the ranks of each host in order, and then the hosts in the order of their lowest ranks. f16 and bf16
/// are accumulated in f32, and rounded for each host and at the end. So results are bit-identical on all ranks, and in
/// every run with the same ranks on the same hosts.
///
/// The first failure ends the group for all its ranks: a rank that leaves early or makes a different call, a call that
/// needs more data from a rank whose process has ended, or a call that exceeds the time-out. Every rank gets the same
/// cause, as an [`Error`] that names the culprit. Data that a rank sent before its process ended still arrives.
///
/// Dropping it waits for the calls that were started and then tells the peers that this rank leaves, or, while
/// panicking, that it failed.
pub struct CpuCommunicator {
    engine: Engine,
}

debug_fields!(CpuCommunicator: |this| rank = this.rank(), world_size = this.world_size());

impl CpuCommunicator {
    /// Connects rank `rank` to the other ranks of a group of `world_size`, and returns once all are connected.
    ///
    /// `store` must be shared by all ranks and used by this group only. It is not needed afterwards.
    pub fn new(store: Arc<dyn Store>, rank: usize, world_size: usize, options: CpuOptions) -> Result<Self> {
        Self::within(Construction::default(), store, rank, world_size, options)
    }

    /// Like [`new`](Self::new), but `construction` may end it early.
    pub(crate) fn within(
        construction: Construction,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        options: CpuOptions,
    ) -> Result<Self> {
        Ok(Self { engine: Engine::new(construction, store, rank, world_size, options)? })
    }

    fn check(&self, collective: &Collective) -> Result<(Call, Channel)> {
        check(self.rank(), self.world_size(), collective)
    }

    /// Records that a call that will be [put into its queue](Self::push) is in flight, unless it conflicts with another one.
    fn enter(&self, call: Call, channel: Channel, collective: Collective) -> Result<Queued> {
        let queue = self.engine.queue(channel)?;
        queue.prepare()?;
        let in_flight = Caller { queue: queue.id(), rank: self.rank(), call }.enter(&collective)?;
        Ok(Queued { in_flight, collective })
    }

    fn push(&self, call: Call, channel: Channel, queued: Queued) -> Result<Work> {
        Ok(Work::new(self.engine.queue(channel)?.start(call, Box::new(queued))?))
    }
}

/// The tensors of a queued call. They are in flight until they are dropped.
struct Queued {
    #[expect(dead_code, reason = "what counts is when it is dropped: before the tensors")]
    in_flight: InFlight,
    collective: Collective,
}

impl Tensors for Queued {
    fn with(&self, work: &mut dyn FnMut(Operands)) {
        with_operands(&self.collective, work);
    }
}

impl Completion for engine::Work {
    fn wait(&self) -> Result<()> {
        Ok(self.wait()?)
    }

    fn is_completed(&self) -> bool {
        self.is_completed()
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        self.span()
    }
}

impl Communicator for CpuCommunicator {
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        if self.world_size() == 1 {
            self.run(collective)?;
            return Ok(Work::done());
        }
        let (call, channel) = self.check(&collective)?;
        self.push(call, channel, self.enter(call, channel, collective)?)
    }

    fn run(&self, collective: Collective) -> Result<()> {
        let (call, channel) = self.check(&collective)?;
        let queue = self.engine.queue(channel)?;
        Caller { queue: queue.id(), rank: self.rank(), call }.compare(&collective)?;
        match with_operands(&collective, |operands| queue.run(call, operands)) {
            Some(result) => Ok(result?),
            None => self.push(call, channel, self.enter(call, channel, collective)?)?.wait(),
        }
    }

    fn start_batch(&self, batch: Vec<P2pOp>) -> Result<Work> {
        let calls = check_batch(self.rank(), self.world_size(), &batch)?;
        let entered = calls
            .into_iter()
            .zip(batch)
            .map(|((call, channel), message)| Ok((call, channel, self.enter(call, channel, message.into())?)));
        // All are accepted before the first is sent.
        let entered = entered.collect::<Result<Vec<_>>>()?.into_iter();
        let works = entered.map(|(call, channel, queued)| self.push(call, channel, queued));
        Ok(Work::all(works.collect::<Result<_>>()?))
    }

    fn failure(&self) -> Option<Error> {
        self.engine.failure().map(Error::from)
    }

    fn gone(&self) -> Vec<usize> {
        self.engine.gone()
    }

    fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    fn fail(&self, failure: Failure) {
        self.engine.fail(failure);
    }
}
