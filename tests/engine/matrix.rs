//! Every collective, with worlds, counts, dtypes and reductions in all combinations, against closed forms.
use crate::{Engine, in_all_worlds};
use candle_core::{DType, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::{Collective, Communicator};

const COUNTS: [usize; 9] = [0, 1, 2, 3, 7, 64, 1000, 10_000, 70_001];
const DTYPES: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U32, DType::U8];
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

/// Less than everything where that takes long in a build that is not optimised: with tiny segments, and the largest
/// count with all dtypes. candle has no empty tensors on a GPU.
fn counts(engine: &Engine, dtype: DType) -> impl Iterator<Item = usize> + use<> {
    let most = match (engine.name, dtype) {
        ("in tiny segments", _) => 1000,
        (_, DType::F32 | DType::BF16) => usize::MAX,
        _ => 10_000,
    };
    let least = usize::from(!engine.device.is_cpu());
    COUNTS.into_iter().filter(move |count| (least..=most).contains(count))
}

/// The element `index` of rank `rank`: small integers, exact in every dtype.
fn value(op: ReduceOp, rank: usize, index: usize) -> usize {
    match op {
        // 1 or 2, so that products stay small.
        ReduceOp::Prod => 1 + (rank + index) % 2,
        _ => rank + index % 5,
    }
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
        // The ranks whose parity is not that of the index hold a 2.
        ReduceOp::Prod => 2_f64.powi(((world_size + index % 2) / 2) as i32),
    }
}

fn tensor(engine: &Engine, dtype: DType, values: impl Iterator<Item = usize>) -> Tensor {
    let values: Vec<f64> = values.map(|value| value as f64).collect();
    let count = values.len();
    Tensor::from_vec(values, count, &engine.device).unwrap().to_dtype(dtype).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_values(tensor: &Tensor, expected: impl Iterator<Item = f64>, what: &str) {
    assert_near(tensor, expected, 1e-6, what);
}

/// NCCL multiplies by 1 / n before it adds, and rounds both to the tensor's dtype.
fn assert_reduced(op: ReduceOp, tensor: &Tensor, expected: impl Iterator<Item = f64>, what: &str) {
    let tolerance = match (op, tensor.device().is_cuda(), tensor.dtype()) {
        (ReduceOp::Avg, true, DType::F16) => 3e-3,
        (ReduceOp::Avg, true, DType::BF16) => 2e-2,
        _ => 1e-6,
    };
    assert_near(tensor, expected, tolerance, what);
}

fn assert_near(tensor: &Tensor, expected: impl Iterator<Item = f64>, tolerance: f64, what: &str) {
    let (found, expected): (Vec<f64>, Vec<f64>) = (values(tensor), expected.collect());
    assert_eq!(found.len(), expected.len(), "{what}");
    let wrong =
        found.iter().zip(&expected).position(|(found, expected)| (found - expected).abs() > tolerance * expected.abs());
    assert!(wrong.is_none(), "{what}, element {wrong:?}: {:?}", wrong.map(|wrong| (found[wrong], expected[wrong])));
}

fn reductions() -> impl Iterator<Item = (DType, ReduceOp)> {
    DTYPES
        .into_iter()
        .flat_map(|dtype| OPS.map(|op| (dtype, op)))
        .filter(|(dtype, op)| dtype.is_float() || *op != ReduceOp::Avg)
}

fn name(engine: &Engine, communicator: &dyn Communicator, rest: std::fmt::Arguments) -> String {
    format!("{}, rank {} of {}, {rest}", engine.name, communicator.rank(), communicator.world_size())
}

pub(crate) fn all_reduce(engine: &Engine) {
    in_all_worlds(engine, |communicator| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        for (dtype, op) in reductions() {
            for count in counts(engine, dtype) {
                let tensor = tensor(engine, dtype, (0..count).map(|index| value(op, rank, index)));
                communicator.run(Collective::AllReduce { tensor: tensor.clone(), op }).unwrap();
                let what = name(engine, communicator, format_args!("{dtype:?}[{count}], {op}"));
                assert_reduced(op, &tensor, (0..count).map(|index| reduced(op, world_size, index)), &what);
            }
        }
    });
}

pub(crate) fn reduce(engine: &Engine) {
    in_all_worlds(engine, |communicator| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        for (number, (dtype, op)) in reductions().enumerate() {
            for count in counts(engine, dtype) {
                let root = (number + count) % world_size;
                let tensor = tensor(engine, dtype, (0..count).map(|index| value(op, rank, index)));
                communicator.run(Collective::Reduce { tensor: tensor.clone(), root, op }).unwrap();
                let what = name(engine, communicator, format_args!("{dtype:?}[{count}], {op}, root {root}"));
                let expected =
                    |index| if rank == root { reduced(op, world_size, index) } else { value(op, rank, index) as f64 };
                assert_reduced(op, &tensor, (0..count).map(expected), &what);
            }
        }
    });
}

pub(crate) fn reduce_scatter(engine: &Engine) {
    in_all_worlds(engine, |communicator| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        for (dtype, op) in reductions() {
            for count in counts(engine, dtype).filter(|count| *count <= 10_000) {
                let input = tensor(engine, dtype, (0..count * world_size).map(|index| value(op, rank, index)));
                let output = tensor(engine, dtype, std::iter::repeat_n(99, count));
                communicator.run(Collective::ReduceScatter { output: output.clone(), input, op }).unwrap();
                let what = name(engine, communicator, format_args!("{dtype:?}[{count}], {op}"));
                let mine = rank * count..(rank + 1) * count;
                assert_reduced(op, &output, mine.map(|index| reduced(op, world_size, index)), &what);
            }
        }
    });
}

/// Different on every rank and at every index: (7 × rank + index) mod 100.
fn mark(rank: usize, index: usize) -> usize {
    (7 * rank + index) % 100
}

/// Runs `body` for every dtype and count in worlds of all sizes.
fn moves(engine: &Engine, body: impl Fn(&dyn Communicator, DType, usize, String) + Sync) {
    in_all_worlds(engine, |communicator| {
        for dtype in DTYPES {
            for count in counts(engine, dtype) {
                body(communicator, dtype, count, name(engine, communicator, format_args!("{dtype:?}[{count}]")));
            }
        }
    });
}

pub(crate) fn broadcast(engine: &Engine) {
    moves(engine, |communicator, dtype, count, what| {
        for root in 0..communicator.world_size().min(3) {
            let tensor = tensor(engine, dtype, (0..count).map(|index| mark(communicator.rank(), index)));
            communicator.run(Collective::Broadcast { tensor: tensor.clone(), root }).unwrap();
            assert_values(&tensor, (0..count).map(|index| mark(root, index) as f64), &format!("{what}, root {root}"));
        }
    });
}

pub(crate) fn all_gather(engine: &Engine) {
    moves(engine, |communicator, dtype, count, what| {
        let world_size = communicator.world_size();
        let input = tensor(engine, dtype, (0..count).map(|index| mark(communicator.rank(), index)));
        let output = tensor(engine, dtype, std::iter::repeat_n(99, count * world_size));
        communicator.run(Collective::AllGather { output: output.clone(), input }).unwrap();
        let expected = (0..count * world_size).map(|index| mark(index / count, index % count) as f64);
        assert_values(&output, expected, &what);
    });
}

pub(crate) fn all_to_all(engine: &Engine) {
    moves(engine, |communicator, dtype, count, what| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let input = tensor(engine, dtype, (0..count * world_size).map(|index| mark(rank, index)));
        let output = tensor(engine, dtype, std::iter::repeat_n(99, count * world_size));
        communicator.run(Collective::AllToAll { output: output.clone(), input }).unwrap();
        let expected = (0..count * world_size).map(|index| mark(index / count, rank * count + index % count) as f64);
        assert_values(&output, expected, &what);
    });
}

pub(crate) fn gather_and_scatter(engine: &Engine) {
    moves(engine, |communicator, dtype, count, what| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let root = count % world_size;
        let is_root = rank == root;
        let input = tensor(engine, dtype, (0..count).map(|index| mark(rank, index)));
        let output = is_root.then(|| tensor(engine, dtype, std::iter::repeat_n(99, count * world_size)));
        communicator.run(Collective::Gather { output: output.clone(), input: input.clone(), root }).unwrap();
        if let Some(output) = &output {
            let expected = (0..count * world_size).map(|index| mark(index / count, index % count) as f64);
            assert_values(output, expected, &what);
        }
        let back = tensor(engine, dtype, std::iter::repeat_n(99, count));
        communicator.run(Collective::Scatter { output: back.clone(), input: output, root }).unwrap();
        assert_values(&back, values(&input).into_iter(), &what);
    });
}

/// Round the ring: to the next rank, from the one before.
pub(crate) fn send_and_recv(engine: &Engine) {
    moves(engine, |communicator, dtype, count, what| {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        if world_size == 1 {
            return;
        }
        let (next, before) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        let sent = tensor(engine, dtype, (0..count).map(|index| mark(rank, index)));
        let received = tensor(engine, dtype, std::iter::repeat_n(99, count));
        let send = communicator.start(Collective::Send { tensor: sent, peer: next }).unwrap();
        communicator.run(Collective::Recv { tensor: received.clone(), peer: before }).unwrap();
        send.wait().unwrap();
        assert_values(&received, (0..count).map(|index| mark(before, index) as f64), &what);
    });
}

pub(crate) fn barrier(engine: &Engine) {
    in_all_worlds(engine, |communicator| (0..20).for_each(|_| communicator.run(Collective::Barrier).unwrap()));
}

pub(crate) fn views_keep_their_surroundings(engine: &Engine) {
    in_all_worlds(engine, |communicator| {
        let world_size = communicator.world_size();
        let whole = Tensor::ones((10, 7), DType::F32, &engine.device).unwrap();
        let rows = whole.narrow(0, 3, 4).unwrap();
        communicator.run(Collective::AllReduce { tensor: rows, op: ReduceOp::Sum }).unwrap();
        let inside = |index: usize| (21..49).contains(&index);
        let expected = (0..70).map(|index| if inside(index) { world_size as f64 } else { 1.0 });
        assert_values(&whole, expected, &name(engine, communicator, format_args!("rows 3 to 6")));
    });
}
