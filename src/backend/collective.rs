use candle_core::Tensor;
use std::fmt;

/// How the values of all ranks are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum,
    /// The sum divided by the number of ranks; floating point only.
    Avg,
    /// The smallest value; NaN if any value is NaN (NCCL may treat NaN differently).
    Min,
    /// The largest value; NaN if any value is NaN (NCCL may treat NaN differently).
    Max,
    /// The product. Integers wrap.
    Prod,
}

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

    /// The name of the method that users call.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllToAll { .. } => "all_to_all",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
            Self::Barrier => "barrier",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Prod => "prod",
        })
    }
}
