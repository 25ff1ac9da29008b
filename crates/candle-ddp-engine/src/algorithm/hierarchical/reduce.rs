use super::{Bridge, between};
use crate::algorithm::Scratch;
use crate::algorithm::shm::{Parts, publish_parts, publish_to};
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::shm::{Source, pieces, reduce};
use crate::tcp::piece::Piece;
use crate::tcp::session::Recvs;

impl Bridge<'_> {
    /// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others send with
    /// [`reduce_to`](Self::reduce_to). One rank of every other host sends the reduction of its host.
    pub(super) fn reduce_to_here(
        &mut self,
        scratch: &mut Scratch,
        data: Region,
        reduction: Reduction,
    ) -> Result<(), Failure> {
        let (hosts, length) = (self.hosts, self.length(reduction.element.size()));
        let mut slots = scratch.slots(hosts.count(), length.min(data.len()));
        for piece in pieces(data.len(), length) {
            let ours = &mut slots[hosts.own()][..piece.len()];
            self.reduce_inside(reduction, data.part(piece.clone()), |_| 0..piece.len(), ours)?;
            let theirs = slots.iter_mut().zip(hosts.all()).enumerate().filter(|(host, _)| *host != hosts.own());
            let theirs = theirs
                .map(|(_, (slot, ranks))| (Hosts::proxy(ranks, hosts.index()), (&mut slot[..piece.len()]).into()));
            self.session.exchange(&[], theirs.collect())?;
            let sources: Vec<Source> = slots.iter().map(|slot| Source::Private(&slot[..piece.len()])).collect();
            let reduced = data.part(piece).write(|data| reduce(between(reduction), &sources, data, None));
            self.session.move_bytes(reduced)?;
        }
        Ok(())
    }

    /// This rank's part of a reduction to rank `root`.
    pub(super) fn reduce_to(
        &mut self,
        root: usize,
        scratch: &mut Scratch,
        data: Region,
        reduction: Reduction,
    ) -> Result<(), Failure> {
        let length = self.length(reduction.element.size());
        let gateway = self.gateway(root);
        if gateway != self.hosts.index() {
            return self.inside(|streams| publish_to(streams, gateway, data, length));
        }
        let slot = scratch.slots(1, length.min(data.len())).remove(0);
        for piece in pieces(data.len(), length) {
            let ours = &mut slot[..piece.len()];
            self.reduce_inside(reduction, data.part(piece.clone()), |_| 0..piece.len(), ours)?;
            self.session.exchange(&[(root, Piece::Memory(ours))], vec![])?;
        }
        Ok(())
    }

    /// `output` becomes this rank's part of the reduction of all ranks' inputs. The parts for the ranks of other hosts
    /// are reduced inside this host before they are sent.
    pub(super) fn reduce_scatter(
        &mut self,
        scratch: &mut Scratch,
        output: Region,
        input: Region,
        reduction: Reduction,
    ) -> Result<(), Failure> {
        let (hosts, each) = (self.hosts, output.len());
        let length = self.length(reduction.element.size());
        let proxied = self.proxied();
        let ours = &proxied[hosts.index()];
        let rounds = proxied.iter().map(Vec::len).max().unwrap_or(0);
        let parts = self.streams.as_ref().map(Parts::new);
        let mut slots = scratch.slots(ours.len() + hosts.count(), length.min(each));
        let (reduced, theirs) = slots.split_at_mut(ours.len());
        for piece in pieces(each, length) {
            let part_for = |rank: usize| input.part(rank * each + piece.start..rank * each + piece.end);
            for round in 0..rounds {
                let proxied_part =
                    |index: usize| proxied[index].get(round).map_or(input.part(0..0), |rank| part_for(*rank));
                if let Some(parts) = parts {
                    self.inside(|streams| publish_parts(streams, parts, proxied_part))?;
                }
                // A rank without a part in this round releases the slots that it does not need.
                let (own, mut none) = (proxied_part(hosts.index()), [].as_mut_slice());
                let out = reduced.get_mut(round).map_or(&mut none, |slot| slot);
                let part = |peer| parts.map_or(0..0, |parts| parts.from(peer, own.len()));
                self.reduce_inside(reduction, own, part, &mut out[..own.len()])?;
            }
            let sends = ours.iter().zip(reduced.iter()).skip(1);
            let sends: Vec<(usize, Piece)> = sends.map(|(rank, slot)| (*rank, (&slot[..piece.len()]).into())).collect();
            let mut recvs = Recvs::new();
            for ((host, ranks), slot) in hosts.all().iter().enumerate().zip(theirs.iter_mut()) {
                if host != hosts.own() {
                    recvs.push((Hosts::proxy(ranks, hosts.index()), (&mut slot[..piece.len()]).into()));
                }
            }
            self.session.exchange(&sends, recvs)?;
            let of_host = |(host, slot)| if host == hosts.own() { &*reduced[0] } else { slot };
            let of_hosts = theirs.iter().map(|slot| &**slot).enumerate().map(of_host);
            let sources: Vec<Source> = of_hosts.map(|slot| Source::Private(&slot[..piece.len()])).collect();
            let reduced = output.part(piece).write(|output| reduce(between(reduction), &sources, output, None));
            self.session.move_bytes(reduced)?;
        }
        Ok(())
    }
}
