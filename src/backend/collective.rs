use candle_core::Tensor;
use candle_ddp_engine::{Operation, ReduceOp};

/// One call of a collective, with its tensors: contiguous, of the same dtype and shape on every rank (a one-dimensional
/// tensor fits every shape with as many elements), and
/// changed in place (`tensor`, `output`). `input` and `output` must not overlap, except in [`AllGather`](Self::AllGather).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank's `tensor` becomes the reduction of all.
    AllReduce {
        /// Reduced in place.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// Every rank's `tensor` becomes a copy of `root`'s.
    Broadcast {
        /// Read on `root`, written elsewhere.
        tensor: Tensor,
        /// The rank that sends.
        root: usize,
    },
    /// The `tensor` of `root` becomes the reduction of all; the other ranks' tensors do not change.
    Reduce {
        /// Written on `root`, read elsewhere.
        tensor: Tensor,
        /// The rank that gets the result.
        root: usize,
        /// The reduction.
        op: ReduceOp,
    },
    /// `output` becomes all ranks' inputs in rank order.
    AllGather {
        /// `world_size` × the elements of `input`.
        output: Tensor,
        /// This rank's part, which may be its place in `output`.
        input: Tensor,
    },
    /// `output` becomes this rank's part of the reduction of all inputs.
    ReduceScatter {
        /// This rank's part.
        output: Tensor,
        /// `world_size` × the elements of `output`.
        input: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// Part `p` of `input` goes to rank `p`; part `p` of `output` comes from rank `p`. Parts are equal in size.
    AllToAll {
        /// As many elements as `input`; or, on all ranks, only the parts of the other ranks.
        output: Tensor,
        /// `world_size` equal parts.
        input: Tensor,
    },
    /// The `output` of `root` becomes all ranks' inputs in rank order.
    Gather {
        /// `world_size` × the elements of `input` on `root`, `None` elsewhere.
        output: Option<Tensor>,
        /// This rank's part.
        input: Tensor,
        /// The rank that gets the result.
        root: usize,
    },
    /// `output` becomes this rank's part of the `input` of `root`.
    Scatter {
        /// This rank's part.
        output: Tensor,
        /// `world_size` × the elements of `output` on `root`, `None` elsewhere.
        input: Option<Tensor>,
        /// The rank that sends.
        root: usize,
    },
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
    /// Every rank waits until all have made the call.
    Barrier,
}

/// The use that a collective makes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// On this rank or on another one.
    Write,
}

impl Collective {
    /// The tensors of the call, with the names of their arguments.
    pub(crate) fn tensors(&self) -> [Option<(&'static str, &Tensor, Access)>; 2] {
        let write = |name, tensor| Some((name, tensor, Access::Write));
        let read = |name, tensor| Some((name, tensor, Access::Read));
        match self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Reduce { tensor, .. }
            | Self::Recv { tensor, .. } => [write("tensor", tensor), None],
            Self::Send { tensor, .. } => [read("tensor", tensor), None],
            Self::AllGather { output, input }
            | Self::ReduceScatter { output, input, .. }
            | Self::AllToAll { output, input } => [write("output", output), read("input", input)],
            Self::Gather { output, input, .. } => {
                [output.as_ref().and_then(|output| write("output", output)), read("input", input)]
            }
            Self::Scatter { output, input, .. } => {
                [write("output", output), input.as_ref().and_then(|input| read("input", input))]
            }
            Self::Barrier => [None, None],
        }
    }

    /// The tensor that the call changes, on this rank or on another one, and the one that it only reads.
    pub(crate) fn operands(&self) -> [Option<&Tensor>; 2] {
        let [mut output, mut input] = [None; 2];
        for (_, tensor, access) in self.tensors().into_iter().flatten() {
            match access {
                Access::Write => output = Some(tensor),
                Access::Read => input = Some(tensor),
            }
        }
        [output, input]
    }

    /// The name of the method that users call.
    pub fn name(&self) -> &'static str {
        self.operation().name()
    }

    fn operation(&self) -> Operation {
        match self {
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::Reduce { .. } => Operation::Reduce,
            Self::AllGather { .. } => Operation::AllGather,
            Self::ReduceScatter { .. } => Operation::ReduceScatter,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::Gather { .. } => Operation::Gather,
            Self::Scatter { .. } => Operation::Scatter,
            Self::Send { .. } => Operation::Send,
            Self::Recv { .. } => Operation::Recv,
            Self::Barrier => Operation::Barrier,
        }
    }
}
