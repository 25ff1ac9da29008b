//! Collectives in which one rank sends to all, or all send to one.
use super::Bridge;
use crate::algorithm::flat::{broadcast_from_here, broadcast_to_here};
use crate::algorithm::shm::{Parts, copy_from, publish, publish_parts, publish_to, scatter_to_here};
use crate::call::Element;
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::memory::Region;
use crate::shm::pieces;
use crate::tcp::piece::Piece;
use std::ops::Range;

impl Bridge<'_> {
    /// The number, on this host, of the rank that exchanges data with `root` for all ranks here; `root` itself if it is
    /// here.
    pub(super) fn gateway(&self, root: usize) -> usize {
        self.hosts.find(root).1 % self.hosts.members().len()
    }

    /// The gateways of all hosts except `root`'s.
    fn gateways(&self, root: usize) -> Vec<usize> {
        let (home, index) = self.hosts.find(root);
        let others = self.hosts.all().iter().enumerate().filter(|(host, _)| *host != home);
        others.map(|(_, ranks)| Hosts::proxy(ranks, index)).collect()
    }

    /// The number of bytes sent over the network before they are forwarded through shared memory, while the next are
    /// sent.
    fn block(&self, element: Element) -> usize {
        8 * self.length(element.size())
    }

    /// This rank is the root: its `data` goes to all others.
    pub(super) fn broadcast_from_here(&mut self, data: Region, element: Element) -> Result<(), Failure> {
        let gateways = self.gateways(self.session.rank());
        for block in pieces(data.len(), self.block(element)) {
            let data = data.part(block);
            self.inside(|streams| publish(streams, data))?;
            broadcast_from_here(&mut self.session, self.tuning, &gateways, data, element)?;
        }
        Ok(())
    }

    /// `data` gets the values of another rank, `root`: they arrive over the network at a gateway, which forwards them.
    pub(super) fn broadcast_to_here(&mut self, root: usize, data: Region, element: Element) -> Result<(), Failure> {
        let (gateway, gateways) = (self.gateway(root), self.gateways(root));
        for block in pieces(data.len(), self.block(element)) {
            let data = data.part(block);
            if gateway != self.hosts.index() {
                self.inside(|streams| copy_from(streams, gateway, data))?;
                continue;
            }
            broadcast_to_here(&mut self.session, self.tuning, (root, &gateways), data, element)?;
            self.inside(|streams| publish(streams, data))?;
        }
        Ok(())
    }

    /// This rank is the root: `output` becomes all ranks' inputs in rank order, which the others send with
    /// [`gather_to`](Self::gather_to).
    pub(super) fn gather_to_here(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        let (rank, each, members) = (self.session.rank(), input.len(), self.hosts.members());
        self.session.move_bytes(output.part(rank * each..(rank + 1) * each).copy_from(input))?;
        self.inside(|streams| {
            for piece in pieces(each, streams.capacity()) {
                let place = |peer: usize| members[peer] * each + piece.start..members[peer] * each + piece.end;
                streams
                    .peers()
                    .try_for_each(|peer| streams.take(peer, |slot| slot.read_into(output.part(place(peer)))))?;
            }
            Ok(())
        })?;
        let strangers = self.strangers();
        let recvs = strangers.iter().map(|rank| (*rank, output.part(rank * each..(rank + 1) * each).into()));
        self.session.exchange(&[], recvs.collect())
    }

    /// `input` goes to `root`, another rank.
    pub(super) fn gather_to(&mut self, root: usize, input: Region) -> Result<(), Failure> {
        match self.hosts.member(root) {
            Some(root) => self.inside(|streams| publish_to(streams, root, input, streams.capacity())),
            None => self.session.exchange(&[(root, input.into())], vec![]),
        }
    }

    /// This rank is the root: every other rank's part of `input` is sent to it.
    pub(super) fn scatter_from_here(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        let (each, members) = (output.len(), self.hosts.members());
        let own = self.session.rank() * each;
        self.session.move_bytes(output.copy_from(input.part(own..own + each)))?;
        self.inside(|streams| {
            let parts = Parts::new(streams);
            let part =
                |rank: usize, piece: &Range<usize>| input.part(rank * each + piece.start..rank * each + piece.end);
            pieces(each, parts.length)
                .try_for_each(|piece| publish_parts(streams, parts, |peer| part(members[peer], &piece)))
        })?;
        let strangers = self.strangers();
        let sends = strangers.iter().map(|rank| (*rank, input.part(rank * each..(rank + 1) * each).into()));
        self.session.exchange(&sends.collect::<Vec<(usize, Piece)>>(), vec![])
    }

    /// `output` becomes this rank's part of what `root`, another rank, holds.
    pub(super) fn scatter_from(&mut self, root: usize, output: Region) -> Result<(), Failure> {
        match self.hosts.member(root) {
            Some(root) => self.inside(|streams| scatter_to_here(streams, root, output)),
            None => self.session.exchange(&[], vec![(root, output.into())]),
        }
    }

    /// The ranks of other hosts.
    pub(super) fn strangers(&self) -> Vec<usize> {
        self.session.peers().filter(|peer| self.hosts.member(*peer).is_none()).collect()
    }
}
