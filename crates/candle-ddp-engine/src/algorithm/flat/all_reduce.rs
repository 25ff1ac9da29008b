use crate::algorithm::{Scratch, Tuning, chunk, segment, segment_before, whole_elements};
use crate::error::Failure;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::shm::{Source, reduce};
use crate::tcp::piece::Piece;
use crate::tcp::session::{Recvs, TcpSession};

/// `data` becomes the reduction of all ranks' data.
pub(super) fn all_reduce(
    session: &mut TcpSession,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: Region,
    reduction: Reduction,
) -> Result<(), Failure> {
    if session.world_size() == 1 {
        // There is nothing to add, so no memory for peers' data and no pass over the data are needed.
        return Ok(());
    }
    // The limit is on what one rank receives, since the traffic between all ranks grows with the square of their number.
    if data.len() * (session.world_size() - 1) <= tuning.small {
        at_once(session, scratch, data, reduction)
    } else {
        in_chunks(session, scratch, tuning, data, reduction)
    }
}

/// Every rank sends all its data to every other rank and reduces the data of all ranks.
fn at_once(session: &mut TcpSession, scratch: &mut Scratch, data: Region, reduction: Reduction) -> Result<(), Failure> {
    let mut slots = scratch.slots(session.world_size(), data.len());
    let sends: Vec<(usize, Piece)> = session.peers().map(|peer| (peer, data.into())).collect();
    let own = session.rank();
    let recvs = slots.iter_mut().enumerate().filter(|(peer, _)| *peer != own);
    session.exchange(&sends, recvs.map(|(peer, slot)| (peer, (&mut **slot).into())).collect())?;
    let parts = Source::by_rank(own, &slots, data.len());
    session.move_bytes(data.write(|data| reduce(reduction, &parts, data, None)))
}

/// Rank `c` reduces chunk `c` and sends the result to all, segment by segment: while one segment is received, the
/// reduced previous one is sent. Every rank sends and receives 2 (world size - 1) / world size times the data.
fn in_chunks(
    session: &mut TcpSession,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: Region,
    reduction: Reduction,
) -> Result<(), Failure> {
    let (own, world_size, size) = (session.rank(), session.world_size(), reduction.element.size());
    let length = whole_elements(tuning.segment, size);
    let chunks: Vec<_> = (0..world_size).map(|rank| chunk(data.len() / size, size, rank, world_size)).collect();
    // The first chunk is the longest.
    let steps = chunks[0].len().div_ceil(length);
    let mut slots = scratch.slots(world_size, length.min(chunks[own].len()));
    for step in 0..=steps {
        // For every chunk: the segment that was received in the previous step (empty in the first step), and the one
        // received in this step (empty in the last).
        let both = |rank: usize| {
            let chunk = &chunks[rank];
            [segment_before(chunk, length, step), segment(chunk, length, step)].map(|range| data.part(range))
        };
        let collected = segment(&chunks[own], length, step);
        let mut sends: Vec<(usize, Piece)> = Vec::with_capacity(2 * world_size);
        let mut recvs = Recvs::with_capacity(2 * world_size);
        for (rank, slot) in slots.iter_mut().enumerate().filter(|(rank, _)| *rank != own) {
            let [before, now] = both(rank);
            sends.push((rank, now.into()));
            recvs.push((rank, (&mut slot[..collected.len()]).into()));
            recvs.push((rank, before.into()));
        }
        let [reduced, _] = both(own);
        sends.extend(session.peers().map(|peer| (peer, reduced.into())));
        session.exchange(&sends, recvs)?;
        let parts = Source::by_rank(own, &slots, collected.len());
        session.move_bytes(data.part(collected).write(|data| reduce(reduction, &parts, data, None)))?;
    }
    Ok(())
}
