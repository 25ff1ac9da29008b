//! The collectives of groups in which no two ranks share memory: over TCP, from every rank directly to every other.
mod all_reduce;
mod broadcast;
mod direct;

pub(crate) use broadcast::{broadcast_from_here, broadcast_to_here};

use super::dispatch::ByteCollectives;
use super::{Scratch, Tuning};
use crate::call::Element;
use crate::error::Failure;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::tcp::session::TcpSession;

/// One call over TCP.
pub(crate) struct Flat<'s, 'a> {
    pub(crate) session: TcpSession<'a>,
    pub(crate) scratch: &'s mut Scratch,
    pub(crate) tuning: Tuning,
}

impl ByteCollectives for Flat<'_, '_> {
    fn all_reduce(&mut self, data: Region, reduction: Reduction) -> Result<(), Failure> {
        all_reduce::all_reduce(&mut self.session, self.scratch, self.tuning, data, reduction)
    }

    fn broadcast(&mut self, data: Region, root: usize, element: Element) -> Result<(), Failure> {
        let receivers: Vec<usize> = (0..self.session.world_size()).filter(|rank| *rank != root).collect();
        if root == self.session.rank() {
            broadcast_from_here(&mut self.session, self.tuning, &receivers, data, element)
        } else {
            broadcast_to_here(&mut self.session, self.tuning, (root, &receivers), data, element)
        }
    }

    fn reduce(&mut self, data: Region, root: usize, reduction: Reduction) -> Result<(), Failure> {
        if root == self.session.rank() {
            direct::reduce_to_here(&mut self.session, self.scratch, self.tuning, data, reduction)
        } else {
            self.send(data, root)
        }
    }

    fn all_gather(&mut self, output: Region, input: Region, _: Element) -> Result<(), Failure> {
        direct::all_gather(&mut self.session, output, input)
    }

    fn reduce_scatter(&mut self, output: Region, input: Region, reduction: Reduction) -> Result<(), Failure> {
        direct::reduce_scatter(&mut self.session, self.scratch, self.tuning, (output, input), reduction)
    }

    fn all_to_all(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        direct::all_to_all(&mut self.session, output, input)
    }

    fn gather(&mut self, output: Option<Region>, input: Region, root: usize) -> Result<(), Failure> {
        match output {
            Some(output) => direct::gather_to_here(&mut self.session, output, input),
            None => self.send(input, root),
        }
    }

    fn scatter(&mut self, output: Region, input: Option<Region>, root: usize) -> Result<(), Failure> {
        match input {
            Some(input) => direct::scatter_from_here(&mut self.session, output, input),
            None => self.recv(output, root),
        }
    }

    fn send(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        self.session.exchange(&[(peer, data.into())], vec![])
    }

    fn recv(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        self.session.exchange(&[], vec![(peer, data.into())])
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        direct::barrier(&mut self.session)
    }
}
