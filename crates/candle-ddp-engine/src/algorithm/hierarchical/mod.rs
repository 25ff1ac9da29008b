//! The collectives of groups with several hosts: shared memory inside a host, TCP between hosts.
//!
//! Reductions take a host's ranks in order, and then the hosts in the order of their lowest ranks, whatever the
//! collective and its size. Data moves between hosts in the tensors' dtype, so f16 and bf16 are rounded before.
mod all_reduce;
mod gather;
mod reduce;
mod root;

use super::dispatch::ByteCollectives;
use super::shm;
use super::{Scratch, Tuning, whole_elements};
use crate::call::{Channel, Element};
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::memory::Region;
use crate::reduce_op::ReduceOp;
use crate::reduction::Reduction;
use crate::session::Session;
use crate::shm::session::ShmSession;
use crate::shm::{Source, Streams, reduce};
use crate::tcp::piece::{Piece, PieceMut};
use crate::tcp::session::{Recvs, TcpSession};
use crate::transport_error::TransportError;
use std::ops::Range;

/// One call of a group in which some ranks share memory and others do not.
pub(crate) struct Hierarchical<'s, 'a> {
    bridge: Bridge<'a>,
    /// `None` on a rank that is alone on its host.
    shm: Option<ShmSession<'a>>,
    scratch: &'s mut Scratch,
}

impl<'s, 'a> Hierarchical<'s, 'a> {
    pub(crate) fn new(
        session: Session<'a>,
        shm: Option<ShmSession<'a>>,
        scratch: &'s mut Scratch,
        tuning: Tuning,
    ) -> Self {
        // Messages use their own streams and must not wait for those of the collectives.
        let of_collectives = shm.filter(|_| session.channel == Channel::Collectives);
        let streams = of_collectives.map(|shm| shm.streams());
        let bridge = Bridge { hosts: session.hosts(), session: TcpSession::new(session), streams, tuning };
        Self { bridge, shm, scratch }
    }

    fn is_here(&self, root: usize) -> bool {
        root == self.bridge.session.rank()
    }

    /// The shared memory with `peer`, if it is on this host.
    fn shm_with(&self, peer: usize) -> Option<ShmSession<'a>> {
        self.shm.filter(|_| self.bridge.hosts.member(peer).is_some())
    }
}

impl ByteCollectives for Hierarchical<'_, '_> {
    fn all_reduce(&mut self, data: Region, reduction: Reduction) -> Result<(), Failure> {
        self.bridge.all_reduce(self.scratch, data, reduction)
    }

    fn broadcast(&mut self, data: Region, root: usize, element: Element) -> Result<(), Failure> {
        match self.is_here(root) {
            true => self.bridge.broadcast_from_here(data, element),
            false => self.bridge.broadcast_to_here(root, data, element),
        }
    }

    fn reduce(&mut self, data: Region, root: usize, reduction: Reduction) -> Result<(), Failure> {
        match self.is_here(root) {
            true => self.bridge.reduce_to_here(self.scratch, data, reduction),
            false => self.bridge.reduce_to(root, self.scratch, data, reduction),
        }
    }

    fn all_gather(&mut self, output: Region, input: Region, element: Element) -> Result<(), Failure> {
        self.bridge.all_gather(output, input, element)
    }

    fn reduce_scatter(&mut self, output: Region, input: Region, reduction: Reduction) -> Result<(), Failure> {
        self.bridge.reduce_scatter(self.scratch, output, input, reduction)
    }

    fn all_to_all(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        self.bridge.all_to_all(output, input)
    }

    fn gather(&mut self, output: Option<Region>, input: Region, root: usize) -> Result<(), Failure> {
        match output {
            Some(output) => self.bridge.gather_to_here(output, input),
            None => self.bridge.gather_to(root, input),
        }
    }

    fn scatter(&mut self, output: Region, input: Option<Region>, root: usize) -> Result<(), Failure> {
        match input {
            Some(input) => self.bridge.scatter_from_here(output, input),
            None => self.bridge.scatter_from(root, output),
        }
    }

    fn send(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        match self.shm_with(peer) {
            Some(shm) => shm.send(data, peer),
            None => self.bridge.session.exchange(&[(peer, data.into())], vec![]),
        }
    }

    fn recv(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        match self.shm_with(peer) {
            Some(shm) => shm.recv(data, peer),
            None => self.bridge.session.exchange(&[], vec![(peer, data.into())]),
        }
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        self.bridge.barrier()
    }
}

/// The two data paths of a collective: shared memory inside this host, TCP between hosts.
struct Bridge<'a> {
    session: TcpSession<'a>,
    hosts: &'a Hosts,
    /// The streams of this host; `None` on a rank that is alone there, and for messages.
    streams: Option<Streams<'a>>,
    tuning: Tuning,
}

impl Bridge<'_> {
    /// Runs `work` in the shared memory of this host; does nothing on a rank that is alone there.
    fn inside(&mut self, work: impl FnOnce(&mut Streams) -> Result<(), TransportError>) -> Result<(), Failure> {
        let Some(streams) = &mut self.streams else { return Ok(()) };
        work(streams).map_err(|error| self.session.failure_inside(error))
    }

    /// `out` becomes the reduction of `own` and of the given parts of the slots that the other ranks of this host publish.
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

    /// The number of bytes sent at a time; the same on all hosts.
    fn length(&self, element_size: usize) -> usize {
        whole_elements(self.tuning.segment, element_size)
    }

    /// For each rank of this host, by its number here: that rank itself, and the ranks of other hosts with which it
    /// exchanges data on behalf of all ranks of this host.
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

    /// Returns once all ranks have made the call: the leader of each host waits for its host, then for the other leaders, and
    /// then its host for it. It is the first call of a group, whose other connections are made when they are needed.
    fn barrier(&mut self) -> Result<(), Failure> {
        self.inside(shm::barrier)?;
        let leaders = self.hosts.contacts();
        let sends: Vec<_> = leaders.iter().map(|leader| (*leader, Piece::EMPTY)).collect();
        let recvs: Recvs = leaders.iter().map(|leader| (*leader, PieceMut::Memory(&mut []))).collect();
        self.session.exchange(&sends, recvs)?;
        self.inside(|streams| {
            streams.await_others();
            shm::barrier(streams)
        })
    }
}

/// The reduction of all hosts' parts, where each part is the result of the given reduction inside its host. The parts of
/// an average are already divided by the number of all ranks, so that f16 does not overflow on the way.
fn between(reduction: Reduction) -> Reduction {
    match reduction.op {
        ReduceOp::Avg => Reduction { op: ReduceOp::Sum, ..reduction },
        _ => reduction,
    }
}
