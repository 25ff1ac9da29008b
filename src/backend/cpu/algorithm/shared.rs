//! The collectives over shared memory.
//!
//! Every rank has a stream of slots that all others read (`shm/stream.rs`). Where ranks hold different data for each
//! other, a slot is divided into equal parts, one for each peer.
use super::super::call::Call;
use super::super::kernels::Reduction;
use super::super::shm::{Post, Source, pieces, reduce};
use super::super::storage::{with_mut, with_mut_and_ref, with_ref};
use super::super::transport::Stall;
use super::{Tuning, chunk, segment};
use crate::backend::Collective;
use std::ops::Range;

/// Carries out a collective; `Send` and `Recv` are none.
pub(in super::super) fn execute(
    post: &mut Post,
    tuning: Tuning,
    call: Call,
    collective: &Collective,
) -> candle_core::Result<Result<(), Stall>> {
    let Some(element) = call.element else { return Ok(barrier(post)) };
    let ranks = post.world_size();
    let reduction = |op: &_| Reduction { element, op: *op, ranks };
    let is_root = call.root == Some(post.rank());
    match collective {
        Collective::AllReduce { tensor, op } => with_mut(tensor, |data| all_reduce(post, tuning, data, reduction(op))),
        Collective::Broadcast { tensor, .. } if is_root => with_ref(tensor, |data| publish(post, data)),
        Collective::Broadcast { tensor, root } => with_mut(tensor, |data| copy_from(post, *root, data)),
        Collective::Reduce { tensor, op, .. } if is_root => {
            with_mut(tensor, |data| reduce_to_here(post, data, reduction(op)))
        }
        Collective::Reduce { tensor: input, root, .. } | Collective::Gather { output: None, input, root } => {
            with_ref(input, |data| publish_to(post, *root, data, post.capacity()))
        }
        Collective::Gather { output: Some(output), input, .. } => {
            with_mut_and_ref(output, input, |output, input| gather_to_here(post, output, input))
        }
        Collective::Scatter { output, input: Some(input), .. } => {
            with_mut_and_ref(output, input, |output, input| scatter_from_here(post, output, input))
        }
        Collective::Scatter { output, input: None, root } => {
            with_mut(output, |output| scatter_to_here(post, *root, output))
        }
        Collective::AllGather { output, input } => {
            with_mut_and_ref(output, input, |output, input| all_gather(post, output, input))
        }
        Collective::ReduceScatter { output, input, op } => {
            with_mut_and_ref(output, input, |output, input| reduce_scatter(post, output, input, reduction(op)))
        }
        Collective::AllToAll { output, input } => {
            with_mut_and_ref(output, input, |output, input| all_to_all(post, output, input))
        }
        Collective::Barrier => Ok(barrier(post)),
        Collective::Send { .. } | Collective::Recv { .. } => {
            Ok(Err(Stall::System("messages do not travel with the collectives".into())))
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
    post.publish(|_, _| ())?;
    post.peers().try_for_each(|peer| post.take(peer, |_| ()))
}

fn all_reduce(post: &mut Post, tuning: Tuning, data: &mut [u8], reduction: Reduction) -> Result<(), Stall> {
    if data.len().saturating_mul(post.world_size() - 1) <= tuning.small && data.len() <= post.capacity() {
        all_reduce_at_once(post, data, reduction)
    } else {
        all_reduce_in_chunks(post, data, reduction)
    }
}

/// Everybody publishes everything, and reduces it.
fn all_reduce_at_once(post: &mut Post, data: &mut [u8], reduction: Reduction) -> Result<(), Stall> {
    post.publish(|slot, _| slot.write(data))?;
    post.receive_all()?;
    reduce(reduction, &post.arrived().sources(Source::Output, |_| 0..data.len()), data, None);
    post.release_all();
    Ok(())
}

/// Rank `c` reduces chunk `c`, step by step: everybody publishes its parts of all chunks; rank `c` reduces its part
/// straight from the slots of all, and publishes the result, which the others copy. Parts are published one step ahead
/// and results copied one step behind, so that nobody waits for what the others are doing right now.
fn all_reduce_in_chunks(post: &mut Post, data: &mut [u8], reduction: Reduction) -> Result<(), Stall> {
    let (own, world_size, size) = (post.rank(), post.world_size(), reduction.element.size());
    let parts = Parts::new(post);
    let chunks: Vec<_> = (0..world_size).map(|rank| chunk(data.len() / size, size, rank, world_size)).collect();
    // The first chunk is the longest.
    let steps = chunks[0].len().div_ceil(parts.length).max(1);
    let piece = |rank: usize, step: usize| segment(&chunks[rank], parts.length, step);
    publish_parts(post, parts, |peer| &data[piece(peer, 0)])?;
    for step in 0..steps {
        if step + 1 < steps {
            publish_parts(post, parts, |peer| &data[piece(peer, step + 1)])?;
        }
        post.receive_all()?;
        let mine = piece(own, step);
        post.publish(|slot, arrived| {
            let sources = arrived.sources(Source::Output, |peer| parts.from(peer, mine.len()));
            reduce(reduction, &sources, &mut data[mine.clone()], Some(slot.part(0..mine.len())));
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
    part_for: impl Fn(usize) -> &'a [u8],
) -> Result<(), Stall> {
    let peers = post.peers();
    post.publish(|slot, _| {
        for peer in peers {
            let part = part_for(peer);
            slot.part(parts.to(peer, part.len())).write(part);
        }
    })
}

/// Copies from a slot of every peer what belongs to the range of `data` that `place` gives for it.
fn copy_results(post: &mut Post, data: &mut [u8], place: impl Fn(usize) -> Range<usize>) -> Result<(), Stall> {
    post.peers().try_for_each(|peer| post.take(peer, |slot| slot.read(&mut data[place(peer)])))
}

/// `output` becomes this rank's part of the reduction of all ranks' inputs.
fn reduce_scatter(post: &mut Post, output: &mut [u8], input: &[u8], reduction: Reduction) -> Result<(), Stall> {
    let (own, each, parts) = (post.rank(), output.len(), Parts::new(post));
    for piece in pieces(each, parts.length) {
        let part_of = |rank: usize| &input[rank * each..][piece.clone()];
        publish_parts(post, parts, part_of)?;
        post.receive_all()?;
        let sources = post.arrived().sources(Source::Private(part_of(own)), |peer| parts.from(peer, piece.len()));
        reduce(reduction, &sources, &mut output[piece.clone()], None);
        post.release_all();
    }
    Ok(())
}

/// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from there.
fn all_to_all(post: &mut Post, output: &mut [u8], input: &[u8]) -> Result<(), Stall> {
    let (each, parts) = (input.len() / post.world_size(), Parts::new(post));
    for piece in pieces(each, parts.length) {
        let place = |rank: usize| rank * each + piece.start..rank * each + piece.end;
        publish_parts(post, parts, |peer| &input[place(peer)])?;
        output[place(post.rank())].copy_from_slice(&input[place(post.rank())]);
        for peer in post.peers() {
            post.take(peer, |slot| slot.part(parts.from(peer, piece.len())).read(&mut output[place(peer)]))?;
        }
    }
    Ok(())
}

/// `output` becomes all ranks' inputs in rank order.
fn all_gather(post: &mut Post, output: &mut [u8], input: &[u8]) -> Result<(), Stall> {
    let (own, each) = (post.rank(), input.len());
    for piece in pieces(each, post.capacity()) {
        post.publish(|slot, _| slot.write(&input[piece.clone()]))?;
        let place = |rank: usize| rank * each + piece.start..rank * each + piece.end;
        output[place(own)].copy_from_slice(&input[piece.clone()]);
        copy_results(post, output, place)?;
    }
    Ok(())
}

/// Publishes `data` for everybody.
pub(super) fn publish(post: &mut Post, data: &[u8]) -> Result<(), Stall> {
    pieces(data.len(), post.capacity()).try_for_each(|piece| post.publish(|slot, _| slot.write(&data[piece])))
}

/// `data` becomes what rank `root` publishes.
pub(super) fn copy_from(post: &mut Post, root: usize, data: &mut [u8]) -> Result<(), Stall> {
    pieces(data.len(), post.capacity()).try_for_each(|piece| post.take(root, |slot| slot.read(&mut data[piece])))
}

/// Publishes `data` for rank `root`, as all others do, in slots of `length` bytes.
pub(super) fn publish_to(post: &mut Post, root: usize, data: &[u8], length: usize) -> Result<(), Stall> {
    let count = pieces(data.len(), length).count();
    post.peers().filter(|peer| *peer != root).try_for_each(|peer| post.skip(peer, count))?;
    pieces(data.len(), length).try_for_each(|piece| post.publish(|slot, _| slot.write(&data[piece])))
}

/// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others [`publish_to`] it.
fn reduce_to_here(post: &mut Post, data: &mut [u8], reduction: Reduction) -> Result<(), Stall> {
    for piece in pieces(data.len(), post.capacity()) {
        post.receive_all()?;
        reduce(reduction, &post.arrived().sources(Source::Output, |_| 0..piece.len()), &mut data[piece.clone()], None);
        post.release_all();
    }
    Ok(())
}

/// This rank is the root: `output` becomes all ranks' inputs in rank order, which the others [`publish_to`] it.
fn gather_to_here(post: &mut Post, output: &mut [u8], input: &[u8]) -> Result<(), Stall> {
    let (own, each) = (post.rank(), input.len());
    output[own * each..][..each].copy_from_slice(input);
    for piece in pieces(each, post.capacity()) {
        copy_results(post, output, |rank| rank * each + piece.start..rank * each + piece.end)?;
    }
    Ok(())
}

/// This rank is the root: every rank's part of `input` goes there.
fn scatter_from_here(post: &mut Post, output: &mut [u8], input: &[u8]) -> Result<(), Stall> {
    let (each, parts) = (output.len(), Parts::new(post));
    output.copy_from_slice(&input[post.rank() * each..][..each]);
    for piece in pieces(each, parts.length) {
        publish_parts(post, parts, |peer| &input[peer * each..][piece.clone()])?;
    }
    Ok(())
}

/// `output` becomes this rank's part of what rank `root` holds.
pub(super) fn scatter_to_here(post: &mut Post, root: usize, output: &mut [u8]) -> Result<(), Stall> {
    let parts = Parts::new(post);
    pieces(output.len(), parts.length)
        .try_for_each(|piece| post.take(root, |slot| slot.part(parts.from(root, piece.len())).read(&mut output[piece])))
}
