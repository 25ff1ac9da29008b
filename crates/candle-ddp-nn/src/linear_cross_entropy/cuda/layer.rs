//! The linear layer: the logits, and the gradients of its arguments.
use crate::linear::cuda::forward;
use crate::linear::is_uneven;
use crate::linear::product::{factor, product, target};
use crate::linear_cross_entropy::head::Head;
use candle_core::{CudaDevice, DType, Result, Shape, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::column_sums::wide_column_sums;
use candle_ddp_tensor::copy::copy;
use candle_ddp_tensor::kernels::{
    self, Address, Factor, Grid, Kernel, Launch, Output, Product, Target, address, scaled_product,
};
use std::ops::Range;

/// Rows of logits that are no multiples of 16 bytes are padded to a multiple of so many elements.
const PADDING: usize = 64;

/// Gradients of the input, the weight and the bias in the dtype of the arithmetic. Those of the weight and of the bias have the padding.
pub(super) type Sums = [Option<Tensor>; 3];

/// A linear layer, whose weight and bias may end with rows of zeros. The logits between rows then are zeros, and so are their gradients.
pub(super) struct Layer {
    pub(super) device: CudaDevice,
    /// (rows, features)
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    pub(super) rows: usize,
    features: usize,
    pub(super) classes: usize,
    /// The number of elements in a row of logits, with its padding.
    pub(super) stride: usize,
}

impl Layer {
    pub(super) fn new(head: &Head) -> Result<Self> {
        let (rows, features, classes) = head.extents()?;
        let is_padded = is_uneven(head.x.dtype(), (head.chunk, features, classes));
        let stride = if is_padded { classes.next_multiple_of(PADDING) } else { classes };
        let of = |tensor: &Tensor| if is_padded { padded(tensor, stride) } else { Ok(tensor.detach()) };
        let (weight, bias) = (of(head.weight)?, head.bias.map(of).transpose()?);
        let device = head.x.device().as_cuda_device()?.clone();
        let x = head.x.detach().reshape((rows, features))?;
        Ok(Self { device, x, weight, bias, rows, features, classes, stride })
    }

    pub(super) fn dtype(&self) -> DType {
        self.x.dtype()
    }

    fn rows_of_x(&self, samples: &Range<usize>) -> Result<Address<'_>> {
        Ok(address(&self.x)?.skip(samples.start * self.features, self.dtype()))
    }

    /// x · Wᵀ + b, for some rows.
    pub(super) fn logits(&self, samples: Range<usize>) -> Result<Output> {
        let Self { features, stride, .. } = *self;
        let (x, count) = (self.x.narrow(0, samples.start, samples.len())?, samples.len());
        forward((count, features, stride), &x, &self.weight, self.bias.as_ref(), Shape::from((count, stride)))
    }

    /// Adds the gradients that some rows contribute.
    pub(super) fn add_gradients(
        &self,
        d_logits: &Tensor,
        samples: Range<usize>,
        needed: [bool; 3],
        [dx, d_weight, d_bias]: &mut Sums,
    ) -> Result<()> {
        let Self { ref device, features, stride, .. } = *self;
        let (dtype, wide, d) = (self.dtype(), accumulator(self.dtype()), address(d_logits)?);
        let new = |shape| Ok::<_, candle_core::Error>(Output::new(device, wide, shape)?.into_tensor());
        if needed[0] {
            let all = dx.take().map_or_else(|| new(Shape::from((self.rows, features))), Ok)?;
            let of_rows = address(dx.insert(all))?.skip(samples.start * features, wide);
            let factors = [factor(d, false), factor(address(&self.weight)?, false)];
            product(device, [samples.len(), features, stride], dtype, factors, target(of_rows, wide))?;
        }
        if needed[1] {
            let accumulate = d_weight.is_some();
            let sum = d_weight.take().map_or_else(|| new(Shape::from((stride, features))), Ok)?;
            let factors = [factor(d, true), factor(self.rows_of_x(&samples)?, false)];
            let c = Target { accumulate, ..target(address(d_weight.insert(sum))?, wide) };
            product(device, [stride, features, samples.len()], dtype, factors, c)?;
        }
        if needed[2] {
            let sums = wide_column_sums(device, d_logits, stride)?;
            *d_bias = Some(match d_bias.take() {
                Some(earlier) => (earlier + sums)?,
                None => sums,
            });
        }
        Ok(())
    }

    /// The gradients of the arguments from those of all logits, multiplied by the first of the `scalars`.
    pub(super) fn gradients(
        &self,
        d_logits: &Tensor,
        needed: &[bool],
        shapes: &[Shape],
        scalars: Address,
    ) -> Result<Vec<Option<Tensor>>> {
        let Self { ref device, rows, features, classes, stride, .. } = *self;
        let (dtype, d) = (self.dtype(), address(d_logits)?);
        let multiplied = |[m, n, k]: [usize; 3], [a, b]: [Factor; 2], shape: Shape| {
            let result = Output::new(device, dtype, shape)?;
            let c = target(result.address()?, dtype);
            scaled_product(device, Product { batch: 1, m, n, k, dtype, a, b, c }, scalars)?;
            Ok::<_, candle_core::Error>(result.into_tensor())
        };
        let mut gradients = vec![None; needed.len()];
        if needed[0] {
            let factors = [factor(d, false), factor(address(&self.weight)?, false)];
            gradients[0] = Some(multiplied([rows, features, stride], factors, shapes[0].clone())?);
        }
        if needed[1] {
            let factors = [factor(d, true), factor(address(&self.x)?, false)];
            let d_weight = multiplied([stride, features, rows], factors, Shape::from((stride, features)))?;
            gradients[1] = Some(d_weight.narrow(0, 0, classes)?);
        }
        if needed.get(2) == Some(&true) {
            let sums = wide_column_sums(device, d_logits, stride)?;
            gradients[2] = Some(scaled(device, dtype, &sums, &shapes[2], scalars)?);
        }
        Ok(gradients)
    }
}

/// The first elements of `sums`, multiplied by the first of the `scalars`.
pub(super) fn scaled(
    device: &CudaDevice,
    dtype: DType,
    sums: &Tensor,
    shape: &Shape,
    scalars: Address,
) -> Result<Tensor> {
    let (result, count) = (Output::new(device, dtype, shape.clone())?, shape.elem_count());
    let tensors = [address(sums)?, scalars, result.address()?];
    let vector = Address::vector(&[tensors[0], tensors[2]], count, dtype);
    let (kernel, grid, numbers) = (Kernel::ScaleSums, Grid::Threads(count / vector), &[count, vector]);
    kernels::launch(device, Launch { kernel, dtype, grid, tensors: &tensors, numbers, reals: &[] })?;
    Ok(result.into_tensor())
}

/// A copy of `tensor` with rows of zeros at its end, `rows` in all.
fn padded(tensor: &Tensor, rows: usize) -> Result<Tensor> {
    let (device, own) = (tensor.device().as_cuda_device()?, tensor.dim(0)?);
    let shape = [&[rows], &tensor.dims()[1..]].concat();
    let result = Output::new(device, tensor.dtype(), shape)?.into_tensor();
    copy(&result.narrow(0, 0, own)?, &tensor.detach())?;
    result.narrow(0, own, rows - own)?.zero_set()?;
    Ok(result)
}
