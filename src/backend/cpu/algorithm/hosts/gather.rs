use super::super::super::call::Element;
use super::super::super::failure::Failure;
use super::super::super::hosts::Hosts;
use super::super::super::session::Recvs;
use super::super::super::shm::pieces;
use super::super::shared::{Parts, publish_parts};
use super::super::split;
use super::Bridge;
use std::ops::Range;

impl Bridge<'_, '_> {
    /// `output` becomes all ranks' inputs in rank order. Every input goes to one rank of each other host, which passes
    /// it on there; while it does, the next piece is on its way.
    pub(super) fn all_gather(&mut self, output: &mut [u8], input: &[u8], element: Element) -> Result<(), Failure> {
        let (hosts, each, rank) = (self.hosts, input.len(), self.session.rank());
        let length = self.length(element.size());
        let charges = self.charges();
        let ours = &charges[hosts.index()];
        let rounds = charges.iter().map(Vec::len).max().unwrap_or(0);
        let receivers: Vec<usize> = hosts.others().map(|(_, ranks)| Hosts::counterpart(ranks, hosts.index())).collect();
        let mut senders = ours[1..].to_vec();
        senders.sort_unstable();
        let place = |rank: usize, piece: &Range<usize>| rank * each + piece.start..rank * each + piece.end;
        output[rank * each..][..each].copy_from_slice(input);
        for now in pieces(each, length) {
            let ahead = now.end..now.end.saturating_add(length).min(each);
            let [sends_now, sends_ahead] = [&now, &ahead].map(|piece| -> Vec<(usize, &[u8])> {
                receivers.iter().map(|receiver| (*receiver, &input[piece.clone()])).collect()
            });
            let (mut recvs_now, mut recvs_ahead) = (Recvs::new(), Recvs::new());
            let places = senders.iter().flat_map(|rank| [place(*rank, &now), place(*rank, &ahead)]);
            for (index, part) in split(output, places).into_iter().enumerate() {
                let recvs = if index % 2 == 0 { &mut recvs_now } else { &mut recvs_ahead };
                recvs.push((senders[index / 2], part));
            }
            self.session.exchange_ahead((&sends_now, recvs_now), (&sends_ahead, recvs_ahead))?;
            for round in 0..rounds {
                self.inside(|post| {
                    if let Some(rank) = ours.get(round) {
                        post.publish(|slot, _| slot.write(&output[place(*rank, &now)]))?;
                    }
                    post.peers().try_for_each(|peer| match charges[peer].get(round) {
                        Some(rank) => post.take(peer, |slot| slot.read(&mut output[place(*rank, &now)])),
                        None => Ok(()),
                    })
                })?;
            }
        }
        Ok(())
    }

    /// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from there.
    pub(super) fn all_to_all(&mut self, output: &mut [u8], input: &[u8]) -> Result<(), Failure> {
        let each = input.len() / self.session.world_size();
        let members = self.hosts.members();
        let own = self.session.rank() * each..(self.session.rank() + 1) * each;
        output[own.clone()].copy_from_slice(&input[own]);
        self.inside(|post| {
            let parts = Parts::new(post);
            for piece in pieces(each, parts.length) {
                let place = |peer: usize| members[peer] * each + piece.start..members[peer] * each + piece.end;
                publish_parts(post, parts, |peer| &input[place(peer)])?;
                for peer in post.peers() {
                    post.take(peer, |slot| slot.part(parts.from(peer, piece.len())).read(&mut output[place(peer)]))?;
                }
            }
            Ok(())
        })?;
        let strangers = self.strangers();
        let place = |rank: &usize| rank * each..(rank + 1) * each;
        let sends: Vec<(usize, &[u8])> = strangers.iter().map(|rank| (*rank, &input[place(rank)])).collect();
        let recvs = strangers.iter().copied().zip(split(output, strangers.iter().map(place))).collect();
        self.session.exchange(&sends, recvs)
    }
}
