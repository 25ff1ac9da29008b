//! Collectives whose data is sent directly from the rank that has it to the rank that needs it.
use crate::algorithm::{Places, Scratch, Tuning, segment, whole_elements};
use crate::error::Failure;
use crate::memory::Region;
use crate::reduction::Reduction;
use crate::shm::{Source, reduce};
use crate::tcp::piece::{Piece, PieceMut};
use crate::tcp::session::{Recvs, TcpSession};

/// Returns once all ranks have made the call.
pub(super) fn barrier(session: &mut TcpSession) -> Result<(), Failure> {
    let sends: Vec<(usize, Piece)> = session.peers().map(|peer| (peer, Piece::EMPTY)).collect();
    session.exchange(&sends, session.peers().map(|peer| (peer, PieceMut::Memory(&mut []))).collect())
}

/// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others send.
pub(super) fn reduce_to_here(
    session: &mut TcpSession,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: Region,
    reduction: Reduction,
) -> Result<(), Failure> {
    let length = whole_elements(tuning.segment, reduction.element.size());
    let whole = 0..data.len();
    let mut slots = scratch.slots(session.world_size(), length.min(data.len()));
    for step in 0..data.len().div_ceil(length).max(1) {
        let now = segment(&whole, length, step);
        let parts = collect(session, &mut slots, now.len(), &[])?;
        session.move_bytes(data.part(now).write(|data| reduce(reduction, &parts, data, None)))?;
    }
    Ok(())
}

/// `output` becomes this rank's part of the reduction of all ranks' inputs.
pub(super) fn reduce_scatter(
    session: &mut TcpSession,
    scratch: &mut Scratch,
    tuning: Tuning,
    (output, input): (Region, Region),
    reduction: Reduction,
) -> Result<(), Failure> {
    let (own, each) = (session.rank(), output.len());
    let length = whole_elements(tuning.segment, reduction.element.size());
    let mut slots = scratch.slots(session.world_size(), length.min(each));
    for step in 0..each.div_ceil(length).max(1) {
        let now = segment(&(0..each), length, step);
        let part_of = |rank: usize| input.part(rank * each + now.start..rank * each + now.end);
        let sends: Vec<(usize, Piece)> = session.peers().map(|peer| (peer, part_of(peer).into())).collect();
        let parts = collect(session, &mut slots, now.len(), &sends)?;
        session.move_bytes(output.part(now.clone()).write_from(part_of(own), |output, input| {
            let mut parts: Vec<Source> = parts;
            parts[own] = Source::Private(input);
            reduce(reduction, &parts, output, None);
        }))?;
    }
    Ok(())
}

/// Receives `length` bytes from each peer while `sends` are sent. Returns the data by rank; this rank's is the data in
/// the output.
fn collect<'a>(
    session: &mut TcpSession,
    slots: &'a mut [&mut [u8]],
    length: usize,
    sends: &[(usize, Piece)],
) -> Result<Vec<Source<'a>>, Failure> {
    let own = session.rank();
    let recvs = slots.iter_mut().enumerate().filter(|(peer, _)| *peer != own);
    session.exchange(sends, recvs.map(|(peer, slot)| (peer, (&mut slot[..length]).into())).collect())?;
    Ok(Source::by_rank(own, slots, length))
}

/// `output` becomes all ranks' inputs in rank order.
pub(super) fn all_gather(session: &mut TcpSession, output: Region, input: Region) -> Result<(), Failure> {
    let sends: Vec<(usize, Piece)> = session.peers().map(|peer| (peer, input.into())).collect();
    let recvs = parts_of_peers(session, output, input)?;
    session.exchange(&sends, recvs)
}

/// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from rank `p`.
pub(super) fn all_to_all(session: &mut TcpSession, output: Region, input: Region) -> Result<(), Failure> {
    let places = Places::new(output, input, session.rank(), session.world_size());
    let whole = 0..places.each;
    session.move_bytes(places.copy_own(output, input, &whole))?;
    let sends: Vec<(usize, Piece)> =
        session.peers().map(|peer| (peer, input.part(places.sent(peer, &whole)).into())).collect();
    let recvs = session.peers().map(|peer| (peer, output.part(places.received(peer, &whole)).into())).collect();
    session.exchange(&sends, recvs)
}

/// This rank is the root: `output` becomes all ranks' inputs, which the others send, in rank order.
pub(super) fn gather_to_here(session: &mut TcpSession, output: Region, input: Region) -> Result<(), Failure> {
    let recvs = parts_of_peers(session, output, input)?;
    session.exchange(&[], recvs)
}

/// This rank is the root: every other rank's part of `input` is sent to it.
pub(super) fn scatter_from_here(session: &mut TcpSession, output: Region, input: Region) -> Result<(), Failure> {
    let each = output.len();
    let part_of = |rank: usize| input.part(rank * each..(rank + 1) * each);
    session.move_bytes(output.copy_from(part_of(session.rank())))?;
    let sends: Vec<(usize, Piece)> = session.peers().map(|peer| (peer, part_of(peer).into())).collect();
    session.exchange(&sends, vec![])
}

/// Copies `own` into this rank's part of `output`, which has a part of that length for each rank, and returns the other
/// ranks' parts.
fn parts_of_peers<'a>(session: &TcpSession, output: Region<'a>, own: Region) -> Result<Recvs<'a>, Failure> {
    let each = own.len();
    let part_of = |rank: usize| output.part(rank * each..(rank + 1) * each);
    session.move_bytes(part_of(session.rank()).copy_from(own))?;
    Ok(session.peers().map(|peer| (peer, part_of(peer).into())).collect())
}
