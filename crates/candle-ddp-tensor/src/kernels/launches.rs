//! The arguments with which the kernels of layers are launched.
use super::source::{DTYPES, Kernel};
use crate::{Error, MemoryFormat, Result};
use candle_core::DType;
use std::marker::PhantomData;

/// The number of threads in a block.
pub const THREADS: u32 = 256;

/// The threads of a warp.
const WARP: usize = 32;
/// The largest number of vectors of a row that a thread keeps in registers: `HELD` of rows.cu.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) const LOADS: usize = 4;

/// The number of columns, or of vectors of them, that a block sums, as in rows.cu.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub const COLUMNS: usize = 32;

/// The number of threads that share a row of `size` elements, if each loads `vector` at once: as few warps as keep the whole row in registers, at
/// most a block.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub fn lanes(size: usize, vector: usize) -> usize {
    size.div_ceil(vector * LOADS).next_power_of_two().clamp(WARP, THREADS as usize)
}

/// The number of blocks for so many rows.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub fn blocks_of_rows(rows: usize, lanes: usize) -> usize {
    rows.div_ceil(THREADS as usize / lanes)
}

/// Refuses tensors of dtypes for which there are no kernels.
pub fn supported(dtype: DType, operation: &str) -> Result<()> {
    if DTYPES.iter().any(|(known, _)| *known == dtype) {
        return Ok(());
    }
    Err(Error::UnsupportedDType { operation: operation.to_string(), dtype, supported: "f32, f64, f16, bf16" })
}

/// The number by which kernels know a dtype.
pub fn dtype_number(dtype: DType, operation: &str) -> Result<usize> {
    supported(dtype, operation)?;
    Ok(DTYPES.iter().position(|(known, _)| *known == dtype).unwrap_or_default())
}

/// The address of a contiguous tensor on a GPU, which lives at least as long.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Address<'a>(pub(super) u64, PhantomData<&'a ()>);

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Address<'_> {
    /// The address of a tensor that the kernel does not need.
    pub const NONE: Self = Self(0, PhantomData);

    pub(super) fn new(address: u64) -> Self {
        Self(address, PhantomData)
    }

    /// How many elements of `dtype` a thread loads at once from tensors that begin here, in rows of `row` elements: as many as 16
    /// bytes hold, or 1 if a row could not be loaded so.
    pub fn vector(addresses: &[Self], row: usize, dtype: DType) -> usize {
        let elements = 16 / dtype.size_in_bytes().max(1);
        let fits = row.is_multiple_of(elements) && addresses.iter().all(|address| address.is_aligned());
        if fits { elements } else { 1 }
    }

    /// Whether a thread may load 16 bytes at once from here, as cuDNN's kernels do.
    pub fn is_aligned(self) -> bool {
        self.0.is_multiple_of(16)
    }

    /// The address of the element with this index, in the same tensor.
    pub fn skip(self, elements: usize, dtype: DType) -> Self {
        Self(self.0 + (elements * dtype.size_in_bytes()) as u64, PhantomData)
    }
}

/// The number of threads that a kernel needs.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub enum Grid {
    /// At least this many, which know their number.
    Threads(usize),
    /// This many blocks of [`THREADS`].
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

/// `layer.cu`'s `Arguments`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) struct Arguments {
    tensors: [u64; 8],
    numbers: [u64; 20],
    reals: [f64; 4],
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Arguments {
    pub(super) fn new(tensors: impl ExactSizeIterator<Item = u64>, numbers: &[usize], reals: &[f64]) -> Result<Self> {
        Ok(Self {
            tensors: padded(tensors)?,
            numbers: padded(numbers.iter().map(|number| *number as u64))?,
            reals: padded(reals.iter().copied())?,
        })
    }
}

// SAFETY: numbers without padding, laid out as the kernels expect them.
#[cfg(feature = "cuda")]
unsafe impl cudarc::driver::DeviceRepr for Arguments {}

/// Fills the beginning of an array.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
fn padded<T: Copy + Default, const N: usize>(values: impl ExactSizeIterator<Item = T>) -> Result<[T; N]> {
    if values.len() > N {
        return Err(Error::invalid(
            "arguments of a kernel",
            format!("there must be at most {N}, not {}", values.len()),
        ));
    }
    let mut array = [T::default(); N];
    array.iter_mut().zip(values).for_each(|(to, value)| *to = value);
    Ok(array)
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
    /// The format of images and weights.
    pub format: MemoryFormat,
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

/// The extents of attention, for cuDNN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub struct AttendShape {
    pub batch: usize,
    /// The number of heads of queries.
    pub heads: usize,
    /// The number of heads of keys and values: `heads` is a multiple of it.
    pub key_heads: usize,
    pub queries: usize,
    pub keys: usize,
    /// The length of queries and keys.
    pub size: usize,
    /// The length of values.
    pub value_size: usize,
    /// Whether query i sees only the keys up to i.
    pub is_causal: bool,
    /// How many heads of a token are side by side, of which `heads` may be some: queries, keys and values in one tensor (batch, tokens,
    /// 3 × heads × size), and results in one (batch, tokens, heads × size). None: a tensor is (batch, heads, tokens, size).
    pub side_by_side: Option<usize>,
}

/// The tensors of attention.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cudnn"), allow(dead_code))]
pub struct AttendTensors<'a> {
    pub qkv: [Address<'a>; 3],
    /// The result.
    pub y: Address<'a>,
    /// The logarithm of the sum of e^score of each query, in f32: (batch, heads, queries).
    pub normalisers: Address<'a>,
    /// For the backward pass, which reads all of the above: the gradient of the result, and the results here, the gradients of
    /// queries, keys and values.
    pub backward: Option<(Address<'a>, [Address<'a>; 3])>,
}

/// A batch of matrices in row-major order.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Factor<'a> {
    pub address: Address<'a>,
    /// Whether rows and columns are swapped in memory.
    pub transposed: bool,
    /// The number of elements from the beginning of one matrix to the next, if the matrices are not adjacent.
    pub stride: Option<usize>,
    /// The number of elements from the beginning of one row in memory to the next, if the rows are not adjacent.
    pub row: Option<usize>,
}

/// The destination of a product: a batch of matrices in row-major order.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Target<'a> {
    pub address: Address<'a>,
    /// The dtype of the factors, or the one of their arithmetic.
    pub dtype: DType,
    pub stride: Option<usize>,
    pub row: Option<usize>,
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

/// The additions to a product c = a · b, in the dtype of c.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub enum Epilogue<'a> {
    /// These n numbers are added to every row of c.
    Bias(Address<'a>),
    /// The sums of the m rows of a are written here.
    RowSums(Address<'a>),
}
