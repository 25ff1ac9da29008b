//! Several messages in one call.
use super::rank::{Outcome, Rank};
use crate::backend::P2pOp;

/// Messages to and from both neighbours in the ring.
pub(super) fn batches(rank: &Rank) -> Outcome {
    if rank.world_size() == 1 {
        return Ok(());
    }
    let (before, next) = rank.neighbours();
    rank.moves(|dtype, count| {
        let message = |number: usize, index: usize| {
            rank.periodic(dtype, count, 100, |element| ((7 * number + 31 * index + element) % 100) as f64)
        };
        // Two messages to the next rank, whose order counts, and one to the rank before.
        let (to, from) = ([next, next, before], [before, before, next]);
        let mut batch = Vec::new();
        for (index, peer) in to.into_iter().enumerate() {
            batch.push(P2pOp::Send { tensor: message(rank.number(), index)?, peer });
        }
        let received = from.map(|_| rank.full(dtype, count, 99.0));
        let received = received.into_iter().collect::<Outcome<Vec<_>>>()?;
        batch.extend(
            from.iter().zip(&received).map(|(peer, tensor)| P2pOp::Recv { tensor: tensor.clone(), peer: *peer }),
        );
        if rank.number() % 2 == 1 {
            batch.rotate_left(to.len());
        }
        rank.start_batch(batch)?.wait()?;
        for (index, (tensor, peer)) in received.iter().zip(from).enumerate() {
            rank.assert_equal(tensor, &message(peer, index)?)?;
        }
        Ok(())
    })
}
