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
#[cfg(test)]
pub(crate) mod portable;
mod source;
#[cfg(target_arch = "x86_64")]
mod transposed;

use super::strides::Strides;
pub(crate) use avx512::Avx512;
use candle_ddp_tensor::parallel::Each;
use half::bf16;
use rayon::prelude::*;
pub(crate) use source::Source;
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
/// Packed factors lie in panels of lines (rows of a, columns of b): pair by pair, and the pairs of all lines side by side.
pub(crate) trait Unit: Copy + Send + Sync {
    /// The most rows of a panel of a, at most [`LANES`].
    fn rows(self) -> usize {
        ROWS
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

    /// The same, where `from` has lines side by side, and neighbours along the depth `distance` apart.
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
        a: &[u32],
        b: &[u32],
        rows: usize,
        columns: usize,
        pairs: usize,
        result: &mut [f32],
        distance: usize,
        accumulate: bool,
    );

    /// The same for any number of panels of b.
    fn multiply(self, product: Product) {
        product.by_tiles(self);
    }

    /// Writes the pairs of each element of `first` and the one of `second`, as far as all go.
    fn pair(self, first: &[bf16], second: &[bf16], to: &mut [u32]);

    /// Rounds each of `from` + `term`, as far as `to` goes.
    fn round(self, from: &[f32], term: f32, to: &mut [bf16]);
}

/// result = a · b, or result + a · b if `accumulate`, of a panel of `rows` rows, and b in panels of [`WIDTH`] columns. Rows of the
/// result are `distance` apart; only `columns` of each are touched.
pub(crate) struct Product<'a> {
    a: &'a [u32],
    rows: usize,
    b: &'a [u32],
    columns: usize,
    pairs: usize,
    result: &'a mut [f32],
    distance: usize,
    accumulate: bool,
}

impl Product<'_> {
    fn by_tiles<U: Unit>(self, unit: U) {
        let Self { a, rows, b, columns, pairs, result, distance, accumulate } = self;
        for (columns, b) in panels(b, columns, pairs) {
            unit.tile(a, b, rows, columns.len(), pairs, &mut result[columns.start..], distance, accumulate);
        }
    }
}

/// The panels of `b`, with their columns.
fn panels(b: &[u32], columns: usize, pairs: usize) -> impl Iterator<Item = (Range<usize>, &[u32])> {
    let ranges = (0..columns).step_by(WIDTH).map(move |start| start..(start + WIDTH).min(columns));
    ranges.zip(b.chunks_exact(WIDTH * pairs))
}

/// Rows of a, packed in panels.
#[derive(Default)]
pub(crate) struct PackedRows {
    panels: Vec<Range<usize>>,
    pairs: usize,
    values: Vec<u32>,
}

impl PackedRows {
    /// Makes room for other rows, and lets `pack` write each panel, which has room for [`LANES`] more.
    pub(crate) fn pack<U: Unit>(
        &mut self,
        unit: U,
        rows: usize,
        pairs: usize,
        mut pack: impl FnMut(Range<usize>, &mut [u32]),
    ) {
        // Of about equal height.
        let panels = rows.div_ceil(unit.rows());
        self.panels.clear();
        self.panels.extend((0..panels).map(|panel| panel * rows / panels..(panel + 1) * rows / panels));
        self.pairs = pairs;
        self.values.resize(rows * pairs + LANES, 0);
        for panel in &self.panels {
            pack(panel.clone(), &mut self.values[panel.start * pairs..]);
        }
    }
}

/// result = a · b, or result + a · b if `accumulate`, over the range `pairs` of a's depth, which is the whole of b's. `b` has
/// panels of [`WIDTH`] columns. Rows of the result are `distance` apart.
pub(crate) fn multiply_packed<U: Unit>(
    unit: U,
    a: &PackedRows,
    pairs: Range<usize>,
    (b, columns): (&[u32], usize),
    (result, distance): (&mut [f32], usize),
    accumulate: bool,
    threads: usize,
) {
    let panel = |(rows, result): (Range<usize>, &mut [f32])| {
        let height = rows.len();
        let a = &a.values[rows.start * a.pairs..][pairs.start * height..pairs.end * height];
        unit.multiply(Product { a, rows: height, b, columns, pairs: pairs.len(), result, distance, accumulate });
    };
    if pairs.is_empty() || columns == 0 {
        return;
    }
    if threads == 1 {
        a.panels.iter().for_each(|rows| panel((rows.clone(), &mut result[rows.start * distance..])));
        return;
    }
    let mut rest = result;
    let mut work = Vec::new();
    for rows in &a.panels {
        let size = (rows.len() * distance).min(rest.len());
        let (result, after) = std::mem::take(&mut rest).split_at_mut(size);
        work.push((rows.clone(), result));
        rest = after;
    }
    work.into_par_iter().each(panel);
}

/// Memory for packed factors.
#[derive(Default)]
pub(super) struct Packed {
    a: PackedRows,
    b: Vec<u32>,
}

/// result = a · b, or result + a · b if `accumulate`. Rows of the result are `distance` apart.
pub(super) fn multiply<U: Unit, B: Source>(
    unit: U,
    (m, n, k): (usize, usize, usize),
    result: (&mut [f32], usize),
    accumulate: bool,
    (a, a_strides): (&[bf16], Strides),
    (b, b_strides): (&[B], Strides),
    packed: &mut Packed,
) {
    let pairs = k.div_ceil(2);
    packed.b.resize(n.next_multiple_of(WIDTH) * pairs, 0);
    packed.a.pack(unit, m, pairs, |rows, to| {
        let from = &a[rows.start * a_strides.row..];
        pack(unit, from, [a_strides.row, a_strides.column], rows.len(), k, to, rows.len());
    });
    for (column, to) in (0..n).step_by(WIDTH).zip(packed.b.chunks_exact_mut(WIDTH * pairs)) {
        let from = &b[column * b_strides.column..];
        pack(unit, from, [b_strides.column, b_strides.row], WIDTH.min(n - column), k, to, WIDTH);
    }
    multiply_packed(unit, &packed.a, 0..pairs, (&packed.b, n), result, accumulate, 1);
}

/// Writes a panel of `lines` lines: `by_line` and `by_depth` are the distances in `from`.
fn pack<U: Unit, E: Source>(
    unit: U,
    from: &[E],
    [by_line, by_depth]: [usize; 2],
    lines: usize,
    depth: usize,
    to: &mut [u32],
    width: usize,
) {
    if by_line == 1 || by_depth == 1 {
        for line in (0..lines).step_by(LANES) {
            let (from, to) = (&from[line * by_line..], &mut to[line..]);
            let lines = LANES.min(lines - line);
            match by_depth {
                1 => unit.transpose(from, by_line, lines, depth, to, width),
                _ => unit.interleave(from, by_depth, lines, depth, to, width),
            }
        }
        return;
    }
    for (first, to) in (0..depth).step_by(2).zip(to.chunks_mut(width)) {
        for (line, to) in to.iter_mut().take(lines).enumerate() {
            let at = |depth: usize| from[line * by_line + depth * by_depth].rounded();
            *to = pair(at(first), if first + 1 < depth { at(first + 1) } else { bf16::ZERO });
        }
    }
}

#[cfg(test)]
mod tests;
