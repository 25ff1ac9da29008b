use candle_core::Tensor;
use candle_ddp_engine::{Extent, Operation, ReduceOp};

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

/// A call taken apart.
pub(crate) struct Arguments<'a> {
    pub(crate) operation: Operation,
    /// The tensor that the call changes, on this rank or on another one.
    pub(crate) output: Option<&'a Tensor>,
    /// The tensor that it only reads.
    pub(crate) input: Option<&'a Tensor>,
    pub(crate) reduction: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
    /// The other rank of a message.
    pub(crate) peer: Option<usize>,
}

impl Arguments<'_> {
    /// The names of the arguments `output` and `input`.
    pub(crate) fn names(&self) -> [&'static str; 2] {
        if self.operation.extents().contains(&Extent::None) { ["tensor"; 2] } else { ["output", "input"] }
    }
}

impl Collective {
    /// Takes the call apart.
    pub(crate) fn arguments(&self) -> Arguments<'_> {
        fn of<'a>(operation: Operation, output: Option<&'a Tensor>, input: Option<&'a Tensor>) -> Arguments<'a> {
            Arguments { operation, output, input, reduction: None, root: None, peer: None }
        }
        match self {
            Self::AllReduce { tensor, op } => {
                Arguments { reduction: Some(*op), ..of(Operation::AllReduce, Some(tensor), None) }
            }
            Self::Broadcast { tensor, root } => {
                Arguments { root: Some(*root), ..of(Operation::Broadcast, Some(tensor), None) }
            }
            Self::Reduce { tensor, root, op } => {
                Arguments { reduction: Some(*op), root: Some(*root), ..of(Operation::Reduce, Some(tensor), None) }
            }
            Self::AllGather { output, input } => of(Operation::AllGather, Some(output), Some(input)),
            Self::ReduceScatter { output, input, op } => {
                Arguments { reduction: Some(*op), ..of(Operation::ReduceScatter, Some(output), Some(input)) }
            }
            Self::AllToAll { output, input } => of(Operation::AllToAll, Some(output), Some(input)),
            Self::Gather { output, input, root } => {
                Arguments { root: Some(*root), ..of(Operation::Gather, output.as_ref(), Some(input)) }
            }
            Self::Scatter { output, input, root } => {
                Arguments { root: Some(*root), ..of(Operation::Scatter, Some(output), input.as_ref()) }
            }
            Self::Send { tensor, peer } => Arguments { peer: Some(*peer), ..of(Operation::Send, None, Some(tensor)) },
            Self::Recv { tensor, peer } => Arguments { peer: Some(*peer), ..of(Operation::Recv, Some(tensor), None) },
            Self::Barrier => of(Operation::Barrier, None, None),
        }
    }

    /// The tensors of the call, with the names of their arguments.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor, Access)> {
        let arguments = self.arguments();
        let [output, input] = arguments.names();
        let written = arguments.output.map(|tensor| (output, tensor, Access::Write));
        written.into_iter().chain(arguments.input.map(|tensor| (input, tensor, Access::Read)))
    }

    /// The name of the method that users call.
    pub fn name(&self) -> &'static str {
        self.arguments().operation.name()
    }
}
