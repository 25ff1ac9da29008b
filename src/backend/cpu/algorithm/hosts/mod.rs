//! The collectives of groups that bridge hosts: shared memory inside of a host, TCP between hosts.
//!
//! Reductions take a host's ranks in order, and then the hosts in the order of their lowest ranks, whatever the
//! collective and its size. What crosses from one host to another is of the tensors' type: f16 and bf16 are rounded
//! there.
mod all_reduce;
mod gather;
mod reduce;
mod root;

use super::shared;
use super::{Scratch, Tuning, whole_elements};
use crate::backend::call::Call;
use crate::backend::cpu::hosts::Hosts;
use crate::backend::cpu::kernels::Reduction;
use crate::backend::cpu::piece::{Piece, PieceMut};
use crate::backend::cpu::session::{Recvs, Session};
use crate::backend::cpu::shm::{Source, Streams, reduce};
use crate::backend::cpu::storage::Region;
use crate::backend::cpu::transport_error::TransportError;
use crate::backend::{Collective, ReduceOp};
use crate::error::Failure;
use std::ops::Range;

/// One collective of a group that spans hosts.
pub(crate) struct Bridge<'s, 'a> {
    session: &'s mut Session<'a>,
    hosts: &'a Hosts,
    /// The streams of this host; `None` on a rank that is alone there.
    streams: Option<Streams<'a>>,
    tuning: Tuning,
}

/// Carries out a collective; `Send` and `Recv` are none.
pub(crate) fn execute(
    bridge: &mut Bridge,
    scratch: &mut Scratch,
    call: Call,
    collective: &Collective,
) -> Result<(), Failure> {
    let Some(element) = call.element else { return bridge.barrier() };
    let is_root = call.root == Some(bridge.session.rank());
    let ranks = bridge.session.world_size();
    let reduction = |op: &_| Reduction { element, op: *op, ranks };
    let locking = bridge.session.locking();
    let region = |tensor| Region::of(tensor, locking);
    match collective {
        Collective::AllReduce { tensor, op } => bridge.all_reduce(scratch, region(tensor), reduction(op)),
        Collective::Broadcast { tensor, .. } if is_root => bridge.broadcast_from_here(region(tensor), element),
        Collective::Broadcast { tensor, root } => bridge.broadcast_to_here(*root, region(tensor), element),
        Collective::Reduce { tensor, op, .. } if is_root => {
            bridge.reduce_to_here(scratch, region(tensor), reduction(op))
        }
        Collective::Reduce { tensor, op, root } => bridge.reduce_to(*root, scratch, region(tensor), reduction(op)),
        Collective::AllGather { output, input } => bridge.all_gather(region(output), region(input), element),
        Collective::ReduceScatter { output, input, op } => {
            bridge.reduce_scatter(scratch, region(output), region(input), reduction(op))
        }
        Collective::AllToAll { output, input } => bridge.all_to_all(region(output), region(input)),
        Collective::Gather { output: Some(output), input, .. } => bridge.gather_to_here(region(output), region(input)),
        Collective::Gather { output: None, input, root } => bridge.gather_to(*root, region(input)),
        Collective::Scatter { output, input: Some(input), .. } => {
            bridge.scatter_from_here(region(output), region(input))
        }
        Collective::Scatter { output, input: None, root } => bridge.scatter_from(*root, region(output)),
        Collective::Barrier => bridge.barrier(),
        Collective::Send { .. } | Collective::Recv { .. } => {
            let error = TransportError::System("messages do not travel with the collectives".into());
            Err(bridge.session.failure(error))
        }
    }
}

impl<'s, 'a> Bridge<'s, 'a> {
    pub(crate) fn new(session: &'s mut Session<'a>, streams: Option<Streams<'a>>, tuning: Tuning) -> Self {
        let hosts = session.hosts();
        Self { session, hosts, streams, tuning }
    }

    /// Does `work` in the shared memory of this host; nothing on a rank that is alone there.
    fn inside(&mut self, work: impl FnOnce(&mut Streams) -> Result<(), TransportError>) -> Result<(), Failure> {
        let Some(streams) = &mut self.streams else { return Ok(()) };
        work(streams).map_err(|error| self.session.failure_inside(error))
    }

    /// `out` becomes this host's part of the reduction of `own` and of the parts of the slots that its other ranks have
    /// published, or will.
    fn reduce_inside(
        &mut self,
        reduction: Reduction,
        own: Region,
        part: impl Fn(usize) -> Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Failure> {
        if self.streams.is_none() {
            let reduced = own.read(|own| reduce(reduction, &[Source::Private(own)], out, None));
            return self.session.move_bytes(reduced);
        }
        self.inside(|streams| {
            streams.receive_all()?;
            own.read(|own| reduce(reduction, &streams.arrived().sources(Source::Private(own), part), out, None))?;
            streams.release_all();
            Ok(())
        })
    }

    /// Bytes that travel at a time, the same on all hosts.
    fn length(&self, element_size: usize) -> usize {
        whole_elements(self.tuning.segment, element_size)
    }

    /// By the numbers of this host's ranks: that rank, and the ranks of other hosts whose data it gets for all here, or
    /// sends for all here.
    fn proxied(&self) -> Vec<Vec<usize>> {
        let members = self.hosts.members();
        let mut proxied: Vec<Vec<usize>> = members.iter().map(|member| vec![*member]).collect();
        for (_, ranks) in self.hosts.others() {
            for (index, rank) in ranks.iter().enumerate() {
                proxied[index % members.len()].push(*rank);
            }
        }
        proxied
    }

    /// Returns once all ranks have come: those of this host, and then one of every other host that knows the same of
    /// its own.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.inside(shared::barrier)?;
        let (index, mut sends, mut recvs) = (self.hosts.index(), Vec::new(), Recvs::new());
        for (_, ranks) in self.hosts.others() {
            sends.extend(self.hosts.clients(ranks).map(|rank| (rank, Piece::Memory(&[]))));
            recvs.push((Hosts::proxy(ranks, index), PieceMut::Memory(&mut [])));
        }
        self.session.exchange(&sends, recvs)
    }
}

/// The reduction of all hosts' parts, each the result of the given reduction inside its host. An average is one of
/// parts that are divided by the number of all ranks already, so that f16 does not overflow on its way.
fn between(reduction: Reduction) -> Reduction {
    match reduction.op {
        ReduceOp::Avg => Reduction { op: ReduceOp::Sum, ..reduction },
        _ => reduction,
    }
}
