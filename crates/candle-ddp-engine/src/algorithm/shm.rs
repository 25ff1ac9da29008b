//! The collectives between the ranks of one host, through shared memory.
//!
//! Every rank has a stream of slots that all others read (`shm/stream.rs`). If ranks hold different data for each
//! other, a slot is divided into equal parts, one for each peer.
use super::dispatch::ByteCollectives;
use super::{Places, Tuning, chunk, segment};
use crate::call::Element;
use crate::error::Failure;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::shm::session::ShmSession;
use crate::shm::{Source, Streams, pieces, reduce};
use crate::transport_error::TransportError;
use std::ops::Range;

/// One call through shared memory.
pub(crate) struct Shm<'a> {
    pub(crate) session: ShmSession<'a>,
    pub(crate) tuning: Tuning,
}

impl Shm<'_> {
    /// Runs `work` with the streams of the collectives.
    fn with_streams(&self, work: impl FnOnce(&mut Streams) -> Result<(), TransportError>) -> Result<(), Failure> {
        // The streams are unlocked before the root cause is searched.
        let result = work(&mut self.session.streams());
        result.map_err(|error| self.session.session.failure_inside(error))
    }

    fn is_here(&self, root: usize) -> bool {
        root == self.session.session.rank()
    }
}

impl ByteCollectives for Shm<'_> {
    fn all_reduce(&mut self, data: Region, reduction: Reduction) -> Result<(), Failure> {
        self.with_streams(|streams| all_reduce(streams, self.tuning, data, reduction))
    }

    fn broadcast(&mut self, data: Region, root: usize, _: Element) -> Result<(), Failure> {
        self.with_streams(|streams| match self.is_here(root) {
            true => publish(streams, data),
            false => copy_from(streams, root, data),
        })
    }

    fn reduce(&mut self, data: Region, root: usize, reduction: Reduction) -> Result<(), Failure> {
        self.with_streams(|streams| match self.is_here(root) {
            true => reduce_to_here(streams, data, reduction),
            false => publish_to(streams, root, data, streams.capacity()),
        })
    }

    fn all_gather(&mut self, output: Region, input: Region, _: Element) -> Result<(), Failure> {
        self.with_streams(|streams| all_gather(streams, output, input))
    }

    fn reduce_scatter(&mut self, output: Region, input: Region, reduction: Reduction) -> Result<(), Failure> {
        self.with_streams(|streams| reduce_scatter(streams, output, input, reduction))
    }

    fn all_to_all(&mut self, output: Region, input: Region) -> Result<(), Failure> {
        self.with_streams(|streams| all_to_all(streams, output, input))
    }

    fn gather(&mut self, output: Option<Region>, input: Region, root: usize) -> Result<(), Failure> {
        self.with_streams(|streams| match output {
            Some(output) => gather_to_here(streams, output, input),
            None => publish_to(streams, root, input, streams.capacity()),
        })
    }

    fn scatter(&mut self, output: Region, input: Option<Region>, root: usize) -> Result<(), Failure> {
        self.with_streams(|streams| match input {
            Some(input) => scatter_from_here(streams, output, input),
            None => scatter_to_here(streams, root, output),
        })
    }

    fn send(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        self.session.send(data, peer)
    }

    fn recv(&mut self, data: Region, peer: usize) -> Result<(), Failure> {
        self.session.recv(data, peer)
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        self.with_streams(barrier)
    }
}

/// The position of each peer's part in a slot.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    own: usize,
    pub(super) length: usize,
}

impl Parts {
    pub(super) fn new(streams: &Streams) -> Self {
        Self { own: streams.rank(), length: streams.part() }
    }

    /// In a slot of this rank: the first `length` bytes of the part for `peer`.
    fn to(self, peer: usize, length: usize) -> Range<usize> {
        let start = self.length * (peer - usize::from(peer > self.own));
        start..start + length
    }

    /// In a slot of `peer`: the first `length` bytes of the part for this rank.
    pub(super) fn from(self, peer: usize, length: usize) -> Range<usize> {
        Self { own: peer, ..self }.to(self.own, length)
    }
}

pub(super) fn barrier(streams: &mut Streams) -> Result<(), TransportError> {
    streams.publish(|_, _| Ok(()))?;
    streams.peers().try_for_each(|peer| streams.take(peer, |_| Ok(())))
}

fn all_reduce(streams: &mut Streams, tuning: Tuning, data: Region, reduction: Reduction) -> Result<(), TransportError> {
    if data.len().saturating_mul(streams.world_size() - 1) <= tuning.small && data.len() <= streams.capacity() {
        all_reduce_at_once(streams, data, reduction)
    } else {
        all_reduce_in_chunks(streams, data, reduction)
    }
}

/// Every rank publishes its data and reduces the data of all ranks.
fn all_reduce_at_once(streams: &mut Streams, data: Region, reduction: Reduction) -> Result<(), TransportError> {
    streams.publish(|slot, _| slot.write_from(data))?;
    streams.receive_all()?;
    let sources = streams.arrived().sources(Source::Output, |_| 0..data.len());
    data.write(|data| reduce(reduction, &sources, data, None))?;
    streams.release_all();
    Ok(())
}

/// Rank `c` reduces chunk `c`, step by step. Every rank publishes its parts of all chunks; rank `c` reduces chunk `c`
/// directly from the slots of all ranks and publishes the result, which the others copy. Parts are published one step
/// ahead and results copied one step behind, so that no rank waits for what the others are doing at the moment.
fn all_reduce_in_chunks(streams: &mut Streams, data: Region, reduction: Reduction) -> Result<(), TransportError> {
    let (own, world_size, size) = (streams.rank(), streams.world_size(), reduction.element.size());
    let parts = Parts::new(streams);
    let chunks: Vec<_> = (0..world_size).map(|rank| chunk(data.len() / size, size, rank, world_size)).collect();
    // The first chunk is the longest.
    let steps = chunks[0].len().div_ceil(parts.length).max(1);
    let piece = |rank: usize, step: usize| segment(&chunks[rank], parts.length, step);
    publish_parts(streams, parts, |peer| data.part(piece(peer, 0)))?;
    for step in 0..steps {
        if step + 1 < steps {
            publish_parts(streams, parts, |peer| data.part(piece(peer, step + 1)))?;
        }
        streams.receive_all()?;
        let mine = piece(own, step);
        streams.publish(|slot, arrived| {
            let sources = arrived.sources(Source::Output, |peer| parts.from(peer, mine.len()));
            let result = Some(slot.part(0..mine.len()));
            data.part(mine.clone()).write(|data| reduce(reduction, &sources, data, result))
        })?;
        streams.release_all();
        if step > 0 {
            copy_results(streams, data, |peer| piece(peer, step - 1))?;
        }
    }
    copy_results(streams, data, |peer| piece(peer, steps - 1))
}

/// Publishes one slot with a part for every peer.
pub(super) fn publish_parts<'a>(
    streams: &mut Streams,
    parts: Parts,
    part_for: impl Fn(usize) -> Region<'a>,
) -> Result<(), TransportError> {
    let mut peers = streams.peers();
    streams.publish(|slot, _| {
        peers.try_for_each(|peer| {
            let part = part_for(peer);
            slot.part(parts.to(peer, part.len())).write_from(part)
        })
    })
}

/// Copies a slot of every peer to the range of `data` that `place` gives for that peer.
fn copy_results(
    streams: &mut Streams,
    data: Region,
    place: impl Fn(usize) -> Range<usize>,
) -> Result<(), TransportError> {
    streams.peers().try_for_each(|peer| streams.take(peer, |slot| slot.read_into(data.part(place(peer)))))
}

/// `output` becomes this rank's part of the reduction of all ranks' inputs.
fn reduce_scatter(
    streams: &mut Streams,
    output: Region,
    input: Region,
    reduction: Reduction,
) -> Result<(), TransportError> {
    let (own, each, parts) = (streams.rank(), output.len(), Parts::new(streams));
    for piece in pieces(each, parts.length) {
        let part_of = |rank: usize| input.part(rank * each + piece.start..rank * each + piece.end);
        publish_parts(streams, parts, part_of)?;
        streams.receive_all()?;
        output.part(piece.clone()).write_from(part_of(own), |output, input| {
            let sources = streams.arrived().sources(Source::Private(input), |peer| parts.from(peer, piece.len()));
            reduce(reduction, &sources, output, None);
        })?;
        streams.release_all();
    }
    Ok(())
}

/// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from rank `p`.
fn all_to_all(streams: &mut Streams, output: Region, input: Region) -> Result<(), TransportError> {
    let (parts, places) = (Parts::new(streams), Places::new(output, input, streams.rank(), streams.world_size()));
    for piece in pieces(places.each, parts.length) {
        publish_parts(streams, parts, |peer| input.part(places.sent(peer, &piece)))?;
        places.copy_own(output, input, &piece)?;
        for peer in streams.peers() {
            let to = output.part(places.received(peer, &piece));
            streams.take(peer, |slot| slot.part(parts.from(peer, piece.len())).read_into(to))?;
        }
    }
    Ok(())
}

/// `output` becomes all ranks' inputs in rank order.
fn all_gather(streams: &mut Streams, output: Region, input: Region) -> Result<(), TransportError> {
    let (own, each) = (streams.rank(), input.len());
    for piece in pieces(each, streams.capacity()) {
        let now = input.part(piece.clone());
        streams.publish(|slot, _| slot.write_from(now))?;
        let place = |rank: usize| rank * each + piece.start..rank * each + piece.end;
        output.part(place(own)).copy_from(now)?;
        copy_results(streams, output, place)?;
    }
    Ok(())
}

/// Publishes `data` for all ranks.
pub(super) fn publish(streams: &mut Streams, data: Region) -> Result<(), TransportError> {
    pieces(data.len(), streams.capacity())
        .try_for_each(|piece| streams.publish(|slot, _| slot.write_from(data.part(piece))))
}

/// `data` becomes what rank `root` publishes.
pub(super) fn copy_from(streams: &mut Streams, root: usize, data: Region) -> Result<(), TransportError> {
    pieces(data.len(), streams.capacity())
        .try_for_each(|piece| streams.take(root, |slot| slot.read_into(data.part(piece))))
}

/// Publishes `data` for rank `root` in slots of `length` bytes, as all other ranks do.
pub(super) fn publish_to(
    streams: &mut Streams,
    root: usize,
    data: Region,
    length: usize,
) -> Result<(), TransportError> {
    let count = pieces(data.len(), length).count();
    streams.peers().filter(|peer| *peer != root).try_for_each(|peer| streams.skip(peer, count))?;
    pieces(data.len(), length).try_for_each(|piece| streams.publish(|slot, _| slot.write_from(data.part(piece))))
}

/// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others publish with
/// [`publish_to`].
fn reduce_to_here(streams: &mut Streams, data: Region, reduction: Reduction) -> Result<(), TransportError> {
    for piece in pieces(data.len(), streams.capacity()) {
        streams.receive_all()?;
        let sources = streams.arrived().sources(Source::Output, |_| 0..piece.len());
        data.part(piece).write(|data| reduce(reduction, &sources, data, None))?;
        streams.release_all();
    }
    Ok(())
}

/// This rank is the root: `output` becomes all ranks' inputs in rank order, which the others publish with
/// [`publish_to`].
fn gather_to_here(streams: &mut Streams, output: Region, input: Region) -> Result<(), TransportError> {
    let (own, each) = (streams.rank(), input.len());
    output.part(own * each..(own + 1) * each).copy_from(input)?;
    for piece in pieces(each, streams.capacity()) {
        copy_results(streams, output, |rank| rank * each + piece.start..rank * each + piece.end)?;
    }
    Ok(())
}

/// This rank is the root: every other rank's part of `input` is published for it.
fn scatter_from_here(streams: &mut Streams, output: Region, input: Region) -> Result<(), TransportError> {
    let (each, parts) = (output.len(), Parts::new(streams));
    output.copy_from(input.part(streams.rank() * each..(streams.rank() + 1) * each))?;
    for piece in pieces(each, parts.length) {
        publish_parts(streams, parts, |peer| input.part(peer * each + piece.start..peer * each + piece.end))?;
    }
    Ok(())
}

/// `output` becomes this rank's part of what rank `root` holds.
pub(super) fn scatter_to_here(streams: &mut Streams, root: usize, output: Region) -> Result<(), TransportError> {
    let parts = Parts::new(streams);
    pieces(output.len(), parts.length).try_for_each(|piece| {
        streams.take(root, |slot| slot.part(parts.from(root, piece.len())).read_into(output.part(piece)))
    })
}
