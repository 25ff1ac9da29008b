use super::{Bridge, between};
use crate::algorithm::shm::{Parts, publish_parts};
use crate::algorithm::{Scratch, chunk, segment, whole_elements};
use crate::error::Failure;
use crate::hosts::Hosts;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::shm::{Source, reduce};
use crate::tcp::piece::Piece;
use crate::tcp::session::{Recvs, TcpSession};
use std::ops::Range;

impl Bridge<'_> {
    /// `data` becomes the reduction of all ranks' data.
    pub(super) fn all_reduce(
        &mut self,
        scratch: &mut Scratch,
        data: Region,
        reduction: Reduction,
    ) -> Result<(), Failure> {
        if data.len().saturating_mul(self.hosts.count() - 1) <= self.tuning.small {
            self.all_reduce_at_once(scratch, data, reduction)
        } else {
            self.all_reduce_in_chunks(scratch, data, reduction)
        }
    }

    /// Every rank reduces its host's data, and gets every other host's reduced data from one of that host's ranks.
    fn all_reduce_at_once(&mut self, scratch: &mut Scratch, data: Region, reduction: Reduction) -> Result<(), Failure> {
        let (hosts, whole) = (self.hosts, 0..data.len());
        let mut slots = scratch.slots(hosts.count(), data.len());
        self.inside(|streams| streams.publish(|slot, _| slot.write_from(data)))?;
        self.reduce_inside(reduction, data, |_| whole.clone(), slots[hosts.own()])?;
        let mut sends: Vec<(usize, Piece)> = Vec::new();
        let mut recvs = Recvs::new();
        for (host, slot) in slots.iter_mut().enumerate() {
            let ranks = &hosts.all()[host];
            if host == hosts.own() {
                let others = hosts.others().flat_map(|(_, ranks)| hosts.clients(ranks));
                let ours: &[u8] = slot;
                sends.extend(others.map(|rank| (rank, ours.into())));
            } else {
                recvs.push((Hosts::proxy(ranks, hosts.index()), (&mut **slot).into()));
            }
        }
        self.session.exchange(&sends, recvs)?;
        let sources: Vec<Source> = slots.iter().map(|slot| Source::Private(slot)).collect();
        self.session.move_bytes(data.write(|data| reduce(between(reduction), &sources, data, None)))
    }

    /// The ranks with the same number on all hosts form a rail; there are as many rails as the smallest host has ranks,
    /// and each reduces one chunk of the data. Segment by segment, the rank on the rail reduces its host's data, the
    /// rail reduces the hosts' data, and the result goes to the other ranks of the host. Shared memory and network are
    /// used at the same time: while a segment is sent between hosts, the next one is reduced inside.
    fn all_reduce_in_chunks(
        &mut self,
        scratch: &mut Scratch,
        data: Region,
        reduction: Reduction,
    ) -> Result<(), Failure> {
        let (own, size) = (self.hosts.index(), reduction.element.size());
        let rails = self.hosts.all().iter().map(Vec::len).min().unwrap_or(1);
        let chunks: Vec<_> = (0..rails).map(|rail| chunk(data.len() / size, size, rail, rails)).collect();
        let length = whole_elements(self.tuning.shared_segment, size);
        // The first chunk is the longest.
        let steps = chunks[0].len().div_ceil(length).max(1);
        // Ranks beyond the rails have no chunk.
        let piece = |rank: usize, step: usize| chunks.get(rank).map_or(0..0, |chunk| segment(chunk, length, step));
        let mut rail = chunks.get(own).map(|chunk| Rail::new(self.hosts, scratch, reduction, chunk.clone(), length));
        // The number of steps by which the results follow the reduction inside the host.
        let delay = Rail::delay(self.hosts);
        let parts = self.streams.as_ref().map(Parts::new);
        let offer = |bridge: &mut Self, step: usize| {
            let Some(parts) = parts else { return Ok(()) };
            bridge.inside(|streams| publish_parts(streams, parts, |peer| data.part(piece(peer, step))))
        };
        offer(self, 0)?;
        for step in 0..=steps + delay {
            if step + 1 < steps {
                offer(self, step + 1)?;
            }
            let mine = piece(own, step);
            match &mut rail {
                Some(rail) if step < steps => {
                    let part = |peer| parts.map_or(0..0, |parts| parts.from(peer, mine.len()));
                    let partial = rail.partial(step, mine.len());
                    self.reduce_inside(reduction, data.part(mine.clone()), part, partial)?;
                }
                None if step < steps => self.inside(|streams| {
                    // Until the first result, such a rank waits for those on the rails, which wait for other hosts.
                    if step <= delay + 1 {
                        streams.await_others();
                    }
                    streams.receive_all()?;
                    streams.release_all();
                    Ok(())
                })?,
                _ => {}
            }
            if let Some(rail) = &mut rail
                && step < steps + delay
            {
                rail.exchange(&mut self.session, data, step)?;
                if let Some(done) = step.checked_sub(delay) {
                    self.inside(|streams| streams.publish(|slot, _| slot.write_from(data.part(piece(own, done)))))?;
                }
            }
            if let Some(done) = step.checked_sub(delay + 1) {
                let is_first = done == 0 && rail.is_none();
                self.inside(|streams| {
                    if is_first {
                        streams.await_others();
                    }
                    let mut peers = streams.peers().filter(|peer| *peer < rails);
                    peers
                        .try_for_each(|peer| streams.take(peer, |slot| slot.read_into(data.part(piece(peer, done)))))?;
                    streams.all_are_here();
                    Ok(())
                })?;
            }
        }
        Ok(())
    }
}

/// The ranks with the same number on all hosts, which reduce a chunk that each of them has reduced inside its host.
/// They do so segment by segment, and each segment in two waves: host `h` collects share `h` of it from all hosts and
/// reduces it, and then sends the result to all. Two hosts instead send each other the whole segment and both reduce
/// it, which moves as much in one wave.
struct Rail<'a> {
    hosts: &'a Hosts,
    reduction: Reduction,
    chunk: Range<usize>,
    length: usize,
    /// For segments with even and with odd numbers: what was reduced inside this host, and what arrives from every
    /// host.
    partial: [&'a mut [u8]; 2],
    theirs: [Vec<&'a mut [u8]>; 2],
}

impl<'a> Rail<'a> {
    fn new(
        hosts: &'a Hosts,
        scratch: &'a mut Scratch,
        reduction: Reduction,
        chunk: Range<usize>,
        length: usize,
    ) -> Self {
        let length = length.min(chunk.len());
        let align = |bytes: usize| bytes.next_multiple_of(8);
        // The first share is the longest.
        let share = align(share(hosts, reduction, length, 0).len());
        let whole = align(length);
        let memory = scratch.slots(1, 2 * (whole + hosts.count() * share)).remove(0);
        let (partial, theirs) = memory.split_at_mut(2 * whole);
        let (even, odd) = partial.split_at_mut(whole);
        let (theirs_even, theirs_odd) = theirs.split_at_mut(hosts.count() * share);
        let slots = |memory: &'a mut [u8]| {
            let mut slots: Vec<&mut [u8]> = memory.chunks_mut(share.max(1)).collect();
            slots.resize_with(hosts.count(), || &mut []);
            slots
        };
        let theirs = [slots(theirs_even), slots(theirs_odd)];
        Self { hosts, reduction, chunk, length, partial: [even, odd], theirs }
    }

    /// The number of steps after its reduction inside the hosts until a segment is complete.
    fn delay(hosts: &Hosts) -> usize {
        if is_direct(hosts) { 1 } else { 3 }
    }

    /// The memory for the segment of `step`, reduced inside this host.
    fn partial(&mut self, step: usize, length: usize) -> &mut [u8] {
        &mut self.partial[step % 2][..length]
    }

    /// By host: the part of the segment of `step` that it reduces, as a range within the segment; empty if there is no
    /// such step.
    fn shares(&self, step: Option<usize>) -> Vec<Range<usize>> {
        let length = step.map_or(0, |step| self.segment(step).len());
        (0..self.hosts.count()).map(|host| share(self.hosts, self.reduction, length, host)).collect()
    }

    fn segment(&self, step: usize) -> Range<usize> {
        segment(&self.chunk, self.length.max(1), step)
    }

    /// Like [`shares`](Self::shares), as ranges within the tensor.
    fn places(&self, step: Option<usize>) -> Vec<Range<usize>> {
        let start = step.map_or(0, |step| self.segment(step).start);
        self.shares(step).into_iter().map(|share| start + share.start..start + share.end).collect()
    }

    /// The exchange of step `step`. It waits for the first wave of segment `step` - 1 and for the second wave of
    /// segment `step` - 3, and sends the waves that are due in the next step ahead. Then it reduces this host's share
    /// of segment `step` - 1.
    fn exchange(&mut self, session: &mut TcpSession, data: Region, step: usize) -> Result<(), Failure> {
        let (hosts, own) = (self.hosts, self.hosts.own());
        let peer = |host: usize| hosts.all()[host][hosts.index()];
        let others = || (0..hosts.count()).filter(move |host| *host != own);
        let before = step.checked_sub(1);
        // For both waves: what is due now, and what is sent ahead.
        let first = [self.shares(before), self.shares(Some(step))];
        let second = [step.checked_sub(3), step.checked_sub(2)].map(|step| step.map(|step| self.places(Some(step))));
        let mut sends: [Vec<(usize, Piece)>; 2] = [Vec::new(), Vec::new()];
        let mut recvs = [Recvs::new(), Recvs::new()];
        // Consecutive segments use different memory.
        let [even, odd] = &mut self.theirs;
        let theirs = if step.is_multiple_of(2) { [odd, even] } else { [even, odd] };
        for (when, theirs) in theirs.into_iter().enumerate() {
            let partial = &self.partial[(step + 1 + when) % 2];
            sends[when].extend(others().map(|host| (peer(host), (&partial[first[when][host].clone()]).into())));
            let slots = theirs.iter_mut().enumerate().filter(|(host, _)| *host != own);
            recvs[when].extend(slots.map(|(host, slot)| (peer(host), (&mut slot[..first[when][own].len()]).into())));
        }
        if !is_direct(hosts) {
            // The second wave goes from the tensor of one host into those of the others.
            for (when, places) in second.into_iter().enumerate() {
                for (host, place) in places.into_iter().flatten().enumerate() {
                    let part = data.part(place);
                    if host == own {
                        sends[when].extend(others().map(|host| (peer(host), part.into())));
                    } else {
                        recvs[when].push((peer(host), part.into()));
                    }
                }
            }
        }
        let [recvs_now, recvs_ahead] = recvs;
        session.exchange_ahead((&sends[0], recvs_now), (&sends[1], recvs_ahead))?;
        let Some(before) = before else { return Ok(()) };
        let ours = first[0][own].clone();
        let slots = self.theirs[before % 2].iter().enumerate();
        let sources = slots.map(|(host, slot)| match host == own {
            true => Source::Private(&self.partial[before % 2][ours.clone()]),
            false => Source::Private(&slot[..ours.len()]),
        });
        let place = self.places(Some(before)).swap_remove(own);
        let sources: Vec<Source> = sources.collect();
        session.move_bytes(data.part(place).write(|data| reduce(between(self.reduction), &sources, data, None)))
    }
}

/// Whether there are two hosts, each of which reduces everything.
fn is_direct(hosts: &Hosts) -> bool {
    hosts.count() == 2
}

/// The part of a segment of `length` bytes that `host` reduces.
fn share(hosts: &Hosts, reduction: Reduction, length: usize, host: usize) -> Range<usize> {
    let size = reduction.element.size();
    if is_direct(hosts) { 0..length } else { chunk(length / size, size, host, hosts.count()) }
}
