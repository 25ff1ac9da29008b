//! Every collective, compared with closed forms.
use super::support::*;
use std::ffi::c_int;

const COUNT: usize = 1001;

/// Returns element `index` of rank `rank`: 1 to 7, so that even products over three ranks fit into int8.
fn value(rank: usize, index: usize) -> f64 {
    (1 + (rank + index) % 5) as f64
}

/// Returns the results of the reductions, in the order of NCCL's numbers: sum, product, maximum, minimum, mean.
fn reduced(op: c_int, size: usize, index: usize, is_float: bool) -> f64 {
    let values = (0..size).map(|rank| value(rank, index));
    match op {
        0 => values.sum(),
        1 => values.product(),
        2 => values.fold(f64::MIN, f64::max),
        3 => values.fold(f64::MAX, f64::min),
        _ if is_float => values.sum::<f64>() / size as f64,
        _ => (values.sum::<f64>() / size as f64).trunc(),
    }
}

/// Returns a buffer with values that no rank has.
fn nothing(dtype: c_int, count: usize) -> Vec<u8> {
    encode(dtype, (0..count).map(|_| 99.0))
}

fn own(dtype: c_int, rank: usize, count: usize) -> Vec<u8> {
    encode(dtype, (0..count).map(|index| value(rank, index)))
}

/// Returns all types with all reductions. Means of 16-bit floats are rounded twice and have their own test.
fn reductions() -> impl Iterator<Item = (c_int, c_int)> {
    let all = DTYPES.flat_map(|dtype| (0..5).map(move |op| (dtype, op)));
    all.filter(|(dtype, op)| !(*op == 4 && is_float(*dtype)))
}

#[test]
fn all_reduce() {
    in_all_worlds(|rank| {
        for (dtype, op) in reductions() {
            let (send, mut receive) = (own(dtype, rank.rank, COUNT), nothing(dtype, COUNT));
            rank.done(rank.reduce(send.as_ptr(), receive.as_mut_ptr(), COUNT, dtype, op));
            assert!(rank.synchronize(PATIENCE));
            let expected = encode(dtype, (0..COUNT).map(|index| reduced(op, rank.size, index, is_float(dtype))));
            assert!(receive == expected, "{dtype} {op} {receive:?} {expected:?}");
        }
    });
}

#[test]
fn means_of_floats_multiply_before_they_sum() {
    ranks(3, false, |rank| {
        for dtype in DTYPES.filter(|dtype| is_float(*dtype)) {
            let mut buffer = own(dtype, rank.rank, COUNT);
            let in_place = buffer.as_mut_ptr();
            rank.done(rank.reduce(in_place, in_place, COUNT, dtype, 4));
            assert!(rank.synchronize(PATIENCE));
            let expected = |index| -> f64 {
                let values = (0..3).map(|rank| value(rank, index));
                match dtype {
                    6 => {
                        let share = half::f16::from_f32(1.0 / 3.0);
                        values
                            .map(|value| half::f16::from_f64(value) * share)
                            .fold(half::f16::ZERO, |a, b| a + b)
                            .into()
                    }
                    7 => values.map(|value| value as f32 * (1.0 / 3.0)).sum::<f32>().into(),
                    8 => values.map(|value| value * (1.0 / 3.0)).sum(),
                    _ => {
                        let share = half::bf16::from_f32(1.0 / 3.0);
                        let parts = values.map(|value| half::bf16::from_f64(value) * share);
                        parts.fold(half::bf16::ZERO, |a, b| a + b).into()
                    }
                }
            };
            assert!(buffer == encode(dtype, (0..COUNT).map(expected)), "{dtype}");
        }
    });
}

#[test]
fn integers_wrap_around() {
    ranks(2, true, |rank| {
        let mut buffer = vec![200u8; 3];
        let in_place = buffer.as_mut_ptr();
        rank.done(rank.reduce(in_place, in_place, 3, 1, SUM));
        assert!(rank.synchronize(PATIENCE));
        assert_eq!(buffer, [144; 3]);
    });
}

#[test]
fn broadcast_and_reduce() {
    in_all_worlds(|rank| {
        for (dtype, root) in DTYPES.flat_map(|dtype| (0..rank.size).map(move |root| (dtype, root))) {
            let (send, mut received, mut reduction) =
                (own(dtype, rank.rank, COUNT), nothing(dtype, COUNT), nothing(dtype, COUNT));
            let is_root = rank.rank == root;
            // SAFETY: the buffers live until the stream has executed the calls. They are null on ranks that do not use
            // them.
            unsafe {
                let given = if is_root { send.as_ptr().cast() } else { std::ptr::null() };
                let (to, root, comm) = (received.as_mut_ptr().cast(), root as c_int, rank.comm.get());
                rank.done(ncclBroadcast(given, to, COUNT, dtype, root, comm, rank.stream));
                let to = if is_root { reduction.as_mut_ptr().cast() } else { std::ptr::null_mut() };
                rank.done(ncclReduce(send.as_ptr().cast(), to, COUNT, dtype, SUM, root, comm, rank.stream));
            }
            assert!(rank.synchronize(PATIENCE));
            assert_eq!(received, own(dtype, root, COUNT));
            let sums = encode(dtype, (0..COUNT).map(|index| reduced(SUM, rank.size, index, false)));
            assert_eq!(reduction, if is_root { sums } else { nothing(dtype, COUNT) });
        }
    });
}

#[test]
fn all_gather_and_reduce_scatter() {
    in_all_worlds(|rank| {
        for dtype in DTYPES {
            let whole = COUNT * rank.size;
            let (part, mut all) = (own(dtype, rank.rank, COUNT), nothing(dtype, whole));
            let (parts, mut scattered) = (own(dtype, rank.rank, whole), nothing(dtype, COUNT));
            // SAFETY: the buffers live until the stream has executed the calls.
            unsafe {
                let (comm, stream) = (rank.comm.get(), rank.stream);
                let to = all.as_mut_ptr().cast();
                rank.done(ncclAllGather(part.as_ptr().cast(), to, COUNT, dtype, comm, stream));
                let to = scattered.as_mut_ptr().cast();
                rank.done(ncclReduceScatter(parts.as_ptr().cast(), to, COUNT, dtype, 2, comm, stream));
            }
            assert!(rank.synchronize(PATIENCE));
            let gathered: Vec<u8> = (0..rank.size).flat_map(|peer| own(dtype, peer, COUNT)).collect();
            assert_eq!(all, gathered);
            let mine = rank.rank * COUNT..(rank.rank + 1) * COUNT;
            assert_eq!(scattered, encode(dtype, mine.map(|index| reduced(2, rank.size, index, false))));
        }
    });
}

#[test]
fn many_elements() {
    ranks(3, false, |rank| {
        const MANY: usize = 16 << 20;
        let sums = rank.sum(&vec![rank.rank as f32; MANY]);
        assert!(sums.iter().all(|sum| *sum == 3.0));
    });
}

#[test]
fn empty_collectives_do_nothing() {
    ranks(1, false, |rank| {
        assert_eq!(rank.all_reduce(&[], &mut []), 0);
        assert_eq!(rank.settle(), 0);
    });
}
