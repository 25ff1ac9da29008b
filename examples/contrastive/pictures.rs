//! Pictures of discs, squares and crosses, and what a caption says of them.
use candle_core::{DType, Device, Result, Tensor};
use candle_ddp::seed::Generator;

/// The height and width.
pub(crate) const SIZE: usize = 12;
/// The words of a caption: a shape, a radius, a row and a column.
pub(crate) const WORDS: usize = 4;
/// The number of values of each word.
pub(crate) const VALUES: usize = 3;

pub(crate) struct Pictures {
    pub(crate) dtype: DType,
    pub(crate) device: Device,
}

/// The words for a picture. They follow from its number.
fn content(number: usize) -> [usize; WORDS] {
    let mut generator = Generator::with_sequence(1, number as u64);
    std::array::from_fn(|_| generator.below(VALUES as u64) as usize)
}

impl Pictures {
    /// Views of `count` pictures from number `first` on, (count, 1, 12, 12). Each view of a picture has its own place within a pixel,
    /// brightness and noise.
    pub(crate) fn views(&self, first: usize, count: usize, view: u64) -> Result<Tensor> {
        let mut pixels = Vec::with_capacity(count * SIZE * SIZE);
        for number in first..first + count {
            let [shape, radius, row, column] = content(number);
            let mut generator = Generator::with_sequence(2 + view, number as u64);
            let (dy, dx) = (generator.uniform(-0.7, 0.7), generator.uniform(-0.7, 0.7));
            let brightness = generator.uniform(0.6, 1.4);
            let (y0, x0) = (3.0 + 2.5 * row as f64 + dy, 3.0 + 2.5 * column as f64 + dx);
            let radius = 1.2 + radius as f64;
            for pixel in 0..SIZE * SIZE {
                let (y, x) = ((pixel / SIZE) as f64 - y0, (pixel % SIZE) as f64 - x0);
                let is_inside = match shape {
                    0 => y.hypot(x) <= radius,
                    1 => y.abs().max(x.abs()) <= radius,
                    _ => y.abs().min(x.abs()) <= 0.6 && y.abs().max(x.abs()) <= radius + 1.0,
                };
                pixels.push(f64::from(u8::from(is_inside)) * brightness + generator.uniform(-0.3, 0.3));
            }
        }
        Tensor::from_vec(pixels, (count, 1, SIZE, SIZE), &self.device)?.to_dtype(self.dtype)
    }

    /// The captions of `count` pictures, u32 (count, 4): each word has its own numbers.
    pub(crate) fn captions(&self, first: usize, count: usize) -> Result<Tensor> {
        let words = |number| content(number).into_iter().enumerate();
        let words = (first..first + count).flat_map(words).map(|(place, value)| (place * VALUES + value) as u32);
        Tensor::from_vec(words.collect::<Vec<_>>(), (count, WORDS), &self.device)
    }
}
