//! Batches of messages.
//!
//! A batch runs on the communicator and the stream of the collectives, as in PyTorch. A communicator of its ranks would have to be
//! created by all of them for each new set of ranks, and those of pairs run a kernel each, which must all find room on the GPU.
use super::buffer::{input, output};
use super::prepared::Prepared;
use crate::backend::P2pOp;
use candle_core::Result;

/// The messages of a batch, which has been checked.
pub(super) fn prepare(batch: &[P2pOp]) -> Result<Prepared> {
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for message in batch {
        match message {
            P2pOp::Send { tensor, peer } => sends.push((*peer, input(tensor)?)),
            P2pOp::Recv { tensor, peer } => recvs.push((*peer, output(tensor)?)),
        }
    }
    Ok(Prepared::Messages { sends, recvs })
}
