//! Collectives whose data goes straight from the rank that has it to the rank that wants it.
use super::super::failure::Failure;
use super::super::kernels::{self, Reduction};
use super::super::session::Session;
use super::{Scratch, Tuning, segment, whole_elements};

/// Returns once all ranks have come.
pub(in super::super) fn barrier(session: &mut Session) -> Result<(), Failure> {
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, [].as_slice())).collect();
    session.exchange(&sends, session.peers().map(|peer| (peer, [].as_mut_slice())).collect())
}

pub(in super::super) fn send(session: &mut Session, data: &[u8], peer: usize) -> Result<(), Failure> {
    session.exchange(&[(peer, data)], vec![])
}

pub(in super::super) fn receive(session: &mut Session, data: &mut [u8], peer: usize) -> Result<(), Failure> {
    session.exchange(&[], vec![(peer, data)])
}

/// This rank is the root: its `data` becomes the reduction of all ranks' data, which the others [`send`].
pub(in super::super) fn reduce_to_here(
    session: &mut Session,
    scratch: &mut Scratch,
    tuning: Tuning,
    data: &mut [u8],
    reduction: Reduction,
) -> Result<(), Failure> {
    let length = whole_elements(tuning.segment, reduction.element.size());
    let whole = 0..data.len();
    let mut slots = scratch.slots(session.world_size(), length.min(data.len()));
    for step in 0..data.len().div_ceil(length).max(1) {
        let now = segment(&whole, length, step);
        let parts = collect(session, &mut slots, now.len(), &[])?;
        kernels::reduce(reduction, &parts, &mut data[now]);
    }
    Ok(())
}

/// `output` becomes this rank's part of the reduction of all ranks' inputs.
pub(in super::super) fn reduce_scatter(
    session: &mut Session,
    scratch: &mut Scratch,
    tuning: Tuning,
    (output, input): (&mut [u8], &[u8]),
    reduction: Reduction,
) -> Result<(), Failure> {
    let (own, each) = (session.rank(), output.len());
    let length = whole_elements(tuning.segment, reduction.element.size());
    let mut slots = scratch.slots(session.world_size(), length.min(each));
    for step in 0..each.div_ceil(length).max(1) {
        let now = segment(&(0..each), length, step);
        let part_of = |rank: usize| &input[rank * each + now.start..rank * each + now.end];
        let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, part_of(peer))).collect();
        let mut parts = collect(session, &mut slots, now.len(), &sends)?;
        parts[own] = Some(part_of(own));
        kernels::reduce(reduction, &parts, &mut output[now]);
    }
    Ok(())
}

/// Receives `length` bytes from each peer, while `sends` go out; `None` stands for this rank.
fn collect<'a>(
    session: &mut Session,
    slots: &'a mut [&mut [u8]],
    length: usize,
    sends: &[(usize, &[u8])],
) -> Result<Vec<Option<&'a [u8]>>, Failure> {
    let own = session.rank();
    let recvs = slots.iter_mut().enumerate().filter(|(peer, _)| *peer != own);
    session.exchange(sends, recvs.map(|(peer, slot)| (peer, &mut slot[..length])).collect())?;
    Ok(slots.iter().enumerate().map(|(rank, slot)| (rank != own).then_some(&slot[..length])).collect())
}

/// `output` becomes all ranks' inputs in rank order.
pub(in super::super) fn all_gather(session: &mut Session, output: &mut [u8], input: &[u8]) -> Result<(), Failure> {
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, input)).collect();
    let recvs = parts_of_peers(session, output, input);
    session.exchange(&sends, recvs)
}

/// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from there.
pub(in super::super) fn all_to_all(session: &mut Session, output: &mut [u8], input: &[u8]) -> Result<(), Failure> {
    let each = input.len() / session.world_size();
    let part_of = |rank: usize| &input[rank * each..(rank + 1) * each];
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, part_of(peer))).collect();
    let recvs = parts_of_peers(session, output, part_of(session.rank()));
    session.exchange(&sends, recvs)
}

/// This rank is the root: `output` becomes all ranks' inputs, which the others [`send`], in rank order.
pub(in super::super) fn gather_to_here(session: &mut Session, output: &mut [u8], input: &[u8]) -> Result<(), Failure> {
    let recvs = parts_of_peers(session, output, input);
    session.exchange(&[], recvs)
}

/// This rank is the root: every rank's part of `input` goes there, where the others [`receive`] it.
pub(in super::super) fn scatter_from_here(
    session: &mut Session,
    output: &mut [u8],
    input: &[u8],
) -> Result<(), Failure> {
    let each = output.len();
    let part_of = |rank: usize| &input[rank * each..(rank + 1) * each];
    output.copy_from_slice(part_of(session.rank()));
    let sends: Vec<(usize, &[u8])> = session.peers().map(|peer| (peer, part_of(peer))).collect();
    session.exchange(&sends, vec![])
}

/// Splits `output` into one part for each rank, of the length of `own`, copies `own` into this rank's and returns those
/// of the others.
fn parts_of_peers<'a>(session: &Session, output: &'a mut [u8], own: &[u8]) -> Vec<(usize, &'a mut [u8])> {
    if own.is_empty() {
        return session.peers().map(|peer| (peer, [].as_mut_slice())).collect();
    }
    let mut parts = Vec::with_capacity(session.world_size());
    for (rank, part) in output.chunks_exact_mut(own.len()).enumerate() {
        if rank == session.rank() { part.copy_from_slice(own) } else { parts.push((rank, part)) }
    }
    parts
}
