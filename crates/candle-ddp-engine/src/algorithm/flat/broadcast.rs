use crate::algorithm::{Tuning, chunk, segment, segment_before, whole_elements};
use crate::call::Element;
use crate::error::Failure;
use crate::memory::Region;
use crate::tcp::piece::Piece;
use crate::tcp::session::{Recvs, TcpSession};
use std::ops::Range;

/// How a large message is forwarded: the root gives every other rank a chunk, which that rank forwards to the others,
/// segment by segment. While one segment arrives, the previous one is forwarded. No rank sends more bytes than the
/// message has.
struct Pipeline<'a> {
    /// The ranks that have chunks, in the order of the chunks.
    owners: &'a [usize],
    chunks: Vec<Range<usize>>,
    /// The size of a segment in bytes.
    length: usize,
    /// The number of segments of the longest chunk.
    steps: usize,
}

impl<'a> Pipeline<'a> {
    /// Plans a message of `bytes` to the ranks `owners`; `None` if the root should send it to each of them itself.
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
    let Some(pipeline) = Pipeline::new(owners, tuning, data.len(), element) else {
        let sends: Vec<(usize, Piece)> = owners.iter().map(|peer| (*peer, data.into())).collect();
        return session.exchange(&sends, vec![]);
    };
    for step in 0..pipeline.steps {
        let now = pipeline.chunks.iter().map(|chunk| data.part(segment(chunk, pipeline.length, step)).into());
        let sends: Vec<(usize, Piece)> = pipeline.owners.iter().copied().zip(now).collect();
        session.exchange(&sends, vec![])?;
    }
    Ok(())
}

/// `data` gets the values of `root`, which sends them to the ranks `owners`, including this one.
pub(crate) fn broadcast_to_here(
    session: &mut TcpSession,
    tuning: Tuning,
    (root, owners): (usize, &[usize]),
    data: Region,
    element: Element,
) -> Result<(), Failure> {
    let own = session.rank();
    let Some(pipeline) = Pipeline::new(owners, tuning, data.len(), element) else {
        return session.exchange(&[], vec![(root, data.into())]);
    };
    for step in 0..=pipeline.steps {
        // For every chunk: the segment that arrived in the previous step (empty in the first step) and is now
        // forwarded, and the one that arrives in this step (empty in the last).
        let mut sends: Vec<(usize, Piece)> = Vec::with_capacity(pipeline.owners.len());
        let mut recvs = Recvs::with_capacity(pipeline.owners.len());
        for (owner, chunk) in pipeline.owners.iter().zip(&pipeline.chunks) {
            let before = data.part(segment_before(chunk, pipeline.length, step));
            if *owner != own {
                if step > 0 {
                    recvs.push((*owner, before.into()));
                }
                continue;
            }
            if step < pipeline.steps {
                recvs.push((root, data.part(segment(chunk, pipeline.length, step)).into()));
            }
            if step > 0 {
                let others = pipeline.owners.iter().filter(|owner| **owner != own);
                sends.extend(others.map(|owner| (*owner, before.into())));
            }
        }
        session.exchange(&sends, recvs)?;
    }
    Ok(())
}
