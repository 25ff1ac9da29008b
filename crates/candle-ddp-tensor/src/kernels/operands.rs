//! The operands of kernels.
use candle_core::{DType, Shape, Storage, Tensor};

/// The numbers that an optimizer's kernel needs for one parameter. The kernel's `.cu` file defines their meaning.
pub type Scalars = [f64; 12];

/// Pads a kernel's numbers with zeros.
pub fn scalars<const N: usize>(values: [f64; N]) -> Scalars {
    const { assert!(N <= 12) };
    let mut scalars = Scalars::default();
    scalars[..N].copy_from_slice(&values);
    scalars
}

/// The optimizers that have kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `adam.cu`
    Adam,
    /// `sgd.cu`
    Sgd,
    /// `lamb.cu`
    Lamb,
}

impl Rule {
    /// Whether the kernels for parameters of `dtype` on a GPU take gradients of this dtype as they are.
    pub fn takes(self, dtype: DType, gradient: DType) -> bool {
        gradient == dtype || (self == Self::Adam && dtype == DType::F32 && matches!(gradient, DType::F16 | DType::BF16))
    }
}

/// A contiguous part of a parameter on a GPU, with its gradient, of a dtype that the rule takes, and at most two states. All have the
/// same number of elements and do not overlap.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Operands<'a> {
    pub parameter: &'a Tensor,
    pub gradient: &'a Tensor,
    pub states: &'a [Tensor],
    pub scalars: Scalars,
}

/// `destination = source × factor`, or `(destination + source) × factor`, in the arithmetic of the destination. Both
/// have the same number of elements and are on the same device; the destination is contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Assignment<'a> {
    pub destination: &'a Tensor,
    pub source: &'a Tensor,
    pub factor: f64,
    pub accumulate: bool,
}

impl<'a> Assignment<'a> {
    /// Creates `destination = source`.
    pub fn plain(destination: &'a Tensor, source: &'a Tensor) -> Self {
        Self { destination, source, factor: 1.0, accumulate: false }
    }
}

/// A norm of rows. The tensors are contiguous; weight and bias have the dtype of the arithmetic or, on a GPU, of the input.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct NormOperands<'a> {
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub eps: f64,
    /// Whether the mean is subtracted.
    pub centred: bool,
}

/// A sum, its norm, and what the norm's backward pass needs.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct AddedNorm<S> {
    pub sum: (Storage, Shape),
    pub normed: (Storage, Shape),
    pub statistics: S,
}

/// The magnitude of the elements of some tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extent {
    /// The sum of their squares.
    pub squares: f64,
    /// The largest absolute value; NaN if an element is NaN.
    pub largest: f64,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Extent {
    /// Combines two extents.
    pub fn and(self, other: Self) -> Self {
        let larger = if other.largest > self.largest || other.largest.is_nan() { other.largest } else { self.largest };
        Self { squares: self.squares + other.squares, largest: larger }
    }
}
