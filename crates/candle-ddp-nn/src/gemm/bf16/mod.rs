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
use candle_ddp_tensor::vectorise;
use half::bf16;
use rayon::prelude::*;
pub(crate) use source::Source;
use std::cell::Cell;
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

    /// Writes a · b + bias, rounded once, to all columns. Rows of `to` are `distance` apart. `sums` is memory.
    fn multiply_rounded(
        self,
        product: Product,
        (to, distance): (&mut [MaybeUninit<bf16>], usize),
        bias: Option<&[bf16]>,
        sums: &mut Vec<f32>,
    ) {
        product.rounded_by_tiles(self, (to, distance), bias, sums);
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

fn round(to: &mut [MaybeUninit<bf16>], sums: &[f32], bias: Option<&[bf16]>) {
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

/// Parts of the depth, for which all panels are packed one after the other. Where neighbours along the depth are far apart, a part has a few
/// of them, so that what lies beside an element is packed before it leaves the cache.
fn parts(depth: usize, by_depth: usize) -> impl Iterator<Item = Range<usize>> {
    let size = if by_depth == 1 { depth.max(1) } else { 4 * LANES };
    (0..depth).step_by(size).map(move |start| start..(start + size).min(depth))
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

    fn rounded_by_tiles<U: Unit>(
        self,
        unit: U,
        (to, distance): (&mut [MaybeUninit<bf16>], usize),
        bias: Option<&[bf16]>,
        sums: &mut Vec<f32>,
    ) {
        let Self { a, columns, pairs, .. } = self;
        let sums = at_least(sums, a.count * columns);
        let step = Block::OF_VECTORS.depth / 2;
        for start in (0..pairs).step_by(step) {
            self.part(start..(start + step).min(pairs)).by_tiles(unit, (sums, columns), start > 0);
        }
        for (to, sums) in to.chunks_mut(distance).zip(sums.chunks_exact(columns)) {
            round(&mut to[..columns], sums, bias);
        }
    }

    /// The panels of `b`, with their columns.
    fn panels(self) -> impl Iterator<Item = (Range<usize>, &'a [u32])> {
        let ranges = (0..self.columns).step_by(WIDTH).map(move |start| start..(start + WIDTH).min(self.columns));
        ranges.zip(self.b.chunks(self.distance))
    }

    /// A part of the depth.
    fn part(self, pairs: Range<usize>) -> Self {
        let a = Rows { first: self.a.first + pairs.start, ..self.a };
        Self { a, b: &self.b[WIDTH * pairs.start..], pairs: pairs.len(), ..self }
    }
}

/// Rows of a, packed.
#[derive(Default)]
pub(crate) struct PackedRows {
    count: usize,
    /// From one row to the next.
    distance: usize,
    values: Vec<u32>,
    /// A panel, or a block of one.
    lines: Vec<u32>,
}

impl PackedRows {
    /// Packs other rows: `write` writes the pairs of each row of a panel, whose rows are as far apart as the last argument says.
    pub(crate) fn pack_pairs<U: Unit>(
        &mut self,
        unit: U,
        rows: usize,
        pairs: usize,
        mut write: impl FnMut(Range<usize>, &mut [u32], usize),
    ) {
        self.resize(unit, rows, pairs);
        let Self { distance, ref mut values, ref mut lines, .. } = *self;
        for panel in panels(rows, unit.rows()).filter(|_| pairs > 0) {
            let (height, to) = (panel.len(), &mut values[panel.start * distance..]);
            if unit.is_by_row() {
                to.chunks_exact_mut(distance).take(height).for_each(|line| line[pairs..].fill(0));
                write(panel, &mut to[..height * distance], distance);
            } else {
                let lines = at_least(lines, height * pairs);
                write(panel, lines, pairs);
                unit.transpose_pairs(lines, pairs, height, pairs, to, height);
            }
        }
    }

    /// Packs the rows of a matrix of `depth` columns.
    fn pack<U: Unit>(&mut self, unit: U, rows: usize, depth: usize, (from, strides): (&[bf16], Strides)) {
        self.resize(unit, rows, depth.div_ceil(2));
        let Self { distance, ref mut values, ref mut lines, .. } = *self;
        let distances = [strides.row, strides.column];
        // Pair by pair, what is written after a panel's last pair is overwritten by the next panel, which so is packed after all of it.
        for part in parts(depth, if unit.is_by_row() { strides.column } else { 1 }) {
            let from = &from[part.start * strides.column..];
            for panel in panels(rows, unit.rows()) {
                let (height, to) = (panel.len(), &mut values[panel.start * distance..]);
                let from = &from[panel.start * strides.row..];
                if !unit.is_by_row() {
                    pack(unit, from, distances, height, depth, to, height);
                } else if strides.column == 1 {
                    for (row, to) in to.chunks_exact_mut(distance).take(height).enumerate() {
                        let to = bytemuck::cast_slice_mut::<_, bf16>(to);
                        to[..depth].copy_from_slice(&from[row * strides.row..][..depth]);
                        to[depth..].fill(bf16::ZERO);
                    }
                } else {
                    let lines = at_least(lines, WIDTH * LANES);
                    for start in part.clone().step_by(2 * LANES) {
                        let (first, count) = (start - part.start, (part.end - start).min(2 * LANES));
                        pack(unit, &from[first * strides.column..], distances, height, count, lines, WIDTH);
                        lines[WIDTH * count.div_ceil(2)..].fill(0);
                        unit.transpose_pairs(lines, WIDTH, LANES, height, &mut to[start / 2..], distance);
                    }
                }
            }
        }
    }

    /// Makes room for other rows.
    fn resize<U: Unit>(&mut self, unit: U, rows: usize, pairs: usize) {
        self.count = rows;
        self.distance = if unit.is_by_row() { pairs.next_multiple_of(LANES) } else { pairs };
        at_least(&mut self.values, rows * self.distance + LANES);
    }

    fn rows(&self) -> Rows<'_> {
        let values = bytemuck::cast_slice(&self.values);
        Rows { values, distance: 2 * self.distance, count: self.count, first: 0, is_in_place: false }
    }
}

/// result = a · b, or result + a · b if `accumulate`, over the range `pairs` of a's depth, which is the whole of b's. `b` has
/// panels of [`WIDTH`] columns. Rows of the result are `distance` apart. The range starts at a multiple of [`LANES`], and ends at one or
/// with the rows.
pub(crate) fn multiply_packed<U: Unit>(
    unit: U,
    a: &PackedRows,
    pairs: Range<usize>,
    (b, columns): (&[u32], usize),
    (result, distance): (&mut [f32], usize),
    accumulate: bool,
    threads: usize,
) {
    if pairs.is_empty() || columns == 0 {
        return;
    }
    // Row by row, zeros follow the last pair.
    assert!(!unit.is_by_row() || pairs.end.is_multiple_of(LANES) || pairs.end.next_multiple_of(LANES) == a.distance);
    let a = Rows { first: pairs.start, ..a.rows() };
    let product = Product { a, b, distance: WIDTH * pairs.len(), columns, pairs: pairs.len() };
    if threads == 1 {
        return unit.multiply(product, (result, distance), accumulate);
    }
    let mut rest = result;
    let mut work = Vec::new();
    for rows in panels(a.count, unit.rows()) {
        let size = (rows.len() * distance).min(rest.len());
        let (result, after) = std::mem::take(&mut rest).split_at_mut(size);
        let a = Rows { values: &a.values[rows.start * a.distance..], count: rows.len(), ..a };
        work.push((Product { a, ..product }, result));
        rest = after;
    }
    work.into_par_iter().each(|(product, result)| unit.multiply(product, (result, distance), accumulate));
}

thread_local! {
    /// The memory of this thread's last packed columns: new memory takes about as long as packing.
    static SPARE: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
}

/// Columns of b, packed.
pub(super) struct PackedColumns {
    values: Vec<u32>,
    columns: usize,
    pairs: usize,
}

impl Drop for PackedColumns {
    fn drop(&mut self) {
        SPARE.set(std::mem::take(&mut self.values));
    }
}

/// At least the first `size` elements. What follows them keeps its memory.
fn at_least<T: Copy + Default>(values: &mut Vec<T>, size: usize) -> &mut [T] {
    if values.len() < size {
        values.resize(size, T::default());
    }
    &mut values[..size]
}

impl PackedColumns {
    /// Packs the columns of a matrix of `depth` rows.
    pub(super) fn new<U: Unit, B: Source>(
        unit: U,
        (depth, columns): (usize, usize),
        (from, strides): (&[B], Strides),
        threads: usize,
    ) -> Self {
        let pairs = depth.div_ceil(2);
        let mut values = SPARE.take();
        let to = at_least(&mut values, columns.next_multiple_of(WIDTH) * pairs);
        // Each thread packs its own panels.
        let count = columns.div_ceil(WIDTH).div_ceil(threads).max(1);
        let write = |(job, to): (usize, &mut [u32])| {
            for part in parts(depth, strides.row) {
                for (panel, to) in to.chunks_exact_mut(WIDTH * pairs).enumerate() {
                    let column = (job * count + panel) * WIDTH;
                    let from = &from[column * strides.column + part.start * strides.row..];
                    let (lines, to) = (WIDTH.min(columns - column), &mut to[part.start / 2 * WIDTH..]);
                    pack(unit, from, [strides.column, strides.row], lines, part.len(), to, WIDTH);
                }
            }
        };
        if threads > 1 {
            to.par_chunks_mut(count * WIDTH * pairs).enumerate().each(write);
        } else {
            to.chunks_mut(count * WIDTH * pairs).enumerate().for_each(write);
        }
        Self { values, columns, pairs }
    }

    /// The product with rows of a matrix, which `memory` has room for if they must be packed.
    pub(super) fn with<'a, U: Unit>(
        &'a self,
        unit: U,
        memory: &'a mut PackedRows,
        (rows, depth): (usize, usize),
        (from, strides): (&'a [bf16], Strides),
    ) -> Product<'a> {
        let a = if unit.is_by_row() && strides.column == 1 && depth.is_multiple_of(2 * LANES) {
            Rows { values: from, distance: strides.row, count: rows, first: 0, is_in_place: true }
        } else {
            memory.pack(unit, rows, depth, (from, strides));
            memory.rows()
        };
        Product { a, b: &self.values, distance: WIDTH * self.pairs, columns: self.columns, pairs: self.pairs }
    }
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
    if by_depth == 1 {
        for line in (0..lines).step_by(LANES) {
            let (from, to) = (&from[line * by_line..], &mut to[line..]);
            unit.transpose(from, by_line, LANES.min(lines - line), depth, to, width);
        }
        return;
    }
    if by_line == 1 {
        return unit.interleave(from, by_depth, lines, depth, to, width);
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
