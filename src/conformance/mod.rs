//! What every engine must do: a test suite for implementations of [`Communicator`], also from outside of this crate.
//!
//! With the feature `conformance`, which belongs into `[dev-dependencies]`:
//!
//! ```
//! use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
//! use candle_ddp::conformance::{self, ConformanceOptions};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! # let quick = |options| ConformanceOptions { world_sizes: vec![2], counts: vec![3], ..options };
//! let options = ConformanceOptions::default();
//! # let options = quick(options);
//! conformance::run(&options, |store, rank, world_size| {
//!     Ok(Box::new(CpuCommunicator::new(store, rank, world_size, CpuOptions::default())?))
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! Every collective is carried out in worlds of several sizes, with every dtype and reduction and with small and large
//! counts of elements, and compared with closed forms; then come calls in flight and slices of one tensor ([`Case`] has
//! the list). What an engine does when a rank dies or calls something else is not tested, and neither is its speed.
mod in_flight;
mod matrix;
mod rank;
mod slices;

use crate::backend::{Communicator, ReduceOp};
use crate::process_group::spawn::{is_echo, on_ranks};
use crate::rendezvous::{HashStore, Store};
use crate::{Error, Result};
use candle_core::{DType, Device};
use rank::{Fault, Rank};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// What an engine is tested with.
#[derive(Clone, Debug)]
pub struct ConformanceOptions {
    /// What is tested, in this order. Default: [`Case::ALL`].
    pub cases: Vec<Case>,
    /// The sizes of the worlds that [`run`] makes, from 1 to 14. Default: 1, 2, 3, 4 and 7.
    pub world_sizes: Vec<usize>,
    /// How many elements a rank's part has. Small counts, those around the sizes at which the engine takes another
    /// algorithm, and one that the number of ranks does not divide find most. Those above 1000 are tested with the first of
    /// the `reductions` only, those above 10 000 with f32 and bf16 only. Default: 0 (on the CPU; candle has no empty tensors on a GPU), 1, 2, 3, 7, 64, 1000, 10 000 and 70 001.
    pub counts: Vec<usize>,
    /// The dtypes of the tensors. Default: f32, f64, f16, bf16, i64, u32 and u8.
    pub dtypes: Vec<DType>,
    /// The reductions; averages of floating-point tensors only. Default: all.
    pub reductions: Vec<ReduceOp>,
    /// Whether an average is rounded to the tensor's dtype once, as that of the CPU engine is. NCCL's is not: it rounds
    /// each value divided by the number of ranks, and the sums. Default: no.
    pub average_is_rounded_once: bool,
    /// The device of the tensors. Default: the CPU.
    pub device: Device,
    /// How long a rank waits for a key in the store from which [`run`] has the groups made. The engine's own time-out
    /// bounds the calls. Default: 60 seconds.
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

macro_rules! cases {
    ($($(#[$doc:meta])* $case:ident = $module:ident :: $function:ident),+ $(,)?) => {
        /// Something that an engine must do.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Case {
            $($(#[$doc])* $case,)+
        }

        impl Case {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$case),+];

            fn test(self, rank: &Rank) -> rank::Outcome {
                match self {
                    $(Self::$case => $module::$function(rank),)+
                }
            }
        }

        /// The name, such as `all_reduce`.
        impl fmt::Display for Case {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$case => stringify!($function),)+
                })
            }
        }
    };
}

cases! {
    /// [`Collective::AllReduce`](crate::backend::Collective::AllReduce).
    AllReduce = matrix::all_reduce,
    /// [`Collective::Broadcast`](crate::backend::Collective::Broadcast), from several roots.
    Broadcast = matrix::broadcast,
    /// [`Collective::Reduce`](crate::backend::Collective::Reduce): the others' tensors stay as they are.
    Reduce = matrix::reduce,
    /// [`Collective::AllGather`](crate::backend::Collective::AllGather), also where the input is a part of the output.
    AllGather = matrix::all_gather,
    /// [`Collective::ReduceScatter`](crate::backend::Collective::ReduceScatter).
    ReduceScatter = matrix::reduce_scatter,
    /// [`Collective::AllToAll`](crate::backend::Collective::AllToAll).
    AllToAll = matrix::all_to_all,
    /// [`Collective::Gather`](crate::backend::Collective::Gather) and, back again,
    /// [`Collective::Scatter`](crate::backend::Collective::Scatter).
    GatherAndScatter = matrix::gather_and_scatter,
    /// [`Collective::Send`](crate::backend::Collective::Send) and [`Collective::Recv`](crate::backend::Collective::Recv),
    /// round the ring of ranks.
    SendAndRecv = matrix::send_and_recv,
    /// [`Collective::Barrier`](crate::backend::Collective::Barrier): nobody leaves before everybody has come. (The latter
    /// shows in [`run`] only.)
    Barrier = matrix::barrier,
    /// A view of some rows is reduced, and its surroundings stay.
    Views = matrix::views,
    /// Sums have the same bits on all ranks, again in the next call, and in another group of the same ranks: replicas of
    /// a model drift apart otherwise.
    SameBits = matrix::same_bits,
    /// Calls are carried out in the order in which they were started, and may be waited for in any other. This case, and
    /// those of large messages and of slices, are tested in worlds of two and three ranks.
    InOrder = in_flight::in_order,
    /// A call whose `Work` is dropped is carried out.
    DroppedWork = in_flight::dropped_work,
    /// [`Communicator::run`] comes after what was started before it.
    RunAfterStart = in_flight::run_after_start,
    /// Messages between two ranks do not wait for collectives that were started before them.
    MessagesPassCollectives = in_flight::messages_pass_collectives,
    /// Large messages in both directions, all sent before any is received.
    LargeMessages = in_flight::large_messages,
    /// Parts of one tensor are sent and received at the same time.
    Halos = slices::halos,
    /// The halves of one tensor are reduced in two groups, which not all ranks use in the same order.
    TwoGroups = slices::two_groups,
}

/// Tests an engine whose ranks can be threads of one process. `make` makes the communicator of one rank from a store, the
/// rank and the size of the world, on a thread of the rank's own; every group has its own store. Two groups are made for
/// each size of the world, in which all cases follow each other.
///
/// # Errors
/// The first thing that is wrong, as [`Error::RankFailed`]: the case, the call, and what was expected. An engine that
/// never returns from a call makes this wait for ever.
pub fn run<M>(options: &ConformanceOptions, make: M) -> Result<()>
where
    M: Fn(Arc<dyn Store>, usize, usize) -> Result<Box<dyn Communicator>> + Sync,
{
    check(options)?;
    for &world_size in &options.world_sizes {
        let stores: [Arc<dyn Store>; 2] = std::array::from_fn(|_| Arc::new(HashStore::new(options.timeout)) as _);
        let come = AtomicUsize::new(0);
        let test = |rank: usize| -> Result<()> {
            let connect = |store: &Arc<dyn Store>| {
                let communicator = make(store.clone(), rank, world_size);
                communicator.map_err(|error| failed(rank, world_size, &"making a group", error.into()))
            };
            let (first, second) = (connect(&stores[0])?, connect(&stores[1])?);
            run_cases(options, [&*first, &*second], Some(&come))
        };
        on_ranks(world_size, test, |_, _| ())?;
    }
    Ok(())
}

/// Tests an engine whose ranks are processes: every one calls this with the same options and its communicators of two
/// groups of all ranks.
///
/// # Errors
/// As with [`run`], on the rank that finds it; it then [aborts](Communicator::abort) both groups.
pub fn run_rank(options: &ConformanceOptions, groups: [&dyn Communicator; 2]) -> Result<()> {
    check(&ConformanceOptions { world_sizes: vec![groups[0].world_size()], ..options.clone() })?;
    run_cases(options, groups, None)
}

fn check(options: &ConformanceOptions) -> Result<()> {
    match options.world_sizes.iter().find(|size| !(1..=14).contains(*size)) {
        Some(size) => Err(Error::invalid("world_sizes", format!("worlds have 1 to 14 ranks here, and not {size}"))),
        None => Ok(()),
    }
}

fn run_cases(options: &ConformanceOptions, groups: [&dyn Communicator; 2], come: Option<&AtomicUsize>) -> Result<()> {
    let rank = Rank { options, groups, come };
    for case in &options.cases {
        if let Err(fault) = case.test(&rank) {
            let error = failed(rank.number(), rank.world_size(), case, fault);
            // The other ranks are in the same case, or on their way to it.
            groups.iter().for_each(|group| group.abort(&error.to_string()));
            return Err(error);
        }
    }
    Ok(())
}

fn failed(rank: usize, world_size: usize, case: &dyn fmt::Display, fault: Fault) -> Error {
    match fault.error {
        // Another rank says what is wrong.
        Some(error) if is_echo(rank, &error) => *error,
        _ => Error::RankFailed { rank, reason: format!("{case}, {world_size} ranks, {}", fault.reason) },
    }
}
