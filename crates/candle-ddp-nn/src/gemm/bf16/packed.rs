//! Factors in the order in which a unit reads them.
use super::{LANES, Product, Rows, Source, Unit, WIDTH, at_least, pair, panels};
use crate::gemm::strides::Strides;
use candle_ddp_tensor::parallel::Each;
use half::bf16;
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;

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
        // Pair by pair, the next panel overwrites the surplus after a panel's last pair. So it is packed after the whole panel.
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

    pub(super) fn rows(&self) -> Rows<'_> {
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
    let a = Rows { first: pairs.start, ..a.rows() };
    let is_whole = pairs.end.is_multiple_of(LANES) || 2 * pairs.end.next_multiple_of(LANES) == a.distance;
    assert!(is_whole || !unit.is_by_row());
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
pub(in crate::gemm) struct PackedColumns {
    values: Vec<u32>,
    columns: usize,
    pairs: usize,
}

impl Drop for PackedColumns {
    fn drop(&mut self) {
        SPARE.set(std::mem::take(&mut self.values));
    }
}

impl PackedColumns {
    /// Packs the columns of a matrix of `depth` rows.
    pub(in crate::gemm) fn new<U: Unit, B: Source>(
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
    pub(in crate::gemm) fn with<'a, U: Unit>(
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

/// Parts of the depth, for which all panels are packed one after the other. Where neighbours along the depth are far apart, a part has a few
/// of them, so that an element's neighbours are packed before they leave the cache.
fn parts(depth: usize, by_depth: usize) -> impl Iterator<Item = Range<usize>> {
    let size = if by_depth == 1 { depth.max(1) } else { 4 * LANES };
    (0..depth).step_by(size).map(move |start| start..(start + size).min(depth))
}
