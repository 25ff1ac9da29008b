//! The speed of processors and memory, as the ranks of a run would use them: all at the same time.
use crate::numa::cpu_set;
use candle_ddp_simd::vectorise;
use rustix::thread::sched_setaffinity;
use std::hint::black_box;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Rows and columns of the matrices. Three of them fit into a core's cache of the second level.
const SIZE: usize = 192;
/// The same for tests.
const SMALL: usize = 16;
/// The bytes of a copy: more than the caches of a core hold.
const COPIED: usize = 32 << 20;
/// How long one repetition takes at least. A core that also runs something else is taken away for some milliseconds at a time.
const REPETITION: Duration = Duration::from_millis(40);

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// Of products and copies.
    pub(super) repetitions: usize,
    /// Of messages that measure latency and bandwidth.
    pub(super) exchanges: [usize; 2],
    /// The time for each size of all-reduce.
    pub(super) collective: Duration,
    /// The most bytes of a call.
    pub(super) most_bytes: usize,
}

impl Effort {
    pub(super) const FULL: Self =
        Self { repetitions: 15, exchanges: [200, 10], collective: Duration::from_secs(1), most_bytes: usize::MAX };
    pub(super) const QUICK: Self =
        Self { repetitions: 5, exchanges: [50, 4], collective: Duration::from_millis(200), most_bytes: usize::MAX };
}

/// Cores with their GFLOP/s; without a number if there are more ranks than cores.
pub(super) type Products = Vec<(Option<usize>, f64)>;

/// The share of rank `local_rank` of `local_world_size` in these processors; none if there are more ranks than processors.
pub(super) fn share(cpus: &[usize], local_rank: usize, local_world_size: usize) -> Vec<usize> {
    let (count, ranks) = (cpus.len(), local_world_size.max(1));
    if count < ranks {
        return Vec::new();
    }
    cpus.get(local_rank * count / ranks..(local_rank + 1) * count / ranks).unwrap_or_default().to_vec()
}

/// GFLOP/s of matrix products on each of these cores at the same time, or on one that the system chooses if there are none: the
/// median of the repetitions.
pub(super) fn products(cpus: &[usize], effort: Effort) -> Products {
    let size = if effort.most_bytes < 4 * SIZE * SIZE { SMALL } else { SIZE };
    let work = move || {
        let [left, right] = [0.5_f32, 0.25].map(|value| vec![value; size * size]);
        let mut out = vec![0.0; size * size];
        let flops = 2.0 * (size * size * size) as f64;
        rate(effort.repetitions, || multiply(size, black_box(&left), black_box(&right), &mut out)) * flops / 1e9
    };
    let cpus = cpus.iter().copied().map(Some).chain(cpus.is_empty().then_some(None));
    let running: Vec<_> = cpus.map(|cpu| (cpu, on(cpu, work))).collect();
    // Where the system starts no more threads, the core counts as untested.
    running.into_iter().filter_map(|(cpu, thread)| Some((cpu, thread.ok()?.join().ok()?))).collect()
}

/// GB/s of copying memory on one core: bytes that are copied, each of which is read and written. The median of the repetitions.
pub(super) fn copy(cpu: Option<usize>, effort: Effort) -> f64 {
    let bytes = COPIED.min(effort.most_bytes);
    let work = move || {
        let (from, mut to) = (vec![1_u8; bytes], vec![0_u8; bytes]);
        rate(effort.repetitions, || black_box(&mut to).copy_from_slice(black_box(&from))) * bytes as f64 / 1e9
    };
    on(cpu, work).ok().and_then(|thread| thread.join().ok()).unwrap_or(0.0)
}

/// Starts `work` on a thread that stays on a core, or where the system chooses.
fn on(cpu: Option<usize>, work: impl FnOnce() -> f64 + Send + 'static) -> std::io::Result<JoinHandle<f64>> {
    std::thread::Builder::new().spawn(move || {
        // Where that is forbidden, the system's choice is measured.
        let _ = cpu.map(|cpu| sched_setaffinity(None, &cpu_set([cpu])));
        work()
    })
}

/// How often `work` runs in a second.
fn rate(repetitions: usize, mut work: impl FnMut()) -> f64 {
    work();
    let rates = (0..repetitions).map(|_| {
        let (begun, mut count) = (Instant::now(), 0_u32);
        loop {
            work();
            count += 1;
            let elapsed = begun.elapsed();
            if elapsed >= REPETITION {
                return f64::from(count) / elapsed.as_secs_f64();
            }
        }
    });
    median(rates.collect())
}

/// The middle one, or the larger of the two in the middle; 0 for none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// `out = left · right`, of matrices with `size` rows and columns, a multiple of 4.
fn multiply(size: usize, left: &[f32], right: &[f32], out: &mut [f32]) {
    vectorise!(move || product(size, left, right, out));
}

#[inline(always)]
fn product(size: usize, left: &[f32], right: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (out, left) in out.chunks_exact_mut(size).zip(left.chunks_exact(size)) {
        for (left, right) in left.chunks_exact(4).zip(right.chunks_exact(4 * size)) {
            let &[a, b, c, d] = left else { continue };
            let (first, rest) = right.split_at(size);
            let (second, rest) = rest.split_at(size);
            let (third, fourth) = rest.split_at(size);
            for ((((out, w), x), y), z) in out.iter_mut().zip(first).zip(second).zip(third).zip(fourth) {
                *out += a * w + b * x + c * y + d * z;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_evenly() {
        let cpus = [0, 1, 4, 5, 8];
        assert_eq!([0, 1].map(|rank| share(&cpus, rank, 2)), [vec![0, 1], vec![4, 5, 8]]);
        assert_eq!(share(&cpus, 4, 5), [8]);
        assert_eq!(share(&cpus, 0, 6), Vec::<usize>::new());
    }

    #[test]
    fn a_product_is_that_of_matrices() {
        let left: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 7) as f32).collect();
        let right: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 5) as f32).collect();
        let mut out = vec![1.0; SIZE * SIZE];
        multiply(SIZE, &left, &right, &mut out);
        let (row, column) = (17, 101);
        let expected: f32 = (0..SIZE).map(|k| left[row * SIZE + k] * right[k * SIZE + column]).sum();
        assert_eq!(out[row * SIZE + column], expected);
    }

    #[test]
    fn medians() {
        assert_eq!([vec![], vec![3.0], vec![2.0, 1.0], vec![9.0, 1.0, 2.0]].map(median), [0.0, 3.0, 2.0, 2.0]);
    }
}
