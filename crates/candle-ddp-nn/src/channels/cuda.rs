//! The same operations as CUDA kernels.
use super::extents::Extents;
use super::fused::{After, Gate, Mask, Passed};
use candle_core::{CudaDevice, DType, Result, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output, Temporary, address, written_address};

/// Enough blocks for every GPU.
const BLOCKS: usize = 1024;
/// The same for single pixels: whole waves of two or three blocks on each of an H100's 132 multiprocessors.
const PIXEL_BLOCKS: usize = 792;
/// The minimum (if there are enough) and maximum number of samples of single pixels that a thread sums, and those that it maps.
const SAMPLES: [usize; 2] = [8, 128];
const MAPPED_SAMPLES: usize = 8;
/// The most threads side by side, for neighbouring vectors of a single pixel: 512 bytes.
const WIDTH: usize = 32;
/// The minimum (if there are enough) and maximum number of elements of a channel that a block sums: a thread sums in
/// f32, and keeps four vectors in flight.
const ELEMENTS: [usize; 2] = [1 << 13, 1 << 15];
/// The threads of a block.
const THREADS: usize = kernels::THREADS as usize;
/// The vectors that a thread maps.
const MAPPED: usize = 2;

/// A batch on a GPU.
pub(crate) struct Batch<'a> {
    pub(crate) device: &'a CudaDevice,
    dtype: DType,
    extents: Extents,
}

/// How a kernel's threads go through the batch: numbers of channels.cu's `Batch`.
#[derive(Default)]
pub(crate) struct Steps {
    length: usize,
    vector: usize,
    vectors: usize,
    step: [usize; 2],
}

impl<'a> Batch<'a> {
    pub(crate) fn new(x: &'a Tensor) -> Result<Self> {
        kernels::supported(x.dtype(), "the channels of a batch")?;
        Ok(Self { device: x.device().as_cuda_device()?, dtype: x.dtype(), extents: Extents::of(x.dims()) })
    }

    fn is_empty(&self) -> bool {
        let Extents { samples, channels, spatial } = self.extents;
        samples * channels * spatial == 0
    }

    /// Whether the batch is single pixels, which have their own kernels (pixels.cu).
    fn is_pixels(&self) -> bool {
        self.extents.spatial == 1
    }

    /// For single pixels: the threads of a block side by side, and the blocks, if each takes `vector` channels.
    fn width(&self, vector: usize) -> [usize; 2] {
        let vectors = self.extents.channels / vector;
        let width = vectors.next_power_of_two().min(WIDTH);
        [width, vectors.div_ceil(width)]
    }

    /// The number of blocks that share a channel.
    fn parts(&self) -> usize {
        let Extents { samples, channels, spatial } = self.extents;
        if self.is_pixels() {
            let [width, blocks] = self.width(Address::vector(&[], channels, self.dtype));
            let [least, most] = SAMPLES.map(|lines| samples.div_ceil(lines * (THREADS / width)));
            return PIXEL_BLOCKS.div_ceil(blocks.max(1)).min(least).max(most).max(1);
        }
        let [least, most] = ELEMENTS.map(|elements| (samples * spatial).div_ceil(elements));
        BLOCKS.div_ceil(channels.max(1)).min(least).max(most).max(1)
    }

    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        tensors: &[Address],
        (Steps { length, vector, vectors, step }, more, reals): (Steps, &[usize], &[f64]),
    ) -> Result<()> {
        let Extents { samples, channels, spatial } = self.extents;
        let own = [samples, channels, spatial, self.parts(), length, vector, vectors, step[0], step[1]];
        let numbers = [&own, more].concat();
        Ok(kernels::launch(self.device, Launch { kernel, dtype: self.dtype, grid, tensors, numbers: &numbers, reals })?)
    }

    /// Launches `kernel` with a warp for each channel.
    pub(crate) fn launch_for_channels(
        &self,
        kernel: Kernel,
        tensors: &[Address],
        (more, reals): (&[usize], &[f64]),
    ) -> Result<()> {
        self.launch(kernel, Grid::Threads(32 * self.extents.channels), tensors, (Steps::default(), more, reals))
    }

    /// The number of elements that a thread takes at once of tensors like the batch: at most those of one plane, and only one of
    /// batches for which 32 bits do not suffice.
    fn vector(&self, tensors: &[Address]) -> usize {
        let Extents { samples, channels, spatial } = self.extents;
        if self.is_pixels() {
            return Address::vector(tensors, channels, self.dtype);
        }
        let elements = samples * channels * spatial;
        match Address::vector(tensors, elements, self.dtype) {
            vector if vector <= spatial && elements < 1 << 31 => vector,
            _ => 1,
        }
    }

    /// Lets `kernel` sum parts of channels: a pair for each part, tensor 1 of its `tensors`. Those of these that are like the batch
    /// are `batches`.
    pub(crate) fn pairs(
        &self,
        kernel: Kernel,
        tensors: &[Address],
        batches: &[Address],
        more: &[usize],
    ) -> Result<Temporary> {
        let pairs = Temporary::new(self.device, DType::F64, 2 * self.extents.channels * self.parts())?;
        self.sum(kernel, &[&tensors[..1], &[pairs.address()?], &tensors[1..]].concat(), batches, (more, &[]))?;
        Ok(pairs)
    }

    /// Launches a `kernel` that sums parts of channels.
    fn sum(
        &self,
        kernel: Kernel,
        tensors: &[Address],
        batches: &[Address],
        (more, reals): (&[usize], &[f64]),
    ) -> Result<()> {
        let Extents { samples, channels, spatial } = self.extents;
        let vector = self.vector(batches);
        if self.is_pixels() {
            let [width, blocks] = self.width(vector);
            let steps = Steps { length: samples.div_ceil(self.parts()), vector, vectors: width, step: [0; 2] };
            let grid = Grid::Blocks(blocks * self.parts());
            return self.launch(of_pixels(kernel), grid, tensors, (steps, more, reals));
        }
        // Vectors may begin anywhere in a plane, unless planes are whole vectors.
        let vectors = match spatial.is_multiple_of(vector) {
            true => spatial / vector,
            false => (spatial + 2 * vector - 2) / vector,
        };
        let length = (samples * vectors).div_ceil(self.parts());
        let steps = Steps { length, vector, vectors, step: [THREADS / vectors, THREADS % vectors] };
        self.launch(kernel, Grid::Blocks(channels * self.parts()), tensors, (steps, more, reals))
    }

    /// Memory for `count` rows of numbers of each channel, in the dtype of the arithmetic.
    fn rows(&self, count: usize) -> Result<Output> {
        Ok(Output::new(self.device, accumulator(self.dtype), (count, self.extents.channels))?)
    }

    /// Lets `kernel` fill a tensor like the batch, tensor 1 of its `tensors`. Each thread takes `vector` elements at once.
    fn map(&self, kernel: Kernel, tensors: &[Address], vector: usize, more: &[usize]) -> Result<()> {
        let Extents { samples, channels, spatial } = self.extents;
        if self.is_pixels() {
            let [width, blocks] = self.width(vector);
            let length = MAPPED_SAMPLES * (THREADS / width);
            let steps = Steps { length, vector, vectors: width, step: [0; 2] };
            let grid = Grid::Blocks(blocks * samples.div_ceil(length));
            return self.launch(of_pixels(kernel), grid, tensors, (steps, more, &[]));
        }
        let (planes, columns) = (THREADS * vector / spatial.max(1), THREADS * vector % spatial.max(1));
        let steps = Steps { vector, step: [planes % channels.max(1), columns], ..Steps::default() };
        let grid = Grid::Threads((samples * channels * spatial).div_ceil(MAPPED * vector));
        self.launch(kernel, grid, tensors, (steps, more, &[]))
    }
}

/// The kernel of pixels.cu for one of channels.cu.
fn of_pixels(kernel: Kernel) -> Kernel {
    match kernel {
        Kernel::Moments => Kernel::PixelMoments,
        Kernel::ChannelSums => Kernel::PixelSums,
        Kernel::GradientSums => Kernel::PixelGradientSums,
        Kernel::AddReluGradient => Kernel::PixelAddReluGradient,
        Kernel::Normalise => Kernel::PixelNormalise,
        Kernel::InputGradient => Kernel::PixelInputGradient,
        other => other,
    }
}

fn gate_addresses<'a>(gate: Option<Gate<'a>>) -> Result<[Address<'a>; 2]> {
    match gate {
        Some(Gate { scale, shift }) => Ok([address(scale)?, address(shift)?]),
        None => Ok([Address::NONE; 2]),
    }
}

/// The numbers of dtypes, as channels.cu reads them.
pub(crate) fn dtype_numbers(dtypes: impl Iterator<Item = DType>) -> Result<usize> {
    let number = |dtype| kernels::dtype_number(dtype, "the parameters of a normalisation");
    dtypes.enumerate().try_fold(0, |all, (index, dtype)| Ok(all | number(dtype)? << (4 * index)))
}

/// A layer's tensors for its channels, tensors of shape (channels).
pub(crate) struct Parameters<'a> {
    /// Contiguous weight and bias, if there are any.
    pub(crate) weight_and_bias: Option<[&'a Tensor; 2]>,
    /// Mean and variance.
    pub(crate) running: [&'a Tensor; 2],
    pub(crate) eps: f64,
    pub(crate) momentum: f64,
}

/// The statistics that normalise a batch.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Its own.
    Batch,
    /// Means, variances, and the number of values.
    Given([&'a Tensor; 3]),
    Running,
}

/// Statistics, and what follows from them: a tensor (5, channels) of mean, variance, 1 / deviation, scale and shift. Except with
/// [`Source::Running`], this updates the running statistics; the mean only if the batch is `centred`. Without parameters, only the
/// first two rows count.
pub(crate) fn statistics(x: &Tensor, source: Source, centred: bool, parameters: Option<&Parameters>) -> Result<Tensor> {
    let batch = Batch::new(x)?;
    if batch.is_empty() && matches!(source, Source::Batch) {
        let shape = (5, batch.extents.channels);
        return Ok(Output::zeros(batch.device, accumulator(x.dtype()), shape)?.into_tensor());
    }
    let result = batch.rows(5)?;
    // One block sums a whole channel, and so needs no other kernel.
    let is_whole = matches!(source, Source::Batch) && batch.parts() == 1 && !batch.is_pixels();
    let (number, pairs, given) = match source {
        Source::Batch if is_whole => (0, None, [Address::NONE, address(x)?, Address::NONE]),
        Source::Batch => {
            let pairs = batch.pairs(Kernel::Moments, &[address(x)?], &[address(x)?], &[usize::from(centred)])?;
            (0, Some(pairs), [Address::NONE, address(x)?, Address::NONE])
        }
        Source::Given([mean, variance, count]) => (1, None, [address(mean)?, address(variance)?, address(count)?]),
        Source::Running => (2, None, [Address::NONE; 3]),
    };
    let first = pairs.as_ref().map_or(Ok(given[0]), Temporary::address)?;
    let mut tensors =
        [first, result.address()?, Address::NONE, Address::NONE, Address::NONE, Address::NONE, given[1], given[2]];
    let (mut dtypes, mut reals) = ([DType::F32; 4], [0.0; 2]);
    if let Some(Parameters { weight_and_bias, running, eps, momentum }) = parameters {
        for (index, tensor) in weight_and_bias.iter().flatten().enumerate() {
            (tensors[2 + index], dtypes[index]) = (address(tensor)?, tensor.dtype());
        }
        for (index, tensor) in running.iter().enumerate() {
            (tensors[4 + index], dtypes[2 + index]) = (written_address(tensor)?, tensor.dtype());
        }
        reals = [*eps, *momentum];
    }
    let numbers = [dtype_numbers(dtypes.into_iter())?, number, usize::from(centred)];
    match is_whole {
        true => batch.sum(Kernel::BatchStatistics, &tensors, &[address(x)?], (&numbers, &reals))?,
        false => batch.launch_for_channels(Kernel::Statistics, &tensors, (&numbers, &reals))?,
    }
    Ok(result.into_tensor())
}

/// How gradients pass statistics.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Through {
    Constants,
    Batch { centred: bool },
}

/// The gate through which gradients pass to a normalisation.
#[derive(Clone, Copy)]
pub(crate) enum Gated<'a> {
    /// A ReLU that follows, or nothing.
    By(Option<Gate<'a>>),
    /// A ReLU behind a sum, and memory for what it lets pass.
    Mask(&'a Mask, &'a Tensor),
}

/// The gradients of weight and bias, of these dtypes, and a tensor (4, channels): Σ dy and Σ dy·(x − mean), only of the dy that
/// pass, and the numbers a and b of [`input_gradient`].
pub(crate) fn gradient_totals(
    x: &Tensor,
    dy: &Tensor,
    [mean, inverse_deviation, scale]: [&Tensor; 3],
    gated: Gated,
    dtypes: Option<[DType; 2]>,
    through: Through,
) -> Result<(Tensor, Vec<Tensor>)> {
    let batch = Batch::new(x)?;
    let (rows, pairs) = if batch.is_empty() {
        (Output::zeros(batch.device, accumulator(x.dtype()), (4, batch.extents.channels))?, None)
    } else {
        let [x, dy, mean] = [address(x)?, address(dy)?, address(mean)?];
        let pairs = match gated {
            Gated::By(gate) => {
                let [gate_scale, shift] = gate_addresses(gate)?;
                batch.pairs(Kernel::GradientSums, &[x, dy, mean, gate_scale, shift], &[x, dy], &[])?
            }
            Gated::Mask(Mask { bytes, per }, dz) => {
                let dz = written_address(dz)?;
                let tensors = [x, dy, mean, bytes.address()?, dz];
                batch.pairs(Kernel::AddReluGradient, &tensors, &[x, dy, dz], &[*per])?
            }
        };
        (batch.rows(4)?, Some(pairs))
    };
    let channels = batch.extents.channels;
    let gradients: Vec<Tensor> = match dtypes {
        // Both in one allocation.
        Some([weight, bias]) if weight == bias => {
            let both = Output::new(batch.device, weight, (2, channels))?.into_tensor();
            vec![both.get(0)?, both.get(1)?]
        }
        Some(dtypes) => {
            let new = |dtype| Ok(Output::new(batch.device, dtype, channels)?.into_tensor());
            dtypes.into_iter().map(new).collect::<Result<_>>()?
        }
        None => Vec::new(),
    };
    let of = |index: usize| gradients.get(index).map_or(Ok(Address::NONE), written_address);
    let pairs = pairs.as_ref().map_or(Ok(Address::NONE), Temporary::address)?;
    let own = [address(inverse_deviation)?, Address::NONE, address(scale)?];
    let tensors = [&[pairs, rows.address()?, of(0)?, of(1)?], &own[..]].concat();
    batch.slopes(&tensors, dtypes, through)?;
    Ok((rows.into_tensor(), gradients))
}

/// Replaces a and b in the result of [`gradient_totals`], whose sums now are those of a larger batch, of `count` values for
/// each channel.
pub(crate) fn replace_slopes(
    x: &Tensor,
    rows: &Tensor,
    [inverse_deviation, scale]: [&Tensor; 2],
    count: &Tensor,
    through: Through,
) -> Result<()> {
    let none = Address::NONE;
    let own = [address(inverse_deviation)?, address(count)?, address(scale)?];
    let tensors = [&[none, written_address(rows)?, none, none], &own[..]].concat();
    Batch::new(x)?.slopes(&tensors, None, through)
}

impl Batch<'_> {
    fn slopes(&self, tensors: &[Address], dtypes: Option<[DType; 2]>, through: Through) -> Result<()> {
        let is_centred = through == Through::Batch { centred: true };
        let dtypes = dtype_numbers(dtypes.into_iter().flatten())?;
        let numbers = [dtypes, usize::from(is_centred), usize::from(through == Through::Constants)];
        self.launch_for_channels(Kernel::GradientTotals, tensors, (&numbers, &[]))
    }
}

pub(super) fn totals(x: &Tensor) -> Result<Tensor> {
    let batch = Batch::new(x)?;
    let channels = batch.extents.channels;
    if batch.is_empty() {
        return Ok(Output::zeros(batch.device, x.dtype(), channels)?.into_tensor());
    }
    let pairs = batch.pairs(Kernel::ChannelSums, &[address(x)?], &[address(x)?], &[])?;
    let result = Output::new(batch.device, x.dtype(), channels)?;
    batch.launch_for_channels(Kernel::SumsTotals, &[pairs.address()?, result.address()?], (&[], &[]))?;
    Ok(result.into_tensor())
}

pub(crate) fn normalise(
    x: &Tensor,
    [mean, scale, shift]: [&Tensor; 3],
    after: &After,
    may_be: bool,
) -> Result<(Output, Passed)> {
    let (batch, y) = (Batch::new(x)?, Output::new(x.device().as_cuda_device()?, x.dtype(), x.shape())?);
    let (relu, z, passed) = match after {
        After::Nothing => (0, Address::NONE, Passed::Nothing),
        After::Relu => (1, Address::NONE, Passed::Relu),
        After::AddRelu(z) => (1, address(z)?, Passed::Nothing),
    };
    let (x_address, y_address) = (address(x)?, y.address()?);
    let per = batch.vector(&[x_address, y_address, z]);
    let mask = match after {
        After::AddRelu(_) if may_be => {
            let bytes = Output::new(batch.device, DType::U8, x.elem_count().div_ceil(per))?;
            Some(Mask { bytes, per })
        }
        _ => None,
    };
    let mask_address = mask.as_ref().map_or(Ok(Address::NONE), |mask| mask.bytes.address())?;
    let tensors = [x_address, y_address, address(mean)?, address(scale)?, address(shift)?, z, mask_address];
    batch.map(Kernel::Normalise, &tensors, per, &[relu])?;
    Ok((y, mask.map_or(passed, Passed::Mask)))
}

/// Memory for a tensor like `x`, which a kernel fills.
pub(crate) fn unfilled_like(x: &Tensor) -> Result<Tensor> {
    Ok(Output::new(x.device().as_cuda_device()?, x.dtype(), x.shape())?.into_tensor())
}

pub(crate) fn input_gradient(
    x: &Tensor,
    dy: &Tensor,
    [mean, scale, a, b]: [&Tensor; 4],
    gate: Option<Gate>,
) -> Result<Tensor> {
    let (batch, dx) = (Batch::new(x)?, unfilled_like(x)?);
    let [_, shift] = gate_addresses(gate)?;
    let [x, dx_address, dy] = [address(x)?, written_address(&dx)?, address(dy)?];
    let tensors = [x, dx_address, address(mean)?, address(scale)?, address(a)?, address(b)?, dy, shift];
    batch.map(Kernel::InputGradient, &tensors, batch.vector(&[x, dx_address, dy]), &[])?;
    Ok(dx)
}
