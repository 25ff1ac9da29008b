//! Linear layers on CUDA: cuBLAS adds products to the bias.
use super::product::{Extents, factor, product, target};
use super::uneven::Uneven;
use candle_core::{Result, Shape, Tensor};
use candle_ddp_tensor::kernels::{
    self, Address, Grid, Kernel, Launch, Output, Target, address, address_or_none, supported,
};

/// y = x · Wᵀ + b, of shape `shape`. All tensors are contiguous.
pub(super) fn forward(
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
    if bias.is_some() {
        let tensors = [y.address()?, address_or_none(bias.as_ref())?];
        let vector = Address::vector(&tensors, out, dtype);
        let (grid, numbers) = (Grid::Threads(rows * (out / vector)), &[rows, out, vector]);
        let launch = Launch { kernel: Kernel::RepeatRow, dtype, grid, tensors: &tensors, numbers, reals: &[] };
        kernels::launch(device, launch)?;
    }
    let (x, weight) = (address(x)?, address(weight)?);
    match Uneven::new(device, dtype, (rows, features, out)).filter(|_| bias.is_none()) {
        Some(uneven) => uneven.forward(x, weight, y.address()?)?,
        None => {
            let c = Target { accumulate: bias.is_some(), ..target(y.address()?, dtype) };
            product(device, [rows, out, features], dtype, [factor(x, false), factor(weight, true)], c)?;
        }
    }
    Ok(y)
}

/// The gradients of x, dy · W, and of the weight, dyᵀ · x, as far as they are needed.
pub(super) fn gradients(
    (rows, features, out): Extents,
    [x, weight, dy]: [&Tensor; 3],
    needed: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let (device, dtype) = (dy.device().as_cuda_device()?, dy.dtype());
    let result = |is_needed: bool, summed: usize, shape: &Shape| {
        let new = if summed == 0 { Output::zeros } else { Output::new };
        is_needed.then(|| new(device, dtype, shape.clone())).transpose()
    };
    let (dx, d_weight) = (result(needed[0], out, x.shape())?, result(needed[1], rows, weight.shape())?);
    let [dx_address, d_weight_address] = [&dx, &d_weight].map(|of| of.as_ref().map(Output::address).transpose());
    let (dx_address, d_weight_address) = (dx_address?, d_weight_address?);
    let [x, weight, dy] = [address(x)?, address(weight)?, address(dy)?];
    if let Some(uneven) = Uneven::new(device, dtype, (rows, features, out)) {
        uneven.gradients([x, weight, dy], dx_address, d_weight_address)?;
    } else {
        if let Some(dx) = dx_address {
            let ab = [factor(dy, false), factor(weight, false)];
            product(device, [rows, features, out], dtype, ab, target(dx, dtype))?;
        }
        if let Some(d_weight) = d_weight_address {
            let ab = [factor(dy, true), factor(x, false)];
            product(device, [out, features, rows], dtype, ab, target(d_weight, dtype))?;
        }
    }
    Ok([dx, d_weight].map(|gradient| gradient.map(Output::into_tensor)))
}
