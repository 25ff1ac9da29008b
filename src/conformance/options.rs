//! Options and cases of the conformance suite.
use crate::backend::ReduceOp;
use candle_core::{DType, Device};
use std::fmt;
use std::time::Duration;

/// Options of the conformance suite.
#[derive(Clone, Debug)]
pub struct ConformanceOptions {
    /// The cases to test, in this order. Default: [`Case::ALL`].
    pub cases: Vec<Case>,
    /// The sizes of the worlds that [`run`](super::run) creates, from 1 to 14. Default: 1, 2, 3, 4 and 7.
    pub world_sizes: Vec<usize>,
    /// The element counts of a rank's part. Most useful are small counts, counts around the sizes at which the engine
    /// changes its algorithm, and a count that the number of ranks does not divide. Counts above 1000 are tested only
    /// with the first of the `reductions`, counts above 10 000 only with f32 and bf16. Default: 0 (on the CPU; candle
    /// has no empty tensors on a GPU), 1, 2, 3, 7, 64, 1000, 10 000 and 70 001.
    pub counts: Vec<usize>,
    /// The dtypes of the tensors. Default: f32, f64, f16, bf16, i64, u32 and u8.
    pub dtypes: Vec<DType>,
    /// The reductions; averages are tested with floating-point tensors only. Default: all.
    pub reductions: Vec<ReduceOp>,
    /// Whether an average is rounded to the tensor's dtype only once, as in the CPU engine. NCCL instead rounds each
    /// value divided by the number of ranks, and the sums. Default: false.
    pub average_is_rounded_once: bool,
    /// The device of the tensors. Default: the CPU.
    pub device: Device,
    /// How long a rank waits for a key in the store from which [`run`](super::run) creates the groups. The engine's own
    /// time-out limits the calls. Default: 60 seconds.
    pub timeout: Duration,
}

impl Default for ConformanceOptions {
    fn default() -> Self {
        use {DType::*, ReduceOp::*};
        Self {
            cases: Case::ALL.to_vec(),
            world_sizes: vec![1, 2, 3, 4, 7],
            counts: vec![0, 1, 2, 3, 7, 64, 1000, 10_000, 70_001],
            dtypes: vec![F32, F64, F16, BF16, I64, U32, U8],
            reductions: vec![Sum, Avg, Min, Max, Prod],
            average_is_rounded_once: false,
            device: Device::Cpu,
            timeout: Duration::from_secs(60),
        }
    }
}

/// Passes all cases, each with the function that tests it, to the macro `$then`.
macro_rules! with_cases {
    ($then:ident) => {
        $then! {
            /// [`Collective::AllReduce`](crate::backend::Collective::AllReduce).
            AllReduce = matrix::all_reduce,
            /// [`Collective::Broadcast`](crate::backend::Collective::Broadcast), from several roots.
            Broadcast = matrix::broadcast,
            /// [`Collective::Reduce`](crate::backend::Collective::Reduce): the other ranks' tensors do not change.
            Reduce = matrix::reduce,
            /// [`Collective::AllGather`](crate::backend::Collective::AllGather), including an input that is a part of the
            /// output.
            AllGather = matrix::all_gather,
            /// [`Collective::ReduceScatter`](crate::backend::Collective::ReduceScatter).
            ReduceScatter = matrix::reduce_scatter,
            /// [`Collective::AllToAll`](crate::backend::Collective::AllToAll).
            AllToAll = matrix::all_to_all,
            /// [`Collective::Gather`](crate::backend::Collective::Gather), then
            /// [`Collective::Scatter`](crate::backend::Collective::Scatter) of the result.
            GatherAndScatter = matrix::gather_and_scatter,
            /// [`Collective::Send`](crate::backend::Collective::Send) and
            /// [`Collective::Recv`](crate::backend::Collective::Recv) around the ring of ranks.
            SendAndRecv = matrix::send_and_recv,
            /// [`Communicator::start_batch`](crate::backend::Communicator::start_batch), with messages to and from both neighbours in
            /// the ring.
            Batches = batches::batches,
            /// [`Collective::Barrier`](crate::backend::Collective::Barrier): no rank leaves before all have arrived, which only
            /// [`run`](super::run) can check.
            Barrier = matrix::barrier,
            /// Reducing a view of some rows does not change the other rows.
            Views = matrix::views,
            /// Sums have the same bits on all ranks, in repeated calls, and in another group of the same ranks; otherwise a
            /// model's replicas would drift apart.
            SameBits = matrix::same_bits,
            /// Calls run in the order in which they were started and may be waited for in any order. This case, and those of
            /// large messages and slices, are tested in worlds of two and three ranks.
            InOrder = in_flight::in_order,
            /// A call runs even if its `Work` is dropped.
            DroppedWork = in_flight::dropped_work,
            /// [`Communicator::run`](crate::backend::Communicator::run) comes after all calls started before it.
            RunAfterStart = in_flight::run_after_start,
            /// Messages between two ranks do not wait for collectives that were started before them.
            MessagesPassCollectives = in_flight::messages_pass_collectives,
            /// Large messages in both directions, all sent before any is received, as calls and in a batch.
            LargeMessages = in_flight::large_messages,
            /// Parts of one tensor are sent and received at the same time.
            Halos = slices::halos,
            /// The halves of one tensor are reduced in two groups, which ranks use in different orders.
            TwoGroups = slices::two_groups,
        }
    };
}
pub(super) use with_cases;

macro_rules! define {
    ($($(#[$doc:meta])* $case:ident = $module:ident::$name:ident),+ $(,)?) => {
        /// A requirement that an engine must meet.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Case {
            $($(#[$doc])* $case,)+
        }

        impl Case {
            /// All cases.
            pub const ALL: &[Self] = &[$(Self::$case),+];
        }

        /// Writes the name, such as `all_reduce`.
        impl fmt::Display for Case {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$case => stringify!($name),)+
                })
            }
        }
    };
}

with_cases!(define);
