//! Several messages in one call.
use super::Collective;
use super::check::{CheckDevice, check, extent, intersect, on_device};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use candle_ddp_engine::{Call, Channel, Label};

/// The name of the method that users call.
const NAME: &str = "batch_isend_irecv";

/// A message of a [batch](crate::ProcessGroup::batch_isend_irecv): PyTorch's `P2POp`.
#[derive(Clone, Debug)]
pub enum P2pOp {
    /// `tensor` goes to rank `peer`, which receives it.
    Send {
        /// The data to send.
        tensor: Tensor,
        /// The rank that receives.
        peer: usize,
    },
    /// `tensor` becomes a copy of the data that rank `peer` sends.
    Recv {
        /// Where the received data goes.
        tensor: Tensor,
        /// The rank that sends.
        peer: usize,
    },
}

impl From<P2pOp> for Collective {
    fn from(message: P2pOp) -> Self {
        match message {
            P2pOp::Send { tensor, peer } => Self::Send { tensor, peer },
            P2pOp::Recv { tensor, peer } => Self::Recv { tensor, peer },
        }
    }
}

impl P2pOp {
    /// Checks a batch, as [`Collective::check`] checks one call: each message, and that no tensor is received that overlaps another
    /// one of the batch.
    pub(crate) fn check(batch: &[Self], rank: usize, world_size: usize, device: &Device) -> Result<()> {
        check_batch(rank, world_size, &|tensor| on_device(tensor, device), batch)?;
        check_overlaps(rank, batch)
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        let (Self::Send { tensor, .. } | Self::Recv { tensor, .. }) = self;
        tensor
    }

    pub(crate) fn is_recv(&self) -> bool {
        matches!(self, Self::Recv { .. })
    }

    fn describe(&self) -> String {
        let described = crate::error::describe(self.tensor().dtype(), self.tensor().shape());
        match self {
            Self::Send { peer, .. } => format!("{described} for rank {peer}"),
            Self::Recv { peer, .. } => format!("{described} from rank {peer}"),
        }
    }
}

/// Checks the messages of a batch on one rank of a group, and labels them: a message of a batch pairs up with one of a batch.
pub(super) fn check_batch(
    rank: usize,
    world_size: usize,
    check_device: CheckDevice,
    batch: &[P2pOp],
) -> Result<Vec<(Call, Channel)>> {
    let of = |message: &P2pOp| check(rank, world_size, check_device, &message.clone().into());
    Label::BATCH.during(|| batch.iter().map(of).collect())
}

/// Checks that no tensor is received that overlaps another one of the batch: which of the two is first is not determined.
fn check_overlaps(rank: usize, batch: &[P2pOp]) -> Result<()> {
    let extents: Vec<_> = batch.iter().map(|message| extent(message.tensor())).collect();
    for (index, (storage, bytes)) in extents.iter().enumerate() {
        for (before, (other, others)) in extents[..index].iter().enumerate() {
            let (a, b) = (&batch[before], &batch[index]);
            if storage == other && intersect(bytes, others) && (a.is_recv() || b.is_recv()) {
                let reason = format!(
                    "{} and {} overlap (bytes {others:?} and {bytes:?} of one storage), and one of them is written: use slices \
                     that do not overlap, or a copy()",
                    a.describe(),
                    b.describe(),
                );
                return Err(Error::InvalidTensor { rank, operation: NAME.to_string(), reason });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    fn refusal(batch: &[P2pOp]) -> Option<String> {
        P2pOp::check(batch, 0, 3, &Device::Cpu).err().map(|error| error.to_string())
    }

    #[test]
    fn what_is_received_overlaps_nothing_else() {
        let whole = Tensor::zeros(30, DType::F32, &Device::Cpu).unwrap();
        let part = |start: usize| whole.narrow(0, start, 10).unwrap();
        let send = |start, peer| P2pOp::Send { tensor: part(start), peer };
        let recv = |start, peer| P2pOp::Recv { tensor: part(start), peer };
        assert_eq!(refusal(&[send(0, 1), send(0, 2), send(5, 1), recv(15, 2)]), None);
        for batch in [[send(0, 1), recv(9, 2)], [recv(0, 1), send(9, 2)], [recv(0, 2), recv(9, 2)]] {
            let text = refusal(&batch).unwrap();
            assert!(text.contains("batch_isend_irecv"), "{text}");
            assert!(text.contains("overlap (bytes 0..40 and 36..76 of one storage)"), "{text}");
        }
        let text = refusal(&[send(0, 1), recv(9, 2)]).unwrap();
        assert!(text.contains("f32[10] for rank 1 and f32[10] from rank 2 overlap"), "{text}");
    }

    #[test]
    fn each_message_is_checked() {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let fine = P2pOp::Send { tensor: tensor.clone(), peer: 1 };
        let cases = [
            (P2pOp::Send { tensor: tensor.t().unwrap(), peer: 1 }, "not contiguous"),
            (P2pOp::Recv { tensor: tensor.copy().unwrap(), peer: 3 }, "rank 3 is outside of a world of 3"),
            (P2pOp::Recv { tensor: tensor.copy().unwrap(), peer: 0 }, "is this rank itself"),
            (P2pOp::Send { tensor: tensor.to_dtype(DType::I32).unwrap(), peer: 1 }, "does not support dtype I32"),
        ];
        for (wrong, expected) in cases {
            let text = refusal(&[fine.clone(), wrong]).unwrap();
            assert!(text.contains(expected), "{text}");
        }
        assert_eq!(refusal(&[]), None);
    }
}
