//! The collectives by their names.
use super::ProcessGroup;
use crate::Result;
use crate::backend::{Collective, ReduceOp, Work};
use candle_core::Tensor;

impl ProcessGroup {
    /// Sends `tensor` to rank `peer`, which must call `recv`. Returns when `tensor` may be changed again.
    ///
    /// # Errors
    /// The same as of every [collective](ProcessGroup#errors).
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.run(Collective::Send { tensor: tensor.clone(), peer })
    }

    /// [`send`](Self::send), without waiting.
    ///
    /// # Errors
    /// The same as of every [collective](ProcessGroup#errors). [`Work::wait`] returns those that come later.
    #[track_caller]
    pub fn isend(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.start(Collective::Send { tensor: tensor.clone(), peer })
    }

    /// Receives data from rank `peer` into `tensor`.
    ///
    /// # Errors
    /// The same as of every [collective](ProcessGroup#errors).
    #[track_caller]
    pub fn recv(&self, tensor: &Tensor, peer: usize) -> Result<()> {
        self.run(Collective::Recv { tensor: tensor.clone(), peer })
    }

    /// [`recv`](Self::recv), without waiting.
    ///
    /// # Errors
    /// The same as of every [collective](ProcessGroup#errors). [`Work::wait`] returns those that come later.
    #[track_caller]
    pub fn irecv(&self, tensor: &Tensor, peer: usize) -> Result<Work> {
        self.start(Collective::Recv { tensor: tensor.clone(), peer })
    }
}

/// Defines both forms of a collective.
macro_rules! collectives {
    ($($(#[$doc:meta])* $run:ident / $start:ident = $variant:ident { $($argument:ident : $kind:ty => $value:expr),* })*) => {
        impl ProcessGroup {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// The same as of every [collective](ProcessGroup#errors).
                #[track_caller]
                pub fn $run(&self, $($argument: $kind),*) -> Result<()> {
                    self.run(Collective::$variant { $($argument: $value),* })
                }

                #[doc = concat!("[`", stringify!($run), "`](Self::", stringify!($run), "), without waiting.")]
                ///
                /// # Errors
                /// The same as of every [collective](ProcessGroup#errors). [`Work::wait`] returns those that come later.
                #[track_caller]
                pub fn $start(&self, $($argument: $kind),*) -> Result<Work> {
                    self.start(Collective::$variant { $($argument: $value),* })
                }
            )*
        }
    };
}

collectives! {
    /// Replaces every rank's `tensor` by the reduction of all, bit-identical on all ranks.
    all_reduce / all_reduce_async = AllReduce { tensor: &Tensor => tensor.clone(), op: ReduceOp => op }

    /// Replaces every rank's `tensor` by a copy of rank `root`'s.
    broadcast / broadcast_async = Broadcast { tensor: &Tensor => tensor.clone(), root: usize => root }

    /// Replaces the `tensor` of rank `root` by the reduction of all; the others do not change.
    reduce / reduce_async = Reduce { tensor: &Tensor => tensor.clone(), root: usize => root, op: ReduceOp => op }

    /// Gathers all ranks' `input`, in rank order, into every rank's `output`, which has `world_size` × the elements of
    /// `input`: PyTorch's `all_gather_into_tensor`. In place, `input` is this rank's own part of `output`.
    all_gather / all_gather_async = AllGather { output: &Tensor => output.clone(), input: &Tensor => input.clone() }

    /// Writes this rank's part of the reduction of all inputs, which have `world_size` × the elements of `output`, into
    /// `output`: PyTorch's `reduce_scatter_tensor`.
    reduce_scatter / reduce_scatter_async = ReduceScatter {
        output: &Tensor => output.clone(), input: &Tensor => input.clone(), op: ReduceOp => op
    }

    /// Sends part `p` of `input` to rank `p`, and receives part `p` of `output` from rank `p`. The `world_size` parts
    /// have equal sizes: PyTorch's `all_to_all_single`. On all ranks alike, `output` may lack the rank's own part.
    all_to_all / all_to_all_async = AllToAll { output: &Tensor => output.clone(), input: &Tensor => input.clone() }

    /// Gathers all ranks' `input`, in rank order, into `output` on rank `root`, where it has `world_size` × the elements of
    /// `input`; the other ranks pass `None`.
    gather / gather_async = Gather {
        output: Option<&Tensor> => output.cloned(), input: &Tensor => input.clone(), root: usize => root
    }

    /// Scatters `input` of rank `root`, which has `world_size` × the elements of `output`, in rank order into all ranks'
    /// `output`; the other ranks pass `None` as `input`.
    scatter / scatter_async = Scatter {
        output: &Tensor => output.clone(), input: Option<&Tensor> => input.cloned(), root: usize => root
    }

    /// Waits until every rank has called it.
    barrier / barrier_async = Barrier {}
}
