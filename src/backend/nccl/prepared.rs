//! The NCCL calls that make up a collective, on the memory of its tensors.
use super::buffer::{input, output};
use super::calls::{Buffer, Target};
use super::comm::Comm;
use super::status::{CallResult, Status};
use crate::backend::{Collective, ReduceOp};
use candle_core::Result;
use cudarc::nccl::sys::ncclRedOp_t;

/// A checked collective, with the memory that it uses.
pub(super) enum Prepared {
    AllReduce {
        memory: Buffer,
        op: ncclRedOp_t,
    },
    Broadcast {
        memory: Buffer,
        root: usize,
    },
    Reduce {
        memory: Buffer,
        op: ncclRedOp_t,
        root: usize,
        is_root: bool,
    },
    AllGather {
        output: Buffer,
        input: Buffer,
    },
    ReduceScatter {
        output: Buffer,
        input: Buffer,
        op: ncclRedOp_t,
    },
    /// Sends a part to each rank and receives a part from each rank, all at once.
    Messages {
        sends: Vec<(usize, Buffer)>,
        recvs: Vec<(usize, Buffer)>,
    },
}

/// A function of NCCL with its dtype, reduction and peer, as far as they matter, and the power of two of its bytes. For another one, NCCL may
/// choose an algorithm, or need connections, for which it allocates memory.
pub(super) type Kind = (&'static str, [usize; 4]);

/// The calling rank's position in the group.
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// One element, for barriers.
    pub(super) token: Buffer,
}

impl Prepared {
    pub(super) fn new(collective: &Collective, member: &Member) -> Result<Self> {
        let Member { rank, world_size, token } = *member;
        let parts = |memory: Buffer| (0..world_size).map(move |peer| (peer, memory.part(peer, world_size))).collect();
        Ok(match collective {
            Collective::AllReduce { tensor, op } => Self::AllReduce { memory: output(tensor)?, op: nccl_op(*op) },
            Collective::Broadcast { tensor, root } => Self::Broadcast { memory: output(tensor)?, root: *root },
            Collective::Reduce { tensor, root, op } => {
                Self::Reduce { memory: output(tensor)?, op: nccl_op(*op), root: *root, is_root: *root == rank }
            }
            Collective::AllGather { output: all, input: own } => {
                Self::AllGather { output: output(all)?, input: input(own)? }
            }
            Collective::ReduceScatter { output: own, input: all, op } => {
                Self::ReduceScatter { output: output(own)?, input: input(all)?, op: nccl_op(*op) }
            }
            Collective::AllToAll { output: to, input: from } => {
                let (from, to) = (input(from)?, output(to)?);
                let mut sends: Vec<_> = parts(from);
                // The output may have the parts of the other ranks only.
                let recvs = if to.count == from.count {
                    parts(to)
                } else {
                    sends.retain(|(peer, _)| *peer != rank);
                    let part = |index| to.part(index, world_size - 1);
                    sends.iter().enumerate().map(|(index, (peer, _))| (*peer, part(index))).collect()
                };
                Self::Messages { sends, recvs }
            }
            Collective::Gather { output: all, input: own, root } => Self::Messages {
                sends: vec![(*root, input(own)?)],
                recvs: match all {
                    Some(all) => parts(output(all)?),
                    None => Vec::new(),
                },
            },
            Collective::Scatter { output: own, input: all, root } => Self::Messages {
                sends: match all {
                    Some(all) => parts(input(all)?),
                    None => Vec::new(),
                },
                recvs: vec![(*root, output(own)?)],
            },
            // Messages have a communicator of two ranks, whose rank 0 sends and whose rank 1 receives.
            Collective::Send { tensor, .. } => Self::Messages { sends: vec![(1, input(tensor)?)], recvs: Vec::new() },
            Collective::Recv { tensor, .. } => Self::Messages { sends: Vec::new(), recvs: vec![(0, output(tensor)?)] },
            Collective::Barrier => Self::AllReduce { memory: token, op: ncclRedOp_t::ncclSum },
        })
    }

    /// Starts the collective. If there are no elements, which is then so on all ranks, nothing is called.
    ///
    /// # Safety
    /// The tensors from which this was made, or copies that share their storage, must live until the stream has passed
    /// it.
    pub(super) unsafe fn start(&self, comm: &mut Comm, target: Target) -> CallResult {
        if self.is_empty() {
            return Ok(Status::Done);
        }
        // SAFETY, of all calls: the memory is that of tensors on the communicator's device, which the caller keeps
        // alive; their sizes were checked.
        match self {
            Self::AllReduce { memory, op } => unsafe { comm.all_reduce(*memory, *op, target) },
            Self::Broadcast { memory, root } => unsafe { comm.broadcast(*memory, *root, target) },
            Self::Reduce { memory, op, root, is_root } => unsafe { comm.reduce(*memory, *op, *root, *is_root, target) },
            Self::AllGather { output, input } => unsafe { comm.all_gather(*output, *input, target) },
            Self::ReduceScatter { output, input, op } => unsafe { comm.reduce_scatter(*output, *input, *op, target) },
            Self::Messages { sends, recvs } => comm.together(|comm| {
                for (peer, memory) in sends {
                    // SAFETY: as above.
                    unsafe { comm.send(*memory, *peer, target) }?;
                }
                for (peer, memory) in recvs {
                    // SAFETY: as above.
                    unsafe { comm.recv(*memory, *peer, target) }?;
                }
                Ok(())
            }),
        }
    }

    /// The kinds of its calls.
    pub(super) fn kinds(&self) -> Vec<Kind> {
        let kind = |name, memory: &Buffer, op: ncclRedOp_t, peer: usize| {
            let size = (memory.count * memory.bytes_per_element).checked_ilog2().unwrap_or_default();
            (name, [memory.dtype as usize, op as usize, peer, size as usize])
        };
        let sum = ncclRedOp_t::ncclSum;
        match self {
            Self::AllReduce { memory, op } => vec![kind("all-reduce", memory, *op, 0)],
            Self::Broadcast { memory, root } => vec![kind("broadcast", memory, sum, *root)],
            Self::Reduce { memory, op, root, .. } => vec![kind("reduce", memory, *op, *root)],
            Self::AllGather { input, .. } => vec![kind("all-gather", input, sum, 0)],
            Self::ReduceScatter { output, op, .. } => vec![kind("reduce-scatter", output, *op, 0)],
            Self::Messages { sends, recvs } => {
                let sends = sends.iter().map(|(peer, memory)| kind("send", memory, sum, *peer));
                sends.chain(recvs.iter().map(|(peer, memory)| kind("recv", memory, sum, *peer))).collect()
            }
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::AllReduce { memory, .. } | Self::Broadcast { memory, .. } | Self::Reduce { memory, .. } => {
                memory.count == 0
            }
            Self::AllGather { input: part, .. } | Self::ReduceScatter { output: part, .. } => part.count == 0,
            Self::Messages { sends, recvs } => sends.iter().chain(recvs).all(|(_, memory)| memory.count == 0),
        }
    }
}

fn nccl_op(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Avg => ncclRedOp_t::ncclAvg,
        ReduceOp::Min => ncclRedOp_t::ncclMin,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
        ReduceOp::Prod => ncclRedOp_t::ncclProd,
    }
}
