//! What the kernels of layers are launched with.
use super::source::{DTYPES, Kernel};
use crate::{Error, Result};
use candle_core::DType;
use std::marker::PhantomData;

/// Refuses tensors of dtypes for which there are no kernels.
pub(crate) fn supported(dtype: DType, operation: &str) -> Result<()> {
    if DTYPES.iter().any(|(known, _)| *known == dtype) {
        return Ok(());
    }
    Err(Error::UnsupportedDType { operation: operation.to_string(), dtype, supported: "f32, f64, f16, bf16" })
}

/// The address of a contiguous tensor on a GPU, which lives at least as long.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Address<'a>(pub(super) u64, PhantomData<&'a ()>);

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Address<'_> {
    /// For a kernel that does without the tensor.
    pub(crate) const NONE: Self = Self(0, PhantomData);

    pub(super) fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }

    /// The address of the element that comes so many after the first one, within the same tensor.
    pub(crate) fn skip(self, elements: usize, dtype: DType) -> Self {
        Self(self.0 + (elements * dtype.size_in_bytes()) as u64, PhantomData)
    }
}

/// How many threads a kernel needs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum Grid {
    /// At least so many, which know their number.
    Threads(usize),
    /// So many blocks of 256.
    Blocks(usize),
}

/// A launch; its kernel's `.cu` file defines the meaning of the arguments, of which there are up to 8 tensors, 20 numbers
/// and 4 real numbers.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: Kernel,
    /// The dtype of the layer's tensors.
    pub(crate) dtype: DType,
    pub(crate) grid: Grid,
    pub(crate) tensors: &'a [Address<'a>],
    pub(crate) numbers: &'a [usize],
    pub(crate) reals: &'a [f64],
}

/// The extents of a convolution over images, for cuDNN. Pairs are height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub(crate) struct ConvShape {
    pub(crate) n: usize,
    pub(crate) ci: usize,
    pub(crate) co: usize,
    pub(crate) groups: usize,
    pub(crate) input: [usize; 2],
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
}

/// The three convolutions of training: of x (n, ci, input), w (co, ci / groups, kernel) and y (n, co, output), each
/// computes one from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub(crate) enum Convolve {
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
pub(crate) struct Factor<'a> {
    pub(crate) address: Address<'a>,
    /// Whether memory has rows and columns swapped.
    pub(crate) transposed: bool,
    /// How many elements lie between the beginnings of neighbouring matrices, if these are not side by side.
    pub(crate) stride: Option<usize>,
}

/// What a product is written or added to: a batch of dense matrices in row-major order.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Target<'a> {
    pub(crate) address: Address<'a>,
    /// That of the factors, or that of their arithmetic.
    pub(crate) dtype: DType,
    pub(crate) stride: Option<usize>,
    pub(crate) accumulate: bool,
}

/// c = a · b, or c + a · b, for `batch` triples of matrices, of m × k, k × n and m × n elements.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Product<'a> {
    pub(crate) batch: usize,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The dtype of a and b.
    pub(crate) dtype: DType,
    pub(crate) a: Factor<'a>,
    pub(crate) b: Factor<'a>,
    pub(crate) c: Target<'a>,
}
