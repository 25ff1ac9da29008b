//! Images with the zeros around them, so that what a kernel's tap sees at neighbouring outputs lies side by side.
use crate::gemm::bf16::{Unit, pair};
use half::bf16;
use std::ops::Range;

/// The window of a convolution along both axes, height and width.
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
    fn tap(&self, [y, x]: [usize; 2]) -> usize {
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
pub(super) struct Planes {
    cells: Vec<u32>,
    window: Window,
    band: Band,
}

impl Planes {
    /// Each cell is the pair of the pixels at its place in the two images that `sources` has for a plane and an image. The second
    /// lies `shift` rows below the first. Pixels of no image are zeros.
    #[inline(always)]
    pub(super) fn new<'a, U: Unit>(
        unit: U,
        window: &Window,
        band: &Band,
        planes: usize,
        sources: impl Fn(usize, usize) -> [Option<&'a [bf16]>; 2],
        shift: usize,
    ) -> Self {
        let (height, width, step) = (window.height(band.rows.len()), window.width(), window.step);
        let ([image_height, image_width], [padding_y, padding_x]) = (window.size, window.padding);
        let mut cells = vec![0; planes * band.images.len() * height * width];
        let zeros = vec![bf16::ZERO; image_width];
        // Where the rows of cells lie that a tap sees, and which rows of the two images they show.
        let pixels = |at: usize| {
            let row = (band.rows.start * step[0] + at).checked_sub(padding_y)?;
            (row < image_height).then_some(row * image_width..(row + 1) * image_width)
        };
        let rows: Vec<_> = (0..height)
            .filter(|at| at % step[0] <= window.reach[0])
            .map(|at| (at * width, [pixels(at), pixels(at + shift)]))
            .filter(|(_, pixels)| *pixels != [None, None])
            .collect();
        // Where in a row the cells of a phase lie that are not padding, and where their first pixel is.
        let phases: Vec<_> = (0..step[1].min(window.reach[1] + 1))
            .filter_map(|phase| {
                let first = padding_x.saturating_sub(phase).div_ceil(step[1]);
                let (start, end) = (phase * (width / step[1]) + first, (phase + 1) * (width / step[1]));
                let pixel = first * step[1] + phase - padding_x;
                (start < end && pixel < image_width).then_some((start..end, pixel))
            })
            .collect();
        let mut area = cells.chunks_exact_mut((height * width).max(1));
        for plane in 0..planes {
            for (image, area) in band.images.clone().zip(area.by_ref()) {
                let images = sources(plane, image);
                for (line, pixels) in &rows {
                    let row = |of: usize| match (images[of], &pixels[of]) {
                        (Some(image), Some(pixels)) => &image[pixels.clone()],
                        _ => &zeros[..],
                    };
                    let (a, b) = (row(0), row(1));
                    for (line, pixel) in phases.iter().map(|(to, pixel)| (line + to.start..line + to.end, *pixel)) {
                        let (to, a, b) = (&mut area[line], &a[pixel..], &b[pixel..]);
                        if step[1] == 1 {
                            unit.pair(a, b, to);
                            continue;
                        }
                        let pairs = a.iter().step_by(step[1]).zip(b.iter().step_by(step[1]));
                        for (to, (a, b)) in to.iter_mut().zip(pairs) {
                            *to = pair(*a, *b);
                        }
                    }
                }
            }
        }
        Self { cells, window: *window, band: band.clone() }
    }

    /// The cells of a plane of all images.
    pub(super) fn size(&self) -> usize {
        self.band.images.len() * self.window.height(self.band.rows.len()) * self.window.width()
    }

    /// Where the taps' planes start, plane by plane, for each of the taps.
    pub(super) fn starts(&self, planes: usize, taps: impl Iterator<Item = [usize; 2]> + Clone) -> Vec<usize> {
        let start = |plane: usize| plane * self.size();
        (0..planes).flat_map(|plane| taps.clone().map(move |tap| start(plane) + self.window.tap(tap))).collect()
    }

    /// The cells from one on.
    #[inline(always)]
    pub(super) fn from(&self, cell: usize) -> &[u32] {
        &self.cells[cell..]
    }

    /// As [`Window::runs`] of the band.
    pub(super) fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Run> {
        self.window.runs(&self.band, range)
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
pub(super) fn copy_runs<'a>(
    to: &mut [u32],
    (start, distance): (usize, usize),
    length: usize,
    from: impl Iterator<Item = &'a [u32]>,
) {
    /// The compiler turns copies of a known length into few instructions.
    #[inline(always)]
    fn fixed<'a, const N: usize>(to: &mut [u32], start: usize, distance: usize, from: impl Iterator<Item = &'a [u32]>) {
        for (to, from) in to.chunks_mut(distance).zip(from) {
            to[start..start + N].copy_from_slice(&from[..N]);
        }
    }
    match length {
        4 => fixed::<4>(to, start, distance, from),
        8 => fixed::<8>(to, start, distance, from),
        16 => fixed::<16>(to, start, distance, from),
        32 => fixed::<32>(to, start, distance, from),
        _ => {
            for (to, from) in to.chunks_mut(distance).zip(from) {
                to[start..start + length].copy_from_slice(&from[..length]);
            }
        }
    }
}
