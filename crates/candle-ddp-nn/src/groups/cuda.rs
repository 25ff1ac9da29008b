//! The same as CUDA kernels: batch normalisation's, and three that go from groups to planes.
use super::extents::Extents;
use crate::channels::After;
use crate::channels::cuda::{Batch, dtype_numbers, input_gradient, normalise};
use candle_core::{DType, Result, Shape, Storage, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::kernels::{Address, Grid, Kernel, Output, address, address_or_none};

/// The values that the backward pass needs.
pub(super) struct Statistics {
    /// (3, planes): mean, scale and shift.
    of_planes: Tensor,
    /// 1 / deviation of each group.
    inverse: Tensor,
}

/// For a weight and a bias of these dtypes, if there are any.
fn numbers(extents: Extents, dtypes: Option<[DType; 2]>) -> Result<[usize; 3]> {
    Ok([dtype_numbers(dtypes.into_iter().flatten())?, extents.groups, extents.in_group])
}

pub(super) fn forward(
    x: &Tensor,
    extents: Extents,
    parameters: Option<[&Tensor; 2]>,
    eps: f64,
) -> Result<((Storage, Shape), Statistics)> {
    let (groups, planes) = (extents.samples * extents.groups, extents.planes());
    let of_groups = x.reshape((1, groups, extents.size()))?;
    let batch = Batch::new(&of_groups)?;
    let acc = accumulator(x.dtype());
    let (of_planes, inverse) = (Output::new(batch.device, acc, (3, planes))?, Output::new(batch.device, acc, groups)?);
    if x.elem_count() == 0 {
        let y = Output::new(batch.device, x.dtype(), x.shape())?.into_result();
        return Ok((y, Statistics { of_planes: of_planes.into_tensor(), inverse: inverse.into_tensor() }));
    }
    let parameters = match parameters {
        Some([weight, bias]) => Some([weight.contiguous()?, bias.contiguous()?]),
        None => None,
    };
    let of = |index: usize| address_or_none(parameters.as_ref().map(|parameters| &parameters[index]));
    let pairs = batch.pairs(Kernel::Moments, &[address(x)?], &[address(x)?], &[1])?;
    let tensors = [pairs.address()?, of_planes.address()?, of(0)?, of(1)?, inverse.address()?, address(x)?];
    let dtypes = parameters.as_ref().map(|parameters| parameters.each_ref().map(Tensor::dtype));
    batch.launch_for_channels(Kernel::GroupStatistics, &tensors, (&numbers(extents, dtypes)?, &[eps]))?;
    let statistics = Statistics { of_planes: of_planes.into_tensor(), inverse: inverse.into_tensor() };
    let row = |index| statistics.of_planes.get(index);
    let planes = x.reshape((1, planes, extents.spatial))?;
    let (y, _) = normalise(&planes, [&row(0)?, &row(1)?, &row(2)?], &After::Nothing, false)?;
    Ok(((y.into_result().0, x.shape().clone()), statistics))
}

/// The gradients of x and, if there are any, of weight and bias.
pub(super) fn backward(
    x: &Tensor,
    dy: &Tensor,
    extents: Extents,
    Statistics { of_planes, inverse }: &Statistics,
    (weight, dtypes): (Option<&Tensor>, Option<[DType; 2]>),
) -> Result<(Tensor, Vec<Tensor>)> {
    let (groups, planes) = (extents.samples * extents.groups, extents.planes());
    let channels = extents.groups * extents.in_group;
    let weight = weight.map(Tensor::contiguous).transpose()?;
    let shape = (1, planes, extents.spatial);
    let [x_planes, dy_planes] = [x.reshape(shape)?, dy.reshape(shape)?];
    let batch = Batch::new(&x_planes)?;
    if x.elem_count() == 0 {
        let zeros = |dtype| Ok(Output::zeros(batch.device, dtype, channels)?.into_tensor());
        return Ok((x.clone(), dtypes.into_iter().flatten().map(zeros).collect::<Result<_>>()?));
    }
    let mean = of_planes.get(0)?;
    let batches = [address(x)?, address(dy)?];
    let tensors = [batches[0], batches[1], address(&mean)?, Address::NONE, Address::NONE];
    let pairs = batch.pairs(Kernel::GradientSums, &tensors, &batches, &[])?;
    let rows = Output::new(batch.device, accumulator(x.dtype()), (4, planes))?;
    let tensors = [pairs.address()?, rows.address()?, address_or_none(weight.as_ref())?, address(inverse)?];
    let (grid, numbers) = (Grid::Threads(32 * groups), numbers(extents, dtypes)?);
    batch.launch(Kernel::GroupGradients, grid, &tensors, (Default::default(), &numbers, &[]))?;
    let rows = rows.into_tensor();
    let dx = input_gradient(&x_planes, &dy_planes, [&mean, &of_planes.get(1)?, &rows.get(2)?, &rows.get(3)?], None)?;
    let dx = dx.reshape(x.shape())?;
    let Some(dtypes) = dtypes else { return Ok((dx, Vec::new())) };
    let [weight, bias] = dtypes.map(|dtype| Output::new(batch.device, dtype, channels));
    let (weight, bias) = (weight?, bias?);
    let samples = x.reshape((extents.samples, channels, extents.spatial))?;
    let tensors = [address(&rows)?, weight.address()?, bias.address()?];
    let more = (Default::default(), &numbers[..1], &[][..]);
    Batch::new(&samples)?.launch(Kernel::GroupTotals, Grid::Threads(channels), &tensors, more)?;
    Ok((dx, vec![weight.into_tensor(), bias.into_tensor()]))
}
