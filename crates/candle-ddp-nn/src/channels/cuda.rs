//! The same by kernels of CUDA.
use super::extents::{Extents, accumulator};
use super::fused::{After, Gate};
use candle_core::{CudaDevice, DType, Result, Tensor};
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output, address};

/// Enough blocks for every GPU.
const BLOCKS: usize = 1024;
/// How many elements of a channel a block sums at least, if there are as many, and at most: sums of a thread are in f32.
const ELEMENTS: [usize; 2] = [1 << 11, 1 << 14];

/// A batch on a GPU, which has elements.
struct Batch<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    extents: Extents,
}

impl<'a> Batch<'a> {
    /// None for a batch without elements.
    fn new(x: &'a Tensor) -> Result<Option<Self>> {
        kernels::supported(x.dtype(), "the channels of a batch")?;
        let (device, dtype, extents) = (x.device().as_cuda_device()?, x.dtype(), Extents::of(x.dims()));
        Ok((x.elem_count() > 0).then_some(Self { device, dtype, extents }))
    }

    /// How many blocks share a channel, and the number of elements that each of these sums.
    fn parts(&self) -> (usize, usize) {
        let Extents { samples, channels, spatial } = self.extents;
        let [least, most] = ELEMENTS.map(|elements| (samples * spatial).div_ceil(elements));
        let parts = BLOCKS.div_ceil(channels).min(least).max(most);
        let length = (samples * spatial).div_ceil(parts);
        ((samples * spatial).div_ceil(length), length)
    }

    fn launch(&self, kernel: Kernel, grid: Grid, tensors: &[Address], more: &[usize]) -> Result<()> {
        let Extents { samples, channels, spatial } = self.extents;
        let (parts, length) = self.parts();
        let numbers = [&[samples, channels, spatial, parts, length], more].concat();
        let launch = Launch { kernel, dtype: self.dtype, grid, tensors, numbers: &numbers, reals: &[] };
        Ok(kernels::launch(self.device, launch)?)
    }

    /// Lets `kernel` sum up parts of channels, a pair for each, into tensor 1 of its `tensors`, and `totals` these into
    /// a tensor of `rows` rows of the dtype `dtype`.
    fn reduce(
        &self,
        (kernel, totals): (Kernel, Kernel),
        tensors: &[Address],
        more: &[usize],
        (rows, dtype): (usize, DType),
    ) -> Result<Tensor> {
        let Extents { channels, .. } = self.extents;
        let blocks = channels * self.parts().0;
        let pairs = Output::new(self.device, DType::F64, 2 * blocks)?;
        let tensors = [&tensors[..1], &[pairs.address()?], &tensors[1..]].concat();
        self.launch(kernel, Grid::Blocks(blocks), &tensors, more)?;
        let shape = if rows == 1 { vec![channels] } else { vec![rows, channels] };
        let result = Output::new(self.device, dtype, shape)?;
        let narrow = usize::from(dtype != accumulator(self.dtype));
        self.launch(totals, Grid::Threads(channels), &[pairs.address()?, result.address()?], &[rows, narrow])?;
        Ok(result.into_tensor())
    }

    /// Lets `kernel` fill a tensor like `x`, tensor 1 of its `tensors`.
    fn map(&self, kernel: Kernel, x: &Tensor, tensors: &[Address], more: &[usize]) -> Result<Output> {
        let y = Output::new(self.device, self.dtype, x.shape())?;
        let tensors = [&[address(x)?, y.address()?], tensors].concat();
        self.launch(kernel, Grid::Threads(x.elem_count()), &tensors, more)?;
        Ok(y)
    }
}

fn zeros(x: &Tensor, rows: usize, dtype: DType) -> Result<Tensor> {
    let channels = x.dim(1)?;
    let shape = if rows == 1 { vec![channels] } else { vec![rows, channels] };
    Ok(Output::zeros(x.device().as_cuda_device()?, dtype, shape)?.into_tensor())
}

fn gate_addresses<'a>(gate: Option<Gate<'a>>) -> Result<[Address<'a>; 2]> {
    match gate {
        Some(Gate { scale, shift }) => Ok([address(scale)?, address(shift)?]),
        None => Ok([Address::NONE; 2]),
    }
}

pub(super) fn moments(x: &Tensor, centred: bool) -> Result<Tensor> {
    let acc = accumulator(x.dtype());
    let Some(batch) = Batch::new(x)? else { return zeros(x, 2, acc) };
    batch.reduce((Kernel::Moments, Kernel::MomentsTotals), &[address(x)?], &[usize::from(centred)], (2, acc))
}

pub(super) fn gradient_sums(x: &Tensor, dy: &Tensor, mean: &Tensor, gate: Option<Gate>) -> Result<Tensor> {
    let acc = accumulator(x.dtype());
    let Some(batch) = Batch::new(x)? else { return zeros(x, 2, acc) };
    let [scale, shift] = gate_addresses(gate)?;
    let tensors = [address(x)?, address(dy)?, address(mean)?, scale, shift];
    batch.reduce((Kernel::GradientSums, Kernel::SumsTotals), &tensors, &[], (2, acc))
}

pub(super) fn totals(x: &Tensor) -> Result<Tensor> {
    let Some(batch) = Batch::new(x)? else { return zeros(x, 1, x.dtype()) };
    batch.reduce((Kernel::ChannelSums, Kernel::SumsTotals), &[address(x)?], &[], (1, x.dtype()))
}

pub(super) fn normalise(x: &Tensor, [mean, scale, shift]: [&Tensor; 3], after: &After) -> Result<Output> {
    let Some(batch) = Batch::new(x)? else {
        return Ok(Output::zeros(x.device().as_cuda_device()?, x.dtype(), x.shape())?);
    };
    let (relu, z) = match after {
        After::Nothing => (0, Address::NONE),
        After::Relu => (1, Address::NONE),
        After::AddRelu(z) => (1, address(z)?),
    };
    batch.map(Kernel::Normalise, x, &[address(mean)?, address(scale)?, address(shift)?, z], &[relu])
}

pub(super) fn add_relu_gradient(
    x: &Tensor,
    z: &Tensor,
    dy: &Tensor,
    [mean, scale, shift]: [&Tensor; 3],
) -> Result<Tensor> {
    let Some(batch) = Batch::new(x)? else { return Ok(dy.detach()) };
    let tensors = [address(mean)?, address(scale)?, address(shift)?, address(z)?, address(dy)?];
    Ok(batch.map(Kernel::AddReluGradient, x, &tensors, &[])?.into_tensor())
}

pub(super) fn input_gradient(
    x: &Tensor,
    dy: &Tensor,
    [mean, scale, a, b]: [&Tensor; 4],
    gate: Option<Gate>,
) -> Result<Tensor> {
    let Some(batch) = Batch::new(x)? else { return Ok(dy.detach()) };
    let [_, shift] = gate_addresses(gate)?;
    let tensors = [address(mean)?, address(scale)?, address(a)?, address(b)?, address(dy)?, shift];
    Ok(batch.map(Kernel::InputGradient, x, &tensors, &[])?.into_tensor())
}
