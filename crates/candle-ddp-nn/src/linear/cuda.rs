//! Linear layers on CUDA. cuBLASLt adds the bias and sums its gradient within products; where it does not, cuBLAS adds products to the
//! bias, and a kernel sums.
use super::product::{Extents, factor, product, target, with_epilogue};
use super::uneven::Uneven;
use candle_core::{Result, Shape, Tensor};
use candle_ddp_tensor::column_sums::column_sums;
use candle_ddp_tensor::kernels::{
    self, Address, Epilogue, Grid, Kernel, Launch, Output, Target, address, address_or_none, supported,
};

/// y = x · Wᵀ + b, of shape `shape`. All tensors are contiguous.
pub(crate) fn forward(
    (rows, features, out): Extents,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: Shape,
) -> Result<Output> {
    supported(x.dtype(), "Linear")?;
    let (device, dtype) = (x.device().as_cuda_device()?, x.dtype());
    let y = if features == 0 { Output::zeros(device, dtype, shape) } else { Output::new(device, dtype, shape) }?;
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let (x, weight, extents) = (address(x)?, address(weight)?, [rows, out, features]);
    let (factors, c) = ([factor(x, false), factor(weight, true)], target(y.address()?, dtype));
    if let Some(bias) = &bias
        && with_epilogue(device, extents, factors, c, Epilogue::Bias(address(bias)?))?
    {
        return Ok(y);
    }
    if bias.is_some() {
        let tensors = [y.address()?, address_or_none(bias.as_ref())?];
        let vector = Address::vector(&tensors, out, dtype);
        let (grid, numbers) = (Grid::Threads(rows * (out / vector)), &[rows, out, vector]);
        let launch = Launch { kernel: Kernel::RepeatRow, dtype, grid, tensors: &tensors, numbers, reals: &[] };
        kernels::launch(device, launch)?;
    }
    match Uneven::new(device, dtype, (rows, features, out)).filter(|_| bias.is_none()) {
        Some(uneven) => uneven.forward(x, weight, y.address()?)?,
        None => product(device, extents, dtype, factors, Target { accumulate: bias.is_some(), ..c })?,
    }
    Ok(y)
}

/// The gradients of x, dy · W, of the weight, dyᵀ · x, and of the bias, the sums of dy's columns, as far as they are needed.
pub(crate) fn gradients(
    (rows, features, out): Extents,
    [x, weight, dy]: [&Tensor; 3],
    needed: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let (device, dtype, bias_shape) = (dy.device().as_cuda_device()?, dy.dtype(), Shape::from(out));
    let result = |is_needed: bool, summed: usize, shape: &Shape| {
        let new = if summed == 0 { Output::zeros } else { Output::new };
        is_needed.then(|| new(device, dtype, shape.clone())).transpose()
    };
    let (dx, d_weight) = (result(needed[0], out, x.shape())?, result(needed[1], rows, weight.shape())?);
    let [dx_address, d_weight_address] = [&dx, &d_weight].map(|of| of.as_ref().map(Output::address).transpose());
    let (dx_address, d_weight_address) = (dx_address?, d_weight_address?);
    let mut d_bias = None;
    let [x, weight, dy_address] = [address(x)?, address(weight)?, address(dy)?];
    if let Some(uneven) = Uneven::new(device, dtype, (rows, features, out)) {
        uneven.gradients([x, weight, dy_address], dx_address, d_weight_address)?;
    } else {
        if let Some(dx) = dx_address {
            let ab = [factor(dy_address, false), factor(weight, false)];
            product(device, [rows, features, out], dtype, ab, target(dx, dtype))?;
        }
        if let Some(d_weight) = d_weight_address {
            let (extents, ab) = ([out, features, rows], [factor(dy_address, true), factor(x, false)]);
            let c = target(d_weight, dtype);
            let sums = needed[2].then(|| Output::new(device, dtype, bias_shape.clone())).transpose()?;
            let is_done = match &sums {
                Some(sums) => with_epilogue(device, extents, ab, c, Epilogue::RowSums(sums.address()?))?,
                None => false,
            };
            match is_done {
                true => d_bias = sums.map(Output::into_tensor),
                false => product(device, extents, dtype, ab, c)?,
            }
        }
    }
    if needed[2] && d_bias.is_none() {
        d_bias = Some(column_sums(dy, &bias_shape)?);
    }
    let [dx, d_weight] = [dx, d_weight].map(|gradient| gradient.map(Output::into_tensor));
    Ok([dx, d_weight, d_bias])
}
