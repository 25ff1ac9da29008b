//! Images with the zeros around them, so that what a kernel's tap sees at neighbouring outputs lies side by side.
use half::bf16;
use std::ops::Range;

/// What a convolution reads along both axes: height and width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// The images' size.
    pub(super) size: [usize; 2],
    /// The zeros before them.
    pub(super) padding: [usize; 2],
    /// The distance from what one output sees to what the next one sees.
    pub(super) step: [usize; 2],
    /// The largest offset of a tap.
    pub(super) reach: [usize; 2],
    /// The number of outputs.
    pub(super) outputs: [usize; 2],
}

/// Some rows of outputs of some images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Band {
    pub(super) images: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl Band {
    /// The outputs of all its images, numbered row by row.
    pub(super) fn outputs(&self, window: &Window) -> usize {
        self.images.len() * self.rows.len() * window.outputs[1]
    }
}

/// Where neighbouring outputs lie: their number in a band, how many they are, and the image, row and column of the first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) image: usize,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl Window {
    /// The bands of `images` images, each of which has about `limit` cells with all its planes, or one row of outputs.
    pub(super) fn bands(&self, images: usize, planes: usize, limit: usize) -> Vec<Band> {
        let height = self.outputs[0];
        let cells = planes.max(1) * self.height(height) * self.width();
        if cells <= limit {
            let step = (limit / cells.max(1)).max(1);
            let bands = (0..images).step_by(step);
            return bands.map(|start| Band { images: start..(start + step).min(images), rows: 0..height }).collect();
        }
        let rows = (limit / (planes.max(1) * self.width() * self.step[0])).saturating_sub(self.reach[0]).max(1);
        let step = height.div_ceil(height.div_ceil(rows).max(1)).max(1);
        let of_image = |image: usize| {
            let bands = (0..height).step_by(step);
            bands.map(move |start| Band { images: image..image + 1, rows: start..(start + step).min(height) })
        };
        (0..images).flat_map(of_image).collect()
    }

    /// The rows that `outputs` rows of outputs see.
    fn height(&self, outputs: usize) -> usize {
        outputs.saturating_sub(1) * self.step[0] + self.reach[0] + 1
    }

    /// The cells of a row, in which every `step`-th neighbour lies side by side.
    fn width(&self) -> usize {
        ((self.outputs[1].max(1) - 1) * self.step[1] + self.reach[1] + 1).next_multiple_of(self.step[1])
    }

    /// The distance in cells from what an output sees to what it sees by a tap with this offset.
    pub(super) fn tap(&self, [y, x]: [usize; 2]) -> usize {
        let step = self.step[1];
        y * self.width() + x % step * (self.width() / step) + x / step
    }

    /// The outputs in `range` of a band, in runs within one row.
    pub(super) fn runs(&self, band: &Band, range: Range<usize>) -> impl Iterator<Item = Run> {
        let (width, rows) = (self.outputs[1], band.rows.clone());
        let first_image = band.images.start;
        let mut start = range.start;
        std::iter::from_fn(move || {
            if start >= range.end {
                return None;
            }
            let (line, column) = (start / width, start % width);
            let length = (width - column).min(range.end - start);
            let (image, row) = (first_image + line / rows.len(), rows.start + line % rows.len());
            let run = Run { start, length, image, row, column };
            start += length;
            Some(run)
        })
    }
}

/// The planes of a band, image by image, with the zeros around them.
pub(super) struct Planes<E> {
    cells: Vec<E>,
    window: Window,
    band: Band,
}

impl<E: Copy + Default> Planes<E> {
    /// Each cell is made from two pixels, those at its place in the two images that `sources` has for a plane and an image.
    #[inline(always)]
    pub(super) fn new<'a>(
        window: &Window,
        band: &Band,
        planes: usize,
        sources: impl Fn(usize, usize) -> [&'a [bf16]; 2],
        cell: impl Fn(bf16, bf16) -> E + Copy,
    ) -> Self {
        let (height, width, step) = (window.height(band.rows.len()), window.width(), window.step);
        let [padding_y, padding_x] = window.padding;
        let mut cells = vec![E::default(); planes * band.images.len() * height * width];
        let mut lines = cells.chunks_exact_mut(width);
        for plane in 0..planes {
            for image in band.images.clone() {
                let sources = sources(plane, image);
                for (at, line) in (0..).zip(lines.by_ref().take(height)) {
                    let row =
                        (band.rows.start * step[0] + at).checked_sub(padding_y).filter(|row| *row < window.size[0]);
                    // No tap sees the others of these rows.
                    let Some(row) = row.filter(|_| at % step[0] <= window.reach[0]) else { continue };
                    let rows = sources.map(|source| &source[row * window.size[1]..][..window.size[1]]);
                    for (phase, line) in line.chunks_exact_mut(width / step[1]).enumerate().take(window.reach[1] + 1) {
                        // The first cell of this phase that is not padding, and where its pixel is.
                        let first = padding_x.saturating_sub(phase).div_ceil(step[1]);
                        let line = line.get_mut(first..).unwrap_or_default();
                        let [a, b] = rows.map(|row| row.get(first * step[1] + phase - padding_x..).unwrap_or_default());
                        match step[1] {
                            1 => line.iter_mut().zip(a.iter().zip(b)).for_each(|(to, (a, b))| *to = cell(*a, *b)),
                            2 => {
                                // Loops over pairs become vectors.
                                let pairs = a.chunks_exact(2).zip(b.chunks_exact(2));
                                line.iter_mut().zip(pairs).for_each(|(to, (a, b))| *to = cell(a[0], b[0]));
                                if let (Some(to), [a], [b]) = (
                                    line.get_mut(a.len() / 2),
                                    a.chunks_exact(2).remainder(),
                                    b.chunks_exact(2).remainder(),
                                ) {
                                    *to = cell(*a, *b);
                                }
                            }
                            step => {
                                let pairs = a.iter().step_by(step).zip(b.iter().step_by(step));
                                line.iter_mut().zip(pairs).for_each(|(to, (a, b))| *to = cell(*a, *b));
                            }
                        }
                    }
                }
            }
        }
        Self { cells, window: *window, band: band.clone() }
    }

    /// The cells of a plane of all images.
    fn size(&self) -> usize {
        self.band.images.len() * self.window.height(self.band.rows.len()) * self.window.width()
    }

    /// Where the taps' planes start, plane by plane, for each of the taps.
    pub(super) fn starts(&self, planes: usize, taps: impl Iterator<Item = [usize; 2]> + Clone) -> Vec<usize> {
        let start = |plane: usize| plane * self.size();
        (0..planes).flat_map(|plane| taps.clone().map(move |tap| start(plane) + self.window.tap(tap))).collect()
    }

    /// The cells from one on.
    #[inline(always)]
    pub(super) fn from(&self, cell: usize) -> &[E] {
        &self.cells[cell..]
    }

    /// Where in a plane the first of a run's outputs sees the tap without offset.
    pub(super) fn start(&self, run: &Run) -> usize {
        let height = self.window.height(self.band.rows.len());
        let row =
            (run.image - self.band.images.start) * height + (run.row - self.band.rows.start) * self.window.step[0];
        row * self.window.width() + run.column
    }
}

/// Copies `lines` runs of `length` cells, the n-th from `from(n)` to n × `distance` + `start`.
#[inline(always)]
pub(super) fn copy_runs<'a, E: Copy + 'a>(
    to: &mut [E],
    (start, distance): (usize, usize),
    length: usize,
    from: impl Iterator<Item = &'a [E]>,
) {
    /// The compiler turns copies of a known length into few instructions.
    #[inline(always)]
    fn fixed<'a, E: Copy + 'a, const N: usize>(
        to: &mut [E],
        start: usize,
        distance: usize,
        from: impl Iterator<Item = &'a [E]>,
    ) {
        for (to, from) in to.chunks_mut(distance).zip(from) {
            to[start..start + N].copy_from_slice(&from[..N]);
        }
    }
    match length {
        4 => fixed::<E, 4>(to, start, distance, from),
        8 => fixed::<E, 8>(to, start, distance, from),
        16 => fixed::<E, 16>(to, start, distance, from),
        32 => fixed::<E, 32>(to, start, distance, from),
        _ => {
            for (to, from) in to.chunks_mut(distance).zip(from) {
                to[start..start + length].copy_from_slice(&from[..length]);
            }
        }
    }
}
