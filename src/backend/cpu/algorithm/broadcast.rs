use super::super::call::Element;
use super::super::failure::Failure;
use super::super::session::Session;
use super::{Tuning, chunk, segment, segment_before, split, whole_elements};

/// `data` becomes that of `root`.
pub(in super::super) fn broadcast(
    session: &mut Session,
    tuning: Tuning,
    data: &mut [u8],
    element: Element,
    root: usize,
) -> Result<(), Failure> {
    let own = session.rank();
    if session.world_size() > 2 && data.len() * (session.world_size() - 1) > tuning.small {
        return in_chunks(session, tuning, data, element, root);
    }
    if own != root {
        return session.exchange(&[], vec![(root, data)]);
    }
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, &*data)).collect();
    session.exchange(&sends, vec![])
}

/// The root gives every other rank a chunk, which that one gives to the others, segment by segment: while one segment
/// comes, the one before it is handed on. Nobody sends more than the data once.
fn in_chunks(
    session: &mut Session,
    tuning: Tuning,
    data: &mut [u8],
    element: Element,
    root: usize,
) -> Result<(), Failure> {
    let (own, size) = (session.rank(), element.size());
    let length = whole_elements(tuning.segment, size);
    // The ranks that have chunks, in the order of their chunks.
    let owners: Vec<usize> = (0..session.world_size()).filter(|rank| *rank != root).collect();
    let chunks: Vec<_> = (0..owners.len()).map(|index| chunk(data.len() / size, size, index, owners.len())).collect();
    let steps = chunks[0].len().div_ceil(length);
    if own == root {
        for step in 0..steps {
            let now = chunks.iter().map(|chunk| &data[segment(chunk, length, step)]);
            let sends: Vec<(usize, &[u8])> = owners.iter().copied().zip(now).collect();
            session.exchange(&sends, vec![])?;
        }
        return Ok(());
    }
    for step in 0..=steps {
        // As in an all-reduce: the segment that has come, and the one that comes.
        let both = |chunk| [segment_before(chunk, length, step), segment(chunk, length, step)];
        let mut parts = split(data, chunks.iter().flat_map(both)).into_iter();
        let mut recvs: Vec<(usize, &mut [u8])> = Vec::with_capacity(owners.len() + 1);
        let mut come: &[u8] = &[];
        for owner in &owners {
            let (Some(before), Some(now)) = (parts.next(), parts.next()) else { break };
            if *owner != own {
                if step > 0 {
                    recvs.push((*owner, before));
                }
                continue;
            }
            come = before;
            if step < steps {
                recvs.push((root, now));
            }
        }
        let mut sends: Vec<(usize, &[u8])> = Vec::with_capacity(owners.len());
        if step > 0 {
            sends.extend(owners.iter().filter(|owner| **owner != own).map(|owner| (*owner, come)));
        }
        session.exchange(&sends, recvs)?;
    }
    Ok(())
}
