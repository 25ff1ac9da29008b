use super::Bridge;
use crate::algorithm::Places;
use crate::algorithm::shm::{Parts, publish_parts};
use crate::call::Element;
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::memory::Region;
use crate::shm::pieces;
use crate::tcp::piece::Piece;
use crate::tcp::session::Recvs;
use std::ops::Range;

impl Bridge<'_> {
    /// `output` becomes all ranks' inputs in rank order. Every input goes to one rank of each other host, which
    /// forwards it there while the next piece is sent.
    pub(super) fn all_gather(&mut self, output: Region, input: Region, element: Element) -> Result<(), Failure> {
        let (hosts, each, rank) = (self.hosts, input.len(), self.session.rank());
        let length = self.length(element.size());
        let proxied = self.proxied();
        let ours = &proxied[hosts.index()];
        let rounds = proxied.iter().map(Vec::len).max().unwrap_or(0);
        let receivers: Vec<usize> = hosts.others().map(|(_, ranks)| Hosts::proxy(ranks, hosts.index())).collect();
        let mut senders = ours[1..].to_vec();
        senders.sort_unstable();
        let place = |rank: usize, piece: &Range<usize>| rank * each + piece.start..rank * each + piece.end;
        self.session.move_bytes(output.part(rank * each..(rank + 1) * each).copy_from(input))?;
        for now in pieces(each, length) {
            let ahead = now.end..now.end.saturating_add(length).min(each);
            let [sends_now, sends_ahead] = [&now, &ahead].map(|piece| -> Vec<(usize, Piece)> {
                receivers.iter().map(|receiver| (*receiver, input.part(piece.clone()).into())).collect()
            });
            let [recvs_now, recvs_ahead] = [&now, &ahead].map(|piece| -> Recvs {
                senders.iter().map(|rank| (*rank, output.part(place(*rank, piece)).into())).collect()
            });
            self.session.exchange_ahead((&sends_now, recvs_now), (&sends_ahead, recvs_ahead))?;
            for round in 0..rounds {
                // A rank without ranks of other hosts hears of them only now.
                let is_first = now.start == 0 && round == 1 && senders.is_empty();
                self.inside(|streams| {
                    if is_first {
                        streams.await_others();
                    }
                    if let Some(rank) = ours.get(round) {
                        streams.publish(|slot, _| slot.write_from(output.part(place(*rank, &now))))?;
                    }
                    streams.peers().try_for_each(|peer| match proxied[peer].get(round) {
                        Some(rank) => streams.take(peer, |slot| slot.read_into(output.part(place(*rank, &now)))),
                        None => Ok(()),
                    })
                })?;
            }
        }
        Ok(())
    }

    /// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from rank `p`.
    pub(super) fn all_to_all(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        let places = Places::new(output, input, self.session.rank(), self.session.world_size());
        let (whole, members) = (0..places.each, self.hosts.members());
        self.session.move_bytes(places.copy_own(output, input, &whole))?;
        self.inside(|streams| {
            let parts = Parts::new(streams);
            for piece in pieces(places.each, parts.length) {
                publish_parts(streams, parts, |peer| input.part(places.sent(members[peer], &piece)))?;
                for peer in streams.peers() {
                    let to = output.part(places.received(members[peer], &piece));
                    streams.take(peer, |slot| slot.part(parts.from(peer, piece.len())).read_into(to))?;
                }
            }
            Ok(())
        })?;
        let strangers = self.strangers();
        let sends: Vec<(usize, Piece)> =
            strangers.iter().map(|rank| (*rank, input.part(places.sent(*rank, &whole)).into())).collect();
        let recvs = strangers.iter().map(|rank| (*rank, output.part(places.received(*rank, &whole)).into())).collect();
        self.session.exchange(&sends, recvs)
    }
}
