//! The arithmetic of AVX512-BF16, for tests on every processor.
use super::{LANES, Source, Unit, VECTORS, pair};
use half::bf16;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Unit for Portable {
    fn transpose<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    ) {
        place([distance, 1], from, lines, depth, to, width);
    }

    fn transpose_pairs(self, from: &[u32], distance: usize, lines: usize, pairs: usize, to: &mut [u32], width: usize) {
        for pair in 0..pairs {
            let to = &mut to[pair * width..][..LANES];
            to.fill(0);
            to.iter_mut().take(lines).enumerate().for_each(|(line, to)| *to = from[line * distance + pair]);
        }
    }

    fn interleave<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    ) {
        place([1, distance], from, lines, depth, to, width);
    }

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
    ) {
        let halves = |pair: u32| [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
        let (a, _) = a.as_chunks::<2>();
        for row in 0..rows {
            for column in 0..columns {
                let mut sum = 0f32;
                for pair in 0..pairs {
                    let (a, b) = (a[pair * rows + row].map(bf16::to_f32), halves(b[pair * LANES * VECTORS + column]));
                    // The instruction adds the second product first.
                    sum = a[0].mul_add(b[0], a[1].mul_add(b[1], sum));
                }
                let result = &mut result[row * distance + column];
                *result = if accumulate { *result + sum } else { sum };
            }
        }
    }

    fn pair(self, first: &[bf16], second: &[bf16], to: &mut [u32]) {
        for (to, (first, second)) in to.iter_mut().zip(first.iter().zip(second)) {
            *to = pair(*first, *second);
        }
    }

    fn round(self, from: &[f32], term: f32, to: &mut [bf16]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(*from + term));
    }
}

fn place<E: Source>(
    [by_line, by_depth]: [usize; 2],
    from: &[E],
    lines: usize,
    depth: usize,
    to: &mut [u32],
    width: usize,
) {
    for first in (0..depth).step_by(2) {
        let to = &mut to[first / 2 * width..][..lines.next_multiple_of(LANES)];
        to.fill(0);
        for (line, to) in to.iter_mut().enumerate().take(lines) {
            let at = |depth: usize| from[line * by_line + depth * by_depth].rounded();
            *to = pair(at(first), if first + 1 < depth { at(first + 1) } else { bf16::ZERO });
        }
    }
}
