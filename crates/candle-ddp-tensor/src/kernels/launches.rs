//! What the kernels of layers are launched with.
use super::source::{DTYPES, Kernel};
use crate::{Error, Result};
use candle_core::DType;
use std::marker::PhantomData;

/// Refuses tensors of dtypes for which there are no kernels.
pub fn supported(dtype: DType, operation: &str) -> Result<()> {
    if DTYPES.iter().any(|(known, _)| *known == dtype) {
        return Ok(());
    }
    Err(Error::UnsupportedDType { operation: operation.to_string(), dtype, supported: "f32, f64, f16, bf16" })
}

/// The address of a contiguous tensor on a GPU, which lives at least as long.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Address<'a>(pub(super) u64, PhantomData<&'a ()>);

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Address<'_> {
    /// For a kernel that does without the tensor.
    pub const NONE: Self = Self(0, PhantomData);

    pub(super) fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }

    /// The address of the element that comes so many after the first one, within the same tensor.
    pub fn skip(self, elements: usize, dtype: DType) -> Self {
        Self(self.0 + (elements * dtype.size_in_bytes()) as u64, PhantomData)
    }
}

/// How many threads a kernel needs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub enum Grid {
    /// At least so many, which know their number.
    Threads(usize),
    /// So many blocks of 256.
    Blocks(usize),
}

/// A launch; its kernel's `.cu` file defines the meaning of the arguments, of which there are up to 8 tensors, 20 numbers
/// and 4 real numbers.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Launch<'a> {
    pub kernel: Kernel,
    /// The dtype of the layer's tensors.
    pub dtype: DType,
    pub grid: Grid,
    pub tensors: &'a [Address<'a>],
    pub numbers: &'a [usize],
    pub reals: &'a [f64],
}

/// The extents of a convolution over images, for cuDNN. Pairs are height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub struct ConvShape {
    pub n: usize,
    pub ci: usize,
    pub co: usize,
    pub groups: usize,
    pub input: [usize; 2],
    pub output: [usize; 2],
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    pub padding: [usize; 2],
    pub dilation: [usize; 2],
}

/// The three convolutions of training: of x (n, ci, input), w (co, ci / groups, kernel) and y (n, co, output), each
/// computes one from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub enum Convolve {
    /// y
    Forward,
    /// x
    BackwardData,
    /// w
    BackwardFilter,
}

/// A batch of dense matrices in row-major order.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Factor<'a> {
    pub address: Address<'a>,
    /// Whether memory has rows and columns swapped.
    pub transposed: bool,
    /// How many elements lie between the beginnings of neighbouring matrices, if these are not side by side.
    pub stride: Option<usize>,
}

/// What a product is written or added to: a batch of dense matrices in row-major order.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Target<'a> {
    pub address: Address<'a>,
    /// That of the factors, or that of their arithmetic.
    pub dtype: DType,
    pub stride: Option<usize>,
    pub accumulate: bool,
}

/// c = a · b, or c + a · b, for `batch` triples of matrices, of m × k, k × n and m × n elements.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Product<'a> {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// The dtype of a and b.
    pub dtype: DType,
    pub a: Factor<'a>,
    pub b: Factor<'a>,
    pub c: Target<'a>,
}
