//! A generator of random numbers whose state can be saved.
use super::philox;
use crate::parallel::Each;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use rayon::prelude::*;
use std::f64::consts::TAU;

/// Random numbers from a seed: the same in every run, on every device, and for any number of threads.
///
/// The numbers come from Philox 4x32-10, the algorithm that PyTorch has on GPUs; they differ from PyTorch's, which
/// assigns them to elements in another way. Generators of one seed that were made for different ranks
/// ([`for_rank`](Self::for_rank)) draw from sequences that never overlap.
///
/// The state is the seed and the position in the sequence ([`offset`](Self::offset)): in candle-ddp, `StateDict` saves both. As
/// a part of a `Checkpointer` or of an elastic run, a generator of [`new`](Self::new) is the same on all ranks, and one of
/// `for_rank` is each rank's own: in a world of the same size, every rank continues where it was. In one of another size, all
/// continue from the largest offset that a rank had reached, so that no number is drawn twice.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_ddp_tensor::seed::Generator;
///
/// # fn main() -> candle_ddp_tensor::Result<()> {
/// let mut generator = Generator::new(42);
/// let noise = generator.randn(0.0, 1.0, (2, 3), DType::F32, &Device::Cpu)?;
/// let again = Generator::new(42).randn(0.0, 1.0, (2, 3), DType::F32, &Device::Cpu)?;
/// assert_eq!(noise.to_vec2::<f32>()?, again.to_vec2::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generator {
    seed: u64,
    sequence: u64,
    offset: u64,
    maker: Maker,
}

/// The purpose of a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Maker {
    /// Anything.
    Any,
    /// A rank: each rank has another sequence.
    Rank,
    /// The micro-batch of this number: each has another sequence.
    MicroBatch(usize),
}

impl Generator {
    /// A generator that draws the same numbers on every rank.
    pub fn new(seed: u64) -> Self {
        Self::with_sequence(seed, 0)
    }

    /// A generator that draws different numbers on each rank, from the same `seed`: for dropout and augmentation. `rank` is
    /// the rank in the job, `pg.rank()`. [`new`](Self::new) draws from another sequence.
    pub fn for_rank(seed: u64, rank: usize) -> Self {
        Self { maker: Maker::Rank, ..Self::with_sequence(seed, rank as u64 + 1) }
    }

    /// A generator for the augmentation of one sample of a dataset: its numbers follow from these four values alone, so
    /// they do not depend on the thread that draws them, or on earlier draws.
    pub fn for_sample(seed: u64, epoch: u64, index: usize, rank: usize) -> Self {
        Self::with_sequence(Self::seed_of_epoch(seed, epoch, rank as u64 + 1), index as u64)
    }

    /// A generator for the layers' random numbers in one micro-batch under virtual ranks: they follow from these values
    /// alone, and not from the rank. `consumed` is the number of samples of the epoch before the step, `number` the
    /// micro-batch's. candle-ddp's `MicroBatch::generator` makes it.
    pub fn for_micro_batch(seed: u64, epoch: u64, consumed: usize, number: usize) -> Self {
        // Block 0 belongs to no sample's rank; its numbers begin another sequence for each position in the epoch.
        let of_epoch = Self::seed_of_epoch(seed, epoch, 0);
        let of_step = Self::with_sequence(of_epoch, consumed as u64).next_u64();
        Self { maker: Maker::MicroBatch(number), ..Self::with_sequence(of_step, number as u64) }
    }

    fn seed_of_epoch(seed: u64, epoch: u64, block: u64) -> u64 {
        let [first, second] = Self::with_sequence(seed, epoch).draw(4).pair(block);
        first ^ second.rotate_left(32)
    }

    /// The generator of one of the 2^64 sequences of `seed`: 0 is the one of [`new`](Self::new).
    pub fn with_sequence(seed: u64, sequence: u64) -> Self {
        Self { seed, sequence, offset: 0, maker: Maker::Any }
    }

    pub(super) fn maker(&self) -> Maker {
        self.maker
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The position in the sequence, in blocks of four numbers of 32 bits; 0 at the beginning.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// A number from 0 to 2^64 - 1. It takes a whole block: tensors make better use of the sequence.
    pub fn next_u64(&mut self) -> u64 {
        self.draw(4).pair(0)[0]
    }

    /// A number that is uniform in `lo <= x < up`, or `lo` where the two are equal.
    pub fn uniform(&mut self, lo: f64, up: f64) -> f64 {
        lo + unit(self.next_u64()) * (up - lo)
    }

    /// An integer from 0 to `bound - 1`, each as likely as the others (to within `bound / 2^64`); 0 where `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A tensor of numbers that are uniform in `lo <= x < up` (after rounding to `dtype`, `up` can occur).
    ///
    /// # Errors
    /// [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) for a dtype of integers; the device's.
    pub fn rand(&mut self, lo: f64, up: f64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensor(shape.into(), dtype, device, |numbers| numbers.map(|number| lo + unit(number) * (up - lo)))
    }

    /// A tensor of normally distributed numbers with this mean and standard deviation.
    ///
    /// # Errors
    /// As with [`rand`](Self::rand).
    pub fn randn(
        &mut self,
        mean: f64,
        stdev: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.tensor(shape.into(), dtype, device, |[first, second]| {
            // Box and Muller's transform. The logarithm is of a number above 0.
            let radius = stdev * (-2. * (1. - unit(first)).ln()).sqrt();
            let (sine, cosine) = (TAU * unit(second)).sin_cos();
            [mean + radius * cosine, mean + radius * sine]
        })
    }

    /// `make` turns each block's two numbers of 64 bits into two elements.
    fn tensor(
        &mut self,
        shape: Shape,
        dtype: DType,
        device: &Device,
        make: impl Fn([u64; 2]) -> [f64; 2] + Sync,
    ) -> Result<Tensor> {
        // Computed on the CPU for every device, so that the values are the same.
        let tensor = match dtype {
            DType::F64 => Tensor::from_vec(self.elements(shape.elem_count(), |x| x, make), shape, device),
            dtype if dtype.is_float() => {
                Tensor::from_vec(self.elements(shape.elem_count(), |x| x as f32, make), shape, device)
                    .and_then(|tensor| tensor.to_dtype(dtype))
            }
            _ => {
                let reason = format!("a random tensor must have a floating-point dtype, not {}", dtype.as_str());
                return Err(Error::invalid("dtype", reason));
            }
        };
        Ok(tensor?)
    }

    fn elements<T: Copy + Default + Send>(
        &mut self,
        count: usize,
        round: impl Fn(f64) -> T + Sync,
        make: impl Fn([u64; 2]) -> [f64; 2] + Sync,
    ) -> Vec<T> {
        /// The number of elements that a thread computes at a time; a smaller tensor takes one thread.
        const PART: usize = 1 << 15;
        let draw = self.draw(count.div_ceil(2) * 4);
        let mut values = vec![T::default(); count];
        values.par_chunks_mut(PART).enumerate().each(|(part, values)| {
            let first = part * PART / 2;
            for (index, pair) in values.chunks_mut(2).enumerate() {
                for (value, made) in pair.iter_mut().zip(make(draw.pair((first + index) as u64))) {
                    *value = round(made);
                }
            }
        });
        values
    }
}

#[doc(hidden)]
impl Generator {
    /// The number of the sequence of the seed, and whether [`for_rank`](Self::for_rank) made the generator, so that each rank has another
    /// sequence.
    pub fn sequence(&self) -> (u64, bool) {
        (self.sequence, self.maker == Maker::Rank)
    }

    /// Continues in another sequence, from its block `offset`. A generator of a rank remains one.
    pub fn restore(&mut self, seed: u64, sequence: u64, offset: u64) {
        (self.seed, self.sequence, self.offset) = (seed, sequence, offset);
    }

    /// Takes the next `count` numbers of 32 bits out of the sequence, without computing them. For layers that need the same
    /// numbers once more, in a backward pass.
    pub fn draw(&mut self, count: usize) -> Draw {
        let draw = Draw { seed: self.seed, sequence: self.sequence, offset: self.offset };
        self.offset = self.offset.wrapping_add(count.div_ceil(4) as u64);
        draw
    }
}

/// A number in `0 <= x < 1` of the upper 53 bits, which an f64 holds exactly.
fn unit(number: u64) -> f64 {
    (number >> 11) as f64 * (1. / (1u64 << 53) as f64)
}

/// Numbers that were taken out of a [`Generator`]'s sequence: whoever holds a copy can compute any of them, any number of
/// times.
///
/// For a kernel: number `index` is element `index % 4` of Philox 4x32-10 with the seed as key (its low half first) and the
/// counter `[b, b >> 32, s, s >> 32]`, where `b = offset + index / 4` and `s` is the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The generator's seed.
    pub seed: u64,
    /// The generator's sequence: 0, or 1 + the rank that it was made for.
    pub sequence: u64,
    /// The block in which the numbers begin.
    pub offset: u64,
}

impl Draw {
    /// The numbers `4 * index` to `4 * index + 3`.
    #[inline]
    pub fn block(&self, index: u64) -> [u32; 4] {
        let halves = |number: u64| [number as u32, (number >> 32) as u32];
        let ([low, high], [s0, s1]) = (halves(self.offset.wrapping_add(index)), halves(self.sequence));
        philox::block(halves(self.seed), [low, high, s0, s1])
    }

    /// The same as two numbers of 64 bits.
    fn pair(&self, index: u64) -> [u64; 2] {
        let [a, b, c, d] = self.block(index);
        [[a, b], [c, d]].map(|[low, high]| u64::from(low) | u64::from(high) << 32)
    }

    /// A number that is uniform in `0 <= x < 1`, of the block `index`.
    pub fn unit(&self, index: u64) -> f64 {
        unit(self.pair(index)[0])
    }

    /// Fills `numbers`, beginning with number `first`.
    #[inline]
    pub fn fill(&self, first: usize, numbers: &mut [u32]) {
        let (mut index, mut skipped) = ((first / 4) as u64, first % 4);
        let mut rest = numbers;
        while !rest.is_empty() {
            let block = self.block(index);
            let count = rest.len().min(4 - skipped);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&block[skipped..skipped + count]);
            (rest, index, skipped) = (later, index + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests;
