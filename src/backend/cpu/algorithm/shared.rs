//! The collectives over shared memory.
//!
//! Every rank has a stream of slots that all others read (`shm/stream.rs`). Where ranks hold different data for each
//! other, a slot is divided into equal parts, one for each peer.
use super::super::call::Call;
use super::super::kernels::Reduction;
use super::super::shm::{Post, Source, pieces, reduce};
use super::super::storage::{Locking, Region};
use super::super::transport::Stall;
use super::{Tuning, chunk, segment};
use crate::backend::Collective;
use std::ops::Range;

/// Carries out a collective; `Send` and `Recv` are none.
pub(in super::super) fn execute(
    post: &mut Post,
    locking: Locking,
    tuning: Tuning,
    call: Call,
    collective: &Collective,
) -> Result<(), Stall> {
    let Some(element) = call.element else { return barrier(post) };
    let ranks = post.world_size();
    let reduction = |op: &_| Reduction { element, op: *op, ranks };
    let is_root = call.root == Some(post.rank());
    let region = |tensor| Region::of(tensor, locking);
    match collective {
        Collective::AllReduce { tensor, op } => all_reduce(post, tuning, region(tensor), reduction(op)),
        Collective::Broadcast { tensor, .. } if is_root => publish(post, region(tensor)),
        Collective::Broadcast { tensor, root } => copy_from(post, *root, region(tensor)),
        Collective::Reduce { tensor, op, .. } if is_root => reduce_to_here(post, region(tensor), reduction(op)),
        Collective::Reduce { tensor: input, root, .. } | Collective::Gather { output: None, input, root } => {
            publish_to(post, *root, region(input), post.capacity())
        }
        Collective::Gather { output: Some(output), input, .. } => gather_to_here(post, region(output), region(input)),
        Collective::Scatter { output, input: Some(input), .. } => {
            scatter_from_here(post, region(output), region(input))
        }
        Collective::Scatter { output, input: None, root } => scatter_to_here(post, *root, region(output)),
        Collective::AllGather { output, input } => all_gather(post, region(output), region(input)),
        Collective::ReduceScatter { output, input, op } => {
            reduce_scatter(post, region(output), region(input), reduction(op))
        }
        Collective::AllToAll { output, input } => all_to_all(post, region(output), region(input)),
        Collective::Barrier => barrier(post),
        Collective::Send { .. } | Collective::Recv { .. } => {
            Err(Stall::System("messages do not travel with the collectives".into()))
        }
    }
}

/// Where in a slot a peer's part lies.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    own: usize,
    pub(super) length: usize,
}

impl Parts {
    pub(super) fn new(post: &Post) -> Self {
        Self { own: post.rank(), length: post.part() }
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

pub(super) fn barrier(post: &mut Post) -> Result<(), Stall> {
    post.publish(|_, _| Ok(()))?;
    post.peers().try_for_each(|peer| post.take(peer, |_| Ok(())))
}

fn all_reduce(post: &mut Post, tuning: Tuning, data: Region, reduction: Reduction) -> Result<(), Stall> {
    if data.len().saturating_mul(post.world_size() - 1) <= tuning.small && data.len() <= post.capacity() {
        all_reduce_at_once(post, data, reduction)
    } else {
        all_reduce_in_chunks(post, data, reduction)
    }
}

/// Everybody publishes everything, and reduces it.
fn all_reduce_at_once(post: &mut Post, data: Region, reduction: Reduction) -> Result<(), Stall> {
    post.publish(|slot, _| slot.write_from(data))?;
    post.receive_all()?;
    let sources = post.arrived().sources(Source::Output, |_| 0..data.len());
    data.write(|data| reduce(reduction, &sources, data, None))?;
    post.release_all();
    Ok(())
}

/// Rank `c` reduces chunk `c`, step by step: everybody publishes its parts of all chunks; rank `c` reduces its part
/// straight from the slots of all, and publishes the result, which the others copy. Parts are published one step ahead
/// and results copied one step behind, so that nobody waits for what the others are doing right now.
fn all_reduce_in_chunks(post: &mut Post, data: Region, reduction: Reduction) -> Result<(), Stall> {
    let (own, world_size, size) = (post.rank(), post.world_size(), reduction.element.size());
    let parts = Parts::new(post);
    let chunks: Vec<_> = (0..world_size).map(|rank| chunk(data.len() / size, size, rank, world_size)).collect();
    // The first chunk is the longest.
    let steps = chunks[0].len().div_ceil(parts.length).max(1);
    let piece = |rank: usize, step: usize| segment(&chunks[rank], parts.length, step);
    publish_parts(post, parts, |peer| data.part(piece(peer, 0)))?;
    for step in 0..steps {
        if step + 1 < steps {
            publish_parts(post, parts, |peer| data.part(piece(peer, step + 1)))?;
        }
        post.receive_all()?;
        let mine = piece(own, step);
        post.publish(|slot, arrived| {
            let sources = arrived.sources(Source::Output, |peer| parts.from(peer, mine.len()));
            let result = Some(slot.part(0..mine.len()));
            data.part(mine.clone()).write(|data| reduce(reduction, &sources, data, result))
        })?;
        post.release_all();
        if step > 0 {
            copy_results(post, data, |peer| piece(peer, step - 1))?;
        }
    }
    copy_results(post, data, |peer| piece(peer, steps - 1))
}

/// Publishes one slot with a part for every peer.
pub(super) fn publish_parts<'a>(
    post: &mut Post,
    parts: Parts,
    part_for: impl Fn(usize) -> Region<'a>,
) -> Result<(), Stall> {
    let mut peers = post.peers();
    post.publish(|slot, _| {
        peers.try_for_each(|peer| {
            let part = part_for(peer);
            slot.part(parts.to(peer, part.len())).write_from(part)
        })
    })
}

/// Copies from a slot of every peer what belongs to the range of `data` that `place` gives for it.
fn copy_results(post: &mut Post, data: Region, place: impl Fn(usize) -> Range<usize>) -> Result<(), Stall> {
    post.peers().try_for_each(|peer| post.take(peer, |slot| slot.read_into(data.part(place(peer)))))
}

/// `output` becomes this rank's part of the reduction of all ranks' inputs.
fn reduce_scatter(post: &mut Post, output: Region, input: Region, reduction: Reduction) -> Result<(), Stall> {
    let (own, each, parts) = (post.rank(), output.len(), Parts::new(post));
    for piece in pieces(each, parts.length) {
        let part_of = |rank: usize| input.part(rank * each + piece.start..rank * each + piece.end);
        publish_parts(post, parts, part_of)?;
        post.receive_all()?;
        output.part(piece.clone()).write_from(part_of(own), |output, input| {
            let sources = post.arrived().sources(Source::Private(input), |peer| parts.from(peer, piece.len()));
            reduce(reduction, &sources, output, None);
        })?;
        post.release_all();
    }
    Ok(())
}

/// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from there.
fn all_to_all(post: &mut Post, output: Region, input: Region) -> Result<(), Stall> {
    let (each, parts) = (input.len() / post.world_size(), Parts::new(post));
    for piece in pieces(each, parts.length) {
        let place = |rank: usize| rank * each + piece.start..rank * each + piece.end;
        publish_parts(post, parts, |peer| input.part(place(peer)))?;
        let own = place(post.rank());
        output.part(own.clone()).copy_from(input.part(own))?;
        for peer in post.peers() {
            post.take(peer, |slot| slot.part(parts.from(peer, piece.len())).read_into(output.part(place(peer))))?;
        }
    }
    Ok(())
}

/// `output` becomes all ranks' inputs in rank order.
fn all_gather(post: &mut Post, output: Region, input: Region) -> Result<(), Stall> {
    let (own, each) = (post.rank(), input.len());
    for piece in pieces(each, post.capacity()) {
        let now = input.part(piece.clone());
        post.publish(|slot, _| slot.write_from(now))?;
        let place = |rank: usize| rank * each + piece.start..rank * each + piece.end;
        output.part(place(own)).copy_from(now)?;
        copy_results(post, output, place)?;
    }
    Ok(())
}

/// Publishes `data` for everybody.
pub(super) fn publish(post: &mut Post, data: Region) -> Result<(), Stall> {
    pieces(data.len(), post.capacity()).try_for_each(|piece| post.publish(|slot, _| slot.write_from(data.part(piece))))
}

/// `data` becomes what rank `root` publishes.
pub(super) fn copy_from(post: &mut Post, root: usize, data: Region) -> Result<(), Stall> {
    pieces(data.len(), post.capacity()).try_for_each(|piece| post.take(root, |slot| slot.read_into(data.part(piece))))
}

/// Publishes `data` for rank `root`, as all others do, in slots of `length` bytes.
pub(super) fn publish_to(post: &mut Post, root: usize, data: Region, length: usize) -> Result<(), Stall> {
    let count = pieces(data.len(), length).count();
    post.peers().filter(|peer| *peer != root).try_for_each(|peer| post.skip(peer, count))?;
    pieces(data.len(), length).try_for_each(|piece| post.publish(|slot, _| slot.write_from(data.part(piece))))
}

/// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others [`publish_to`] it.
fn reduce_to_here(post: &mut Post, data: Region, reduction: Reduction) -> Result<(), Stall> {
    for piece in pieces(data.len(), post.capacity()) {
        post.receive_all()?;
        let sources = post.arrived().sources(Source::Output, |_| 0..piece.len());
        data.part(piece).write(|data| reduce(reduction, &sources, data, None))?;
        post.release_all();
    }
    Ok(())
}

/// This rank is the root: `output` becomes all ranks' inputs in rank order, which the others [`publish_to`] it.
fn gather_to_here(post: &mut Post, output: Region, input: Region) -> Result<(), Stall> {
    let (own, each) = (post.rank(), input.len());
    output.part(own * each..(own + 1) * each).copy_from(input)?;
    for piece in pieces(each, post.capacity()) {
        copy_results(post, output, |rank| rank * each + piece.start..rank * each + piece.end)?;
    }
    Ok(())
}

/// This rank is the root: every rank's part of `input` goes there.
fn scatter_from_here(post: &mut Post, output: Region, input: Region) -> Result<(), Stall> {
    let (each, parts) = (output.len(), Parts::new(post));
    output.copy_from(input.part(post.rank() * each..(post.rank() + 1) * each))?;
    for piece in pieces(each, parts.length) {
        publish_parts(post, parts, |peer| input.part(peer * each + piece.start..peer * each + piece.end))?;
    }
    Ok(())
}

/// `output` becomes this rank's part of what rank `root` holds.
pub(super) fn scatter_to_here(post: &mut Post, root: usize, output: Region) -> Result<(), Stall> {
    let parts = Parts::new(post);
    pieces(output.len(), parts.length).try_for_each(|piece| {
        post.take(root, |slot| slot.part(parts.from(root, piece.len())).read_into(output.part(piece)))
    })
}
