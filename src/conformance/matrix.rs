//! The cases of the conformance suite, and its checks of every collective against closed forms.
use super::rank::{Fault, Outcome, Rank};
use crate::backend::{Collective, ReduceOp};
use candle_core::{DType, Tensor};
use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

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

/// The number of elements after which [`value`] and [`reduced`] repeat.
const VALUES: usize = 10;

/// Element `index` of rank `rank`: a small integer, exact in every dtype, as is its reduction.
fn value(op: ReduceOp, rank: usize, index: usize) -> f64 {
    let value = match op {
        // 1 or 2, so that products stay small.
        ReduceOp::Prod => 1 + (rank + index) % 2,
        _ => rank + index % 5,
    };
    value as f64
}

/// The reduction of [`value`] over all ranks.
fn reduced(op: ReduceOp, world_size: usize, index: usize) -> f64 {
    let low = (index % 5) as f64;
    let (ranks, last) = (world_size as f64, (world_size - 1) as f64);
    match op {
        ReduceOp::Sum => ranks * low + ranks * last / 2.0,
        ReduceOp::Avg => low + last / 2.0,
        ReduceOp::Min => low,
        ReduceOp::Max => low + last,
        // Ranks hold a 2 if their parity differs from the index's.
        ReduceOp::Prod => 2_f64.powi(((world_size + index % 2) / 2) as i32),
    }
}

pub(super) fn all_reduce(rank: &Rank) -> Outcome {
    rank.reductions(|dtype, op, count| {
        let tensor = rank.periodic(dtype, count, VALUES, |index| value(op, rank.number(), index))?;
        rank.run(Collective::AllReduce { tensor: tensor.clone(), op })?;
        let expected = rank.periodic(dtype, count, VALUES, |index| reduced(op, rank.world_size(), index))?;
        rank.assert_near(&tensor, &expected, rank.tolerance(op, dtype))
    })
}

pub(super) fn reduce(rank: &Rank) -> Outcome {
    rank.reductions(|dtype, op, count| {
        let root = (count + op as usize) % rank.world_size();
        let tensor = rank.periodic(dtype, count, VALUES, |index| value(op, rank.number(), index))?;
        rank.run(Collective::Reduce { tensor: tensor.clone(), root, op })?;
        if rank.number() == root {
            let expected = rank.periodic(dtype, count, VALUES, |index| reduced(op, rank.world_size(), index))?;
            rank.assert_near(&tensor, &expected, rank.tolerance(op, dtype))
        } else {
            let unchanged = rank.periodic(dtype, count, VALUES, |index| value(op, rank.number(), index))?;
            rank.assert_equal(&tensor, &unchanged)
        }
    })
}

pub(super) fn reduce_scatter(rank: &Rank) -> Outcome {
    rank.reductions(|dtype, op, count| {
        if count > 10_000 {
            // The input is larger by a factor of the number of ranks.
            return Ok(());
        }
        let all = count * rank.world_size();
        let input = rank.periodic(dtype, all, VALUES, |index| value(op, rank.number(), index))?;
        let output = rank.full(dtype, count, 99.0)?;
        rank.run(Collective::ReduceScatter { output: output.clone(), input, op })?;
        let start = rank.number() * count;
        let expected = rank.periodic(dtype, count, VALUES, |index| reduced(op, rank.world_size(), start + index))?;
        rank.assert_near(&output, &expected, rank.tolerance(op, dtype))
    })
}

/// `count` elements from `start` on that differ between ranks and indices: (7 × rank + index) mod 100.
fn marks(rank: &Rank, dtype: DType, number: usize, start: usize, count: usize) -> Outcome<Tensor> {
    rank.periodic(dtype, count, 100, |index| ((7 * number + start + index) % 100) as f64)
}

/// The concatenated [`marks`] of all ranks, from `start` on.
fn marks_of_all(rank: &Rank, dtype: DType, start: usize, count: usize) -> Outcome<Tensor> {
    let parts = (0..rank.world_size()).map(|number| marks(rank, dtype, number, start, count));
    Ok(Tensor::cat(&parts.collect::<Outcome<Vec<_>>>()?, 0)?)
}

pub(super) fn broadcast(rank: &Rank) -> Outcome {
    rank.moves(|dtype, count| {
        for root in 0..rank.world_size().min(3) {
            let tensor = marks(rank, dtype, rank.number(), 0, count)?;
            rank.run(Collective::Broadcast { tensor: tensor.clone(), root })?;
            rank.assert_equal(&tensor, &marks(rank, dtype, root, 0, count)?)?;
        }
        Ok(())
    })
}

pub(super) fn all_gather(rank: &Rank) -> Outcome {
    rank.moves(|dtype, count| {
        let input = marks(rank, dtype, rank.number(), 0, count)?;
        let expected = marks_of_all(rank, dtype, 0, count)?;
        let output = rank.full(dtype, count * rank.world_size(), 99.0)?;
        rank.run(Collective::AllGather { output: output.clone(), input: input.clone() })?;
        rank.assert_equal(&output, &expected)?;
        if dtype != DType::F32 {
            return Ok(());
        }
        // This rank's part of the output is its input.
        let output = rank.full(dtype, count * rank.world_size(), 99.0)?;
        let start = rank.number() * count;
        output.slice_set(&input, 0, start)?;
        let input = output.narrow(0, start, count)?;
        rank.run(Collective::AllGather { output: output.clone(), input })?;
        rank.assert_equal(&output, &expected)
    })
}

pub(super) fn all_to_all(rank: &Rank) -> Outcome {
    rank.moves(|dtype, count| {
        let all = count * rank.world_size();
        let input = marks(rank, dtype, rank.number(), 0, all)?;
        let output = rank.full(dtype, all, 99.0)?;
        rank.run(Collective::AllToAll { output: output.clone(), input: input.clone() })?;
        let expected = marks_of_all(rank, dtype, rank.number() * count, count)?;
        rank.assert_equal(&output, &expected)?;
        // Without this rank's own part.
        let others = rank.full(dtype, all - count, 99.0)?;
        rank.run(Collective::AllToAll { output: others.clone(), input })?;
        let start = rank.number() * count;
        let (before, after) = (expected.narrow(0, 0, start)?, expected.narrow(0, start + count, all - count - start)?);
        rank.assert_equal(&others, &Tensor::cat(&[before, after], 0)?)
    })
}

pub(super) fn gather_and_scatter(rank: &Rank) -> Outcome {
    rank.moves(|dtype, count| {
        let root = count % rank.world_size();
        let is_root = rank.number() == root;
        let input = marks(rank, dtype, rank.number(), 0, count)?;
        let output = is_root.then(|| rank.full(dtype, count * rank.world_size(), 99.0)).transpose()?;
        rank.run(Collective::Gather { output: output.clone(), input: input.clone(), root })?;
        if let Some(output) = &output {
            rank.assert_equal(output, &marks_of_all(rank, dtype, 0, count)?)?;
        }
        let back = rank.full(dtype, count, 99.0)?;
        rank.run(Collective::Scatter { output: back.clone(), input: output, root })?;
        rank.assert_equal(&back, &input)
    })
}

pub(super) fn send_and_recv(rank: &Rank) -> Outcome {
    if rank.world_size() == 1 {
        return Ok(());
    }
    let (before, next) = rank.neighbours();
    rank.moves(|dtype, count| {
        let sent = marks(rank, dtype, rank.number(), 0, count)?;
        let received = rank.full(dtype, count, 99.0)?;
        let send = rank.start(Collective::Send { tensor: sent, peer: next })?;
        rank.run(Collective::Recv { tensor: received.clone(), peer: before })?;
        send.wait()?;
        rank.assert_equal(&received, &marks(rank, dtype, before, 0, count)?)
    })
}

pub(super) fn barrier(rank: &Rank) -> Outcome {
    let world_size = rank.world_size();
    for round in 1..=10 {
        if rank.number() == round % world_size {
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Some(come) = rank.come {
            come.fetch_add(1, Ordering::SeqCst);
        }
        rank.run(Collective::Barrier)?;
        let come = rank.come.map(|come| come.load(Ordering::SeqCst));
        if come.is_some_and(|come| come < world_size * round) {
            return Err(Fault::new(format!("round {round}: a rank left the barrier before all had reached it")));
        }
    }
    Ok(())
}

pub(super) fn views(rank: &Rank) -> Outcome {
    let whole = rank.full(DType::F32, 70, 1.0)?.reshape((10, 7))?;
    rank.run(Collective::AllReduce { tensor: whole.narrow(0, 3, 4)?, op: ReduceOp::Sum })?;
    let inside = |index: usize| (21..49).contains(&index);
    let expected = |index| if inside(index) { rank.world_size() as f64 } else { 1.0 };
    rank.assert_equal(&whole, &rank.periodic(DType::F32, 70, 70, expected)?)
}

/// Values of many magnitudes from a linear congruential generator, so that the order of additions changes the bits.
fn random(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next() * 10_f32.powf(next() * 8.0)).collect()
}

pub(super) fn same_bits(rank: &Rank) -> Outcome {
    let count = rank.counts.iter().copied().max().unwrap_or(1).clamp(1, 40_000);
    let values = Tensor::from_vec(random(rank.number() + 1, count), count, rank.device)?;
    let world_size = rank.world_size();
    for dtype in [DType::F32, DType::BF16] {
        let sum = |group: usize| -> Outcome<Tensor> {
            let tensor = values.to_dtype(dtype)?.copy()?;
            rank.groups[group].run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
            Ok(tensor)
        };
        let first = sum(0)?;
        let all = Tensor::zeros(count * world_size, dtype, rank.device)?;
        rank.run(Collective::AllGather { output: all.clone(), input: first.clone() })?;
        for number in 0..world_size {
            let other = all.narrow(0, number * count, count)?;
            rank.assert_equal(&other, &first).map_err(|fault| {
                let (here, dtype) = (rank.number(), dtype.as_str());
                Fault::new(format!("{dtype}[{count}], on rank {number} and on this rank, {here}: {}", fault.reason))
            })?;
        }
        rank.assert_equal(&sum(0)?, &first)?;
        rank.assert_equal(&sum(1)?, &first)?;
    }
    Ok(())
}
