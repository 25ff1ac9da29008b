//! Products of bf16 by the processor's instructions for pairs: `vdpbf16ps` of AVX512-BF16, which adds two products to each f32, or
//! `tdpbf16ps` of AMX-BF16, which does so for whole tiles.
//!
//! As the instructions do, this takes numbers below 1.2e-38 for zero.
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg_attr(not(target_arch = "x86_64"), path = "absent.rs")]
mod avx512;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod emulated_tiles;
mod packed;
#[cfg(test)]
pub(crate) mod portable;
mod source;
#[cfg(target_arch = "x86_64")]
mod transposed;

pub(crate) use avx512::Avx512;
use candle_ddp_tensor::vectorise;
use half::bf16;
pub(super) use packed::PackedColumns;
pub(crate) use packed::{PackedRows, multiply_packed};
pub(crate) use source::Source;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The numbers of rows, and of vectors of 16 columns, whose sums a processor holds in its registers.
const ROWS: usize = 14;
const VECTORS: usize = 2;
/// The f32 of a vector.
pub(crate) const LANES: usize = 16;
/// The columns of a panel of b.
pub(crate) const WIDTH: usize = LANES * VECTORS;

/// The pair of two numbers.
#[inline(always)]
pub(crate) fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
}

/// The instructions of a processor. A *pair* is two neighbours along the depth, the first in the lower half of a u32.
///
/// Packed columns of b lie in panels of [`WIDTH`]: pair by pair, and the pairs of all columns side by side. So do packed rows of a, in
/// panels of [`rows`](Self::rows), unless the unit takes them [row by row](Self::is_by_row).
pub(crate) trait Unit: Copy + Send + Sync {
    /// The most rows of a panel of a, at most [`WIDTH`].
    fn rows(self) -> usize {
        ROWS
    }

    /// The largest block of a product of this depth, so that what is packed stays in a core's second cache.
    fn block(self, _depth: usize) -> Block {
        Block::OF_VECTORS
    }

    /// Whether each row of a lies by itself, one pair after the other. After the last, there are zeros up to a multiple of [`LANES`] pairs.
    fn is_by_row(self) -> bool {
        false
    }

    /// Writes a panel, to[pair × width + line], from `lines` ≤ 16 lines of `depth` elements. `from` has neighbours along
    /// the depth side by side, and lines `distance` apart. 16 pairs are written at each place, so `to` must have room for
    /// them after the last, and a place's surplus is overwritten by the next.
    fn transpose<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    );

    /// The same, where `from` has `pairs` pairs in each line.
    fn transpose_pairs(self, from: &[u32], distance: usize, lines: usize, pairs: usize, to: &mut [u32], width: usize);

    /// The same for up to [`WIDTH`] lines, which lie side by side in `from`, with neighbours along the depth `distance` apart.
    fn interleave<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    );

    /// result = a · b, or result + a · b if `accumulate`, of a panel of `rows` ≤ [`ROWS`] rows and one of 1 to [`VECTORS`]
    /// vectors, whose pairs lie `LANES * VECTORS` apart. Rows of the result are `distance` apart; only `columns` of each
    /// are touched.
    #[expect(clippy::too_many_arguments)]
    fn tile(
        self,
        a: &[bf16],
        b: &[u32],
        rows: usize,
        columns: usize,
        pairs: usize,
        result: &mut [f32],
        distance: usize,
        accumulate: bool,
    );

    /// The same for any number of panels of both.
    fn multiply(self, product: Product, result: (&mut [f32], usize), accumulate: bool) {
        product.by_tiles(self, result, accumulate);
    }

    /// Writes a · b + bias, rounded once, to all columns. Rows of `to` are `distance` apart.
    fn multiply_rounded(self, product: Product, to: (&mut [MaybeUninit<bf16>], usize), bias: Option<&[bf16]>) {
        product.rounded(self, to, bias);
    }

    /// Writes the pairs of each element of `first` and the one of `second`, as far as all go.
    fn pair(self, first: &[bf16], second: &[bf16], to: &mut [u32]);

    /// Rounds each of `from` + `term`, as far as `to` goes.
    fn round(self, from: &[f32], term: f32, to: &mut [bf16]);
}

/// The extents of a block of a product.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

impl Block {
    const OF_VECTORS: Self = Self { rows: 24 * ROWS, columns: 12 * WIDTH, depth: 512 };
}

/// Rounds each of `sums` plus its column's bias.
pub(super) fn round(to: &mut [MaybeUninit<bf16>], sums: &[f32], bias: Option<&[bf16]>) {
    vectorise!(|| {
        match bias {
            None => to.iter_mut().zip(sums).for_each(|(to, sum)| *to = MaybeUninit::new(bf16::from_f32(*sum))),
            Some(bias) => {
                for ((to, sum), bias) in to.iter_mut().zip(sums).zip(bias) {
                    *to = MaybeUninit::new(bf16::from_f32(*sum + bias.to_f32()));
                }
            }
        }
    });
}

/// Rows of a, packed or, for a unit that takes them row by row, as they are.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    values: &'a [bf16],
    /// From one row to the next, and from one panel to the one that many rows later.
    distance: usize,
    count: usize,
    /// The first pair of a product.
    first: usize,
    /// Whether they have not been packed, and so may be far from the processor.
    is_in_place: bool,
}

/// Panels of about equal height up to `most`.
fn panels(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let panels = rows.div_ceil(most);
    (0..panels).map(move |panel| panel * rows / panels..(panel + 1) * rows / panels)
}

/// A product of rows with columns in panels of [`WIDTH`].
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    a: Rows<'a>,
    b: &'a [u32],
    /// From one panel of b to the next.
    distance: usize,
    columns: usize,
    pairs: usize,
}

impl<'a> Product<'a> {
    fn by_tiles<U: Unit>(self, unit: U, (result, distance): (&mut [f32], usize), accumulate: bool) {
        let Self { a, pairs, .. } = self;
        for rows in panels(a.count, unit.rows()) {
            let (values, height) = (&a.values[rows.start * a.distance..], rows.len());
            let (values, result) = (&values[2 * a.first * height..], &mut result[rows.start * distance..]);
            for (columns, b) in self.panels() {
                let result = &mut result[columns.start..];
                unit.tile(values, b, height, columns.len(), pairs, result, distance, accumulate);
            }
        }
    }

    fn rounded<U: Unit>(self, unit: U, (to, distance): (&mut [MaybeUninit<bf16>], usize), bias: Option<&[bf16]>) {
        let mut sums = vec![0.0; self.a.count * self.columns];
        unit.multiply(self, (&mut sums, self.columns), false);
        for (to, sums) in to.chunks_mut(distance).zip(sums.chunks_exact(self.columns)) {
            round(&mut to[..self.columns], sums, bias);
        }
    }

    /// The panels of `b`, with their columns.
    fn panels(self) -> impl Iterator<Item = (Range<usize>, &'a [u32])> {
        let ranges = (0..self.columns).step_by(WIDTH).map(move |start| start..(start + WIDTH).min(self.columns));
        ranges.zip(self.b.chunks(self.distance))
    }
}

/// At least the first `size` elements. What follows them keeps its memory.
pub(super) fn at_least<T: Copy + Default>(values: &mut Vec<T>, size: usize) -> &mut [T] {
    if values.len() < size {
        values.resize(size, T::default());
    }
    &mut values[..size]
}

#[cfg(test)]
mod tests;
