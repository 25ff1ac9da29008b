use super::super::failure::Failure;
use super::super::kernels::{self, Reduction};
use super::super::session::Session;
use super::{Scratch, Tuning, chunk, segment, segment_before, split, whole_elements};

/// `data` becomes the reduction of all ranks' data.
pub(in super::super) fn all_reduce(
    session: &mut Session,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: &mut [u8],
    reduction: Reduction,
) -> Result<(), Failure> {
    if session.world_size() == 1 {
        // Nothing to add: without memory for what comes from peers, and without a pass over the data.
        return Ok(());
    }
    // The traffic of everybody to everybody grows with the square of the ranks: keep the limit on what one receives.
    if data.len() * (session.world_size() - 1) <= tuning.small {
        at_once(session, scratch, data, reduction)
    } else {
        in_chunks(session, scratch, tuning, data, reduction)
    }
}

/// Everybody sends everything to everybody, and reduces it.
fn at_once(session: &mut Session, scratch: &mut Scratch, data: &mut [u8], reduction: Reduction) -> Result<(), Failure> {
    let mut slots = scratch.slots(session.world_size(), data.len());
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, &*data)).collect();
    let own = session.rank();
    let recvs = slots.iter_mut().enumerate().filter(|(peer, _)| *peer != own);
    session.exchange(&sends, recvs.map(|(peer, slot)| (peer, &mut **slot)).collect())?;
    let parts: Vec<Option<&[u8]>> =
        slots.iter().enumerate().map(|(rank, slot)| (rank != own).then_some(&**slot)).collect();
    kernels::reduce(reduction, &parts, data);
    Ok(())
}

/// Rank `c` reduces chunk `c` and gives the result to all, segment by segment: while one segment is collected, the one
/// before it, reduced, goes out. Every rank sends and receives 2 (world size - 1) / world size times the data.
fn in_chunks(
    session: &mut Session,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: &mut [u8],
    reduction: Reduction,
) -> Result<(), Failure> {
    let (own, world_size, size) = (session.rank(), session.world_size(), reduction.element.size());
    let length = whole_elements(tuning.segment, size);
    let chunks: Vec<_> = (0..world_size).map(|rank| chunk(data.len() / size, size, rank, world_size)).collect();
    // The first chunk is the longest.
    let steps = chunks[0].len().div_ceil(length);
    let mut slots = scratch.slots(world_size, length.min(chunks[own].len()));
    for step in 0..=steps {
        // Of every chunk: the segment that was collected in the step before (empty in the first step), and the one that
        // is collected in this step (empty in the last).
        let both = |chunk| [segment_before(chunk, length, step), segment(chunk, length, step)];
        let collected = segment(&chunks[own], length, step);
        let mut parts = split(data, chunks.iter().flat_map(both)).into_iter();
        let mut sends: Vec<(usize, &[u8])> = Vec::with_capacity(2 * world_size);
        let mut recvs: Vec<(usize, &mut [u8])> = Vec::with_capacity(2 * world_size);
        let mut reduced: &[u8] = &[];
        for (rank, slot) in slots.iter_mut().enumerate() {
            let (Some(before), Some(now)) = (parts.next(), parts.next()) else { break };
            if rank == own {
                reduced = before;
            } else {
                sends.push((rank, now));
                recvs.push((rank, &mut slot[..collected.len()]));
                recvs.push((rank, before));
            }
        }
        sends.extend(session.peers().map(|peer| (peer, reduced)));
        session.exchange(&sends, recvs)?;
        let parts: Vec<Option<&[u8]>> =
            (slots.iter().enumerate()).map(|(rank, slot)| (rank != own).then_some(&slot[..collected.len()])).collect();
        kernels::reduce(reduction, &parts, &mut data[collected]);
    }
    Ok(())
}
