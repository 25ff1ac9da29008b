//! The operands of kernels.
use candle_core::{CudaStorage, Layout, Tensor};

/// The numbers that an optimizer's kernel needs for one parameter. The kernel's `.cu` file defines their meaning.
pub(crate) type Scalars = [f64; 12];

/// Pads a kernel's numbers with zeros.
pub(crate) fn scalars<const N: usize>(values: [f64; N]) -> Scalars {
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

/// A contiguous part of a parameter on a GPU, with its gradient of the same dtype and at most two states. All have the
/// same number of elements and do not overlap.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Operands<'a> {
    pub(crate) parameter: &'a Tensor,
    pub(crate) gradient: &'a Tensor,
    pub(crate) states: &'a [Tensor],
    pub(crate) scalars: Scalars,
}

/// `destination = source × factor`, or `(destination + source) × factor`, in the arithmetic of the destination. Both
/// have the same number of elements and are on the same device; the destination is contiguous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assignment<'a> {
    pub(crate) destination: &'a Tensor,
    pub(crate) source: &'a Tensor,
    pub(crate) factor: f64,
    pub(crate) accumulate: bool,
}

impl<'a> Assignment<'a> {
    /// Creates `destination = source`.
    pub(crate) fn plain(destination: &'a Tensor, source: &'a Tensor) -> Self {
        Self { destination, source, factor: 1.0, accumulate: false }
    }
}

/// Storages and layouts of contiguous tensors on a GPU: the input of a norm, and its weight and bias, which have the
/// dtype of the arithmetic.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct NormOperands<'a> {
    pub(crate) x: (&'a CudaStorage, &'a Layout),
    pub(crate) weight: (&'a CudaStorage, &'a Layout),
    pub(crate) bias: Option<(&'a CudaStorage, &'a Layout)>,
}

/// The magnitude of the elements of some tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Extent {
    /// The sum of their squares.
    pub(crate) squares: f64,
    /// The largest absolute value; NaN if an element is NaN.
    pub(crate) largest: f64,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Extent {
    /// Combines two extents.
    pub(crate) fn and(self, other: Self) -> Self {
        let larger = if other.largest > self.largest || other.largest.is_nan() { other.largest } else { self.largest };
        Self { squares: self.squares + other.squares, largest: larger }
    }
}
