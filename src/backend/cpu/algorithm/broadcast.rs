use super::super::call::Element;
use super::super::failure::Failure;
use super::super::session::Session;
use super::{Tuning, chunk, segment, segment_before, split, whole_elements};
use std::ops::Range;

/// How a large message is handed on: the root gives every other rank a chunk, which that one gives to the others, segment
/// by segment: while one segment comes, the one before it is handed on. Nobody sends more than the data once.
struct Plan<'a> {
    /// The ranks that have chunks, in the order of their chunks.
    owners: &'a [usize],
    chunks: Vec<Range<usize>>,
    /// Bytes of a segment.
    length: usize,
    /// Segments of the longest chunk.
    steps: usize,
}

impl<'a> Plan<'a> {
    /// `None` when the root sends `bytes` to every other rank itself, which are `owners`.
    fn new(owners: &'a [usize], tuning: Tuning, bytes: usize, element: Element) -> Option<Self> {
        if owners.len() <= 1 || bytes * owners.len() <= tuning.small {
            return None;
        }
        let size = element.size();
        let chunks: Vec<_> = (0..owners.len()).map(|index| chunk(bytes / size, size, index, owners.len())).collect();
        let length = whole_elements(tuning.segment, size);
        // The first chunk is the longest.
        let steps = chunks[0].len().div_ceil(length);
        Some(Self { owners, chunks, length, steps })
    }
}

/// This rank is the root: its `data` goes to the ranks `owners`.
pub(in super::super) fn broadcast_from_here(
    session: &mut Session,
    tuning: Tuning,
    owners: &[usize],
    data: &[u8],
    element: Element,
) -> Result<(), Failure> {
    let Some(plan) = Plan::new(owners, tuning, data.len(), element) else {
        let sends: Vec<(usize, &[u8])> = owners.iter().map(|peer| (*peer, data)).collect();
        return session.exchange(&sends, vec![]);
    };
    for step in 0..plan.steps {
        let now = plan.chunks.iter().map(|chunk| &data[segment(chunk, plan.length, step)]);
        let sends: Vec<(usize, &[u8])> = plan.owners.iter().copied().zip(now).collect();
        session.exchange(&sends, vec![])?;
    }
    Ok(())
}

/// `data` becomes that of `root`, which sends it to the ranks `owners`, of which this one is one.
pub(in super::super) fn broadcast_to_here(
    session: &mut Session,
    tuning: Tuning,
    (root, owners): (usize, &[usize]),
    data: &mut [u8],
    element: Element,
) -> Result<(), Failure> {
    let own = session.rank();
    let Some(plan) = Plan::new(owners, tuning, data.len(), element) else {
        return session.exchange(&[], vec![(root, data)]);
    };
    for step in 0..=plan.steps {
        // Of every chunk: the segment that came in the step before (empty in the first step) and is now handed on, and
        // the one that comes in this step (empty in the last).
        let both = |chunk| [segment_before(chunk, plan.length, step), segment(chunk, plan.length, step)];
        let mut parts = split(data, plan.chunks.iter().flat_map(both)).into_iter();
        let mut recvs: Vec<(usize, &mut [u8])> = Vec::with_capacity(plan.owners.len());
        let mut come: &[u8] = &[];
        for owner in plan.owners {
            let (Some(before), Some(now)) = (parts.next(), parts.next()) else { break };
            if *owner != own {
                if step > 0 {
                    recvs.push((*owner, before));
                }
                continue;
            }
            come = before;
            if step < plan.steps {
                recvs.push((root, now));
            }
        }
        let mut sends: Vec<(usize, &[u8])> = Vec::with_capacity(plan.owners.len());
        if step > 0 {
            sends.extend(plan.owners.iter().filter(|owner| **owner != own).map(|owner| (*owner, come)));
        }
        session.exchange(&sends, recvs)?;
    }
    Ok(())
}
