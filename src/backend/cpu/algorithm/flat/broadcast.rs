use crate::backend::call::Element;
use crate::backend::cpu::algorithm::{Tuning, chunk, segment, segment_before, whole_elements};
use crate::backend::cpu::piece::Piece;
use crate::backend::cpu::storage::Region;
use crate::backend::cpu::tcp_session::{Recvs, TcpSession};
use crate::error::Failure;
use std::ops::Range;

/// How a large message is passed on: the root gives every other rank a chunk, which that rank passes on to the others,
/// segment by segment. While one segment comes, the one before it is passed on. No rank sends more bytes than the message
/// has.
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
    /// For a message of `bytes` to the ranks `owners`; `None` when the root had better send it to each of them itself.
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
pub(crate) fn broadcast_from_here(
    session: &mut TcpSession,
    tuning: Tuning,
    owners: &[usize],
    data: Region,
    element: Element,
) -> Result<(), Failure> {
    let Some(plan) = Plan::new(owners, tuning, data.len(), element) else {
        let sends: Vec<(usize, Piece)> = owners.iter().map(|peer| (*peer, data.into())).collect();
        return session.exchange(&sends, vec![]);
    };
    for step in 0..plan.steps {
        let now = plan.chunks.iter().map(|chunk| data.part(segment(chunk, plan.length, step)).into());
        let sends: Vec<(usize, Piece)> = plan.owners.iter().copied().zip(now).collect();
        session.exchange(&sends, vec![])?;
    }
    Ok(())
}

/// `data` becomes that of `root`, which sends it to the ranks `owners`, of which this one is one.
pub(crate) fn broadcast_to_here(
    session: &mut TcpSession,
    tuning: Tuning,
    (root, owners): (usize, &[usize]),
    data: Region,
    element: Element,
) -> Result<(), Failure> {
    let own = session.rank();
    let Some(plan) = Plan::new(owners, tuning, data.len(), element) else {
        return session.exchange(&[], vec![(root, data.into())]);
    };
    for step in 0..=plan.steps {
        // Of every chunk: the segment that came in the step before (empty in the first step) and is now passed on, and
        // the one that comes in this step (empty in the last).
        let mut sends: Vec<(usize, Piece)> = Vec::with_capacity(plan.owners.len());
        let mut recvs = Recvs::with_capacity(plan.owners.len());
        for (owner, chunk) in plan.owners.iter().zip(&plan.chunks) {
            let before = data.part(segment_before(chunk, plan.length, step));
            if *owner != own {
                if step > 0 {
                    recvs.push((*owner, before.into()));
                }
                continue;
            }
            if step < plan.steps {
                recvs.push((root, data.part(segment(chunk, plan.length, step)).into()));
            }
            if step > 0 {
                let others = plan.owners.iter().filter(|owner| **owner != own);
                sends.extend(others.map(|owner| (*owner, before.into())));
            }
        }
        session.exchange(&sends, recvs)?;
    }
    Ok(())
}
