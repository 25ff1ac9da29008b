//! Convolutions on CUDA: by cuDNN with the feature `cudnn`; otherwise by a kernel per channel if each output channel
//! sees only one input channel, and else by cuBLAS products, with kernels of this crate that turn images into columns
//! and back.
use super::geometry::{Geometry, positions};
use candle_core::{CudaDevice, DType, Result, Shape, Tensor};
use candle_ddp_tensor::kernels::{
    self, Address, ConvShape, Convolve, Factor, Grid, Kernel, Launch, Output, Product, Target, address,
    address_or_none, written_address,
};
use candle_ddp_tensor::{MemoryFormat, accumulator};

/// The maximum memory for the columns and outputs of the images in one product, unless a single image needs more.
const WORKSPACE: usize = 64 << 20;

/// y of shape `shape`, from x and weights, all stored in the memory format `format`, which [`format()`] returned.
pub(super) fn forward(
    (geometry, format): (&Geometry, MemoryFormat),
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: Shape,
) -> Result<Output> {
    let this = Convolution::new((geometry, format), x)?;
    let y = Output::new(this.device, this.dtype, shape)?;
    let (x, weight) = (&aligned(x)?, &aligned(weight)?);
    let (x, weight, bias) = (address(x)?, address(weight)?, bias.map(Tensor::contiguous).transpose()?);
    let bias_address = address_or_none(bias.as_ref())?;
    if this.by_cudnn(Convolve::Forward, [x, weight, y.address()?])? {
        this.add_bias(bias.is_some(), [geometry.co, geometry.output_pixels()], [y.address()?, bias_address])?;
    } else if this.is_depthwise() {
        let (y, row) = (y.address()?, geometry.output[1]);
        let tensors = [x, weight, y, bias_address];
        this.each_vector(
            Kernel::DepthwiseForward,
            &[y],
            (geometry.co * geometry.output[0], row),
            &tensors,
            (0, geometry.n),
        )?;
    } else {
        let (columns, outputs) = (this.columns(this.dtype)?, this.outputs(accumulator(this.dtype))?);
        for images in this.parts() {
            this.im2col(x, &columns, images)?;
            let [m, n, k] = [geometry.group_outputs(), images.1 * geometry.output_pixels(), geometry.taps()];
            this.product([m, n, k], [(weight, false), (columns.address()?, false)], &outputs, false)?;
            let tensors = [outputs.address()?, y.address()?, bias_address];
            this.each_output(Kernel::ColumnsToImages, &tensors, images)?;
        }
    }
    Ok(y)
}

/// The gradient of x, of shape `shape`, from the gradient of y; formats are as in [`forward`]. For transposed convolutions, whose forward pass
/// this is, a bias is added.
pub(super) fn backward_data(
    (geometry, format): (&Geometry, MemoryFormat),
    dy: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: Shape,
) -> Result<Output> {
    let this = Convolution::new((geometry, format), dy)?;
    let dx = Output::new(this.device, this.dtype, shape)?;
    let (dy, weight) = (&aligned(dy)?, &aligned(weight)?);
    let (dy, weight, bias) = (address(dy)?, address(weight)?, bias.map(Tensor::contiguous).transpose()?);
    let bias_address = address_or_none(bias.as_ref())?;
    if this.by_cudnn(Convolve::BackwardData, [dx.address()?, weight, dy])? {
        this.add_bias(bias.is_some(), [geometry.ci, geometry.input_pixels()], [dx.address()?, bias_address])?;
    } else if this.is_depthwise() {
        let tensors = [dy, weight, dx.address()?, bias_address];
        this.each_input(Kernel::DepthwiseBackwardData, &tensors[2..3], &tensors, (0, geometry.n))?;
    } else {
        let (columns, outputs) = (this.columns(accumulator(this.dtype))?, this.outputs(this.dtype)?);
        for images in this.parts() {
            this.each_output(Kernel::ImagesToColumns, &[dy, outputs.address()?], images)?;
            let [m, n, k] = [geometry.taps(), images.1 * geometry.output_pixels(), geometry.group_outputs()];
            this.product([m, n, k], [(weight, true), (outputs.address()?, false)], &columns, false)?;
            let tensors = [columns.address()?, dx.address()?, bias_address];
            this.each_input(Kernel::Col2im, &tensors[1..2], &tensors, images)?;
        }
    }
    Ok(dx)
}

/// Adds the gradient of x to `dx`, if cuDNN does that.
pub(super) fn add_backward_data(
    (geometry, format): (&Geometry, MemoryFormat),
    dy: &Tensor,
    weight: &Tensor,
    dx: &Tensor,
) -> Result<bool> {
    let this = Convolution::new((geometry, format), dy)?;
    let (dy, weight, dx) = (&aligned(dy)?, &aligned(weight)?, written_address(dx)?);
    let Some(shape) = this.shape().filter(|_| dx.is_aligned()) else { return Ok(false) };
    let tensors = [dx, address(weight)?, address(dy)?];
    Ok(kernels::convolve(this.device, (Convolve::BackwardData, this.dtype), &shape, tensors, true)?)
}

/// The gradient of the weights, of shape `shape`, from x and the gradient of y; formats are as in [`forward`].
pub(super) fn backward_filter(
    (geometry, format): (&Geometry, MemoryFormat),
    x: &Tensor,
    dy: &Tensor,
    shape: &Shape,
) -> Result<Tensor> {
    let this = Convolution::new((geometry, format), x)?;
    let (x, dy) = (&aligned(x)?, &aligned(dy)?);
    let (x, dy) = (address(x)?, address(dy)?);
    let dw = Output::new(this.device, this.dtype, shape)?;
    if this.by_cudnn(Convolve::BackwardFilter, [x, dw.address()?, dy])? {
        return Ok(dw.into_tensor());
    }
    if this.is_depthwise() {
        let grid = Grid::Blocks(geometry.co * geometry.taps());
        this.launch(Kernel::DepthwiseBackwardFilter, grid, 1, &[x, dy, dw.address()?], (0, geometry.n))?;
        return Ok(dw.into_tensor());
    }
    let sum = Output::new(this.device, accumulator(this.dtype), shape)?;
    let (columns, outputs) = (this.columns(this.dtype)?, this.outputs(this.dtype)?);
    for images in this.parts() {
        this.im2col(x, &columns, images)?;
        this.each_output(Kernel::ImagesToColumns, &[dy, outputs.address()?], images)?;
        let [m, n, k] = [geometry.group_outputs(), geometry.taps(), images.1 * geometry.output_pixels()];
        this.product([m, n, k], [(outputs.address()?, false), (columns.address()?, true)], &sum, images.0 > 0)?;
    }
    sum.into_tensor().to_dtype(this.dtype)
}

/// cuDNN chooses its algorithms without the addresses, and loads 16 bytes at once. So a view that begins between such addresses is
/// copied.
fn aligned(tensor: &Tensor) -> Result<Tensor> {
    if !cfg!(feature = "cudnn") || address(tensor)?.is_aligned() {
        Ok(tensor.clone())
    } else {
        tensor.force_contiguous()
    }
}

/// The first image and the number of images.
type Images = (usize, usize);

/// The format, if cuDNN has this convolution of tensors like `like` in it; otherwise contiguous.
pub(super) fn format(
    (geometry, format): (&Geometry, MemoryFormat),
    like: &Tensor,
    kind: Convolve,
) -> Result<MemoryFormat> {
    if format == MemoryFormat::Contiguous {
        return Ok(format);
    }
    let this = Convolution::new((geometry, format), like)?;
    let is_served = match this.shape() {
        Some(shape) => kernels::can_convolve(this.device, (kind, this.dtype), &shape)?,
        None => false,
    };
    Ok(if is_served { format } else { MemoryFormat::Contiguous })
}

struct Convolution<'a> {
    geometry: &'a Geometry,
    format: MemoryFormat,
    device: &'a CudaDevice,
    dtype: DType,
}

impl<'a> Convolution<'a> {
    fn new((geometry, format): (&'a Geometry, MemoryFormat), like: &'a Tensor) -> Result<Self> {
        kernels::supported(like.dtype(), "a convolution")?;
        Ok(Self { geometry, format, device: like.device().as_cuda_device()?, dtype: like.dtype() })
    }

    /// Whether each output channel sees a single input channel.
    fn is_depthwise(&self) -> bool {
        self.geometry.group_inputs() == 1 && self.geometry.groups > 1
    }

    /// The shape for cuDNN. If a transposed convolution's output padding leaves rows that no kernel sees, cuDNN expects more outputs:
    /// then there is none.
    fn shape(&self) -> Option<ConvShape> {
        let Geometry { n, ci, co, groups, input, output, kernel, stride, padding, dilation } = *self.geometry;
        let is_whole = (0..2).all(|axis| {
            let found = positions(input[axis], kernel[axis], stride[axis], padding[axis], dilation[axis]);
            found == Some(output[axis])
        });
        let format = self.format;
        is_whole.then_some(ConvShape { n, ci, co, groups, input, output, kernel, stride, padding, dilation, format })
    }

    fn by_cudnn(&self, convolve: Convolve, tensors: [Address; 3]) -> Result<bool> {
        let is_done = match self.shape() {
            Some(shape) => kernels::convolve(self.device, (convolve, self.dtype), &shape, tensors, false)?,
            None => false,
        };
        if !is_done && self.format != MemoryFormat::Contiguous {
            candle_core::bail!("cuDNN no longer has a convolution in channels_last that it had: {:?}", self.geometry);
        }
        Ok(is_done)
    }

    fn add_bias(&self, is_there: bool, [channels, pixels]: [usize; 2], [y, bias]: [Address; 2]) -> Result<()> {
        if !is_there {
            return Ok(());
        }
        let (n, dtype) = (self.geometry.n, self.dtype);
        let launch = |kernel, threads, tensors: &[Address], numbers: &[usize]| {
            let launch = Launch { kernel, dtype, grid: Grid::Threads(threads), tensors, numbers, reals: &[] };
            kernels::launch(self.device, launch)
        };
        Ok(match self.format {
            MemoryFormat::Contiguous => {
                let vector = Address::vector(&[y], pixels, dtype);
                let numbers = &[n, channels, pixels, vector];
                launch(Kernel::AddBias, n * channels * (pixels / vector), &[y, bias], numbers)
            }
            MemoryFormat::ChannelsLast => {
                let (elements, vector) = (n * pixels * channels, Address::vector(&[y, bias], channels, dtype));
                launch(Kernel::Add, elements / vector, &[y, bias, y], &[elements, vector, channels])
            }
        }?)
    }

    /// Launches a kernel whose threads have `vector` elements each.
    fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        vector: usize,
        tensors: &[Address],
        (first, images): Images,
    ) -> Result<()> {
        let Geometry { ci, co, input, output, kernel: taps, stride, padding, dilation, .. } = *self.geometry;
        let axes = [input, output, taps, stride, padding, dilation].concat();
        let numbers = [&[first, images, ci, co][..], &axes, &[vector]].concat();
        let launch = Launch { kernel, dtype: self.dtype, grid, tensors, numbers: &numbers, reals: &[] };
        Ok(kernels::launch(self.device, launch)?)
    }

    /// The numbers of elements in the columns and in the outputs of an image.
    fn per_image(&self) -> [usize; 2] {
        let pixels = self.geometry.output_pixels();
        [self.geometry.groups * self.geometry.taps() * pixels, self.geometry.co * pixels]
    }

    /// The maximum number of images in a product.
    fn images(&self) -> usize {
        let bytes = accumulator(self.dtype).size_in_bytes() * self.per_image().iter().sum::<usize>();
        (WORKSPACE / bytes.max(1)).clamp(1, self.geometry.n)
    }

    /// The images of each product.
    fn parts(&self) -> impl Iterator<Item = Images> {
        let (n, images) = (self.geometry.n, self.images());
        (0..n).step_by(images).map(move |first| (first, images.min(n - first)))
    }

    fn columns(&self, dtype: DType) -> Result<Output> {
        Ok(Output::new(self.device, dtype, self.images() * self.per_image()[0])?)
    }

    fn outputs(&self, dtype: DType) -> Result<Output> {
        Ok(Output::new(self.device, dtype, self.images() * self.per_image()[1])?)
    }

    /// Launches a thread for each vector, of rows of which each image has so many of this length, if `vectors` begin where vectors may.
    fn each_vector(
        &self,
        kernel: Kernel,
        vectors: &[Address],
        (rows, row): (usize, usize),
        tensors: &[Address],
        images: Images,
    ) -> Result<()> {
        let vector = Address::vector(vectors, row, self.dtype);
        self.launch(kernel, Grid::Threads(images.1 * rows * (row / vector)), vector, tensors, images)
    }

    fn im2col(&self, x: Address, columns: &Output, images: Images) -> Result<()> {
        let (columns, row) = (columns.address()?, self.geometry.output[1]);
        self.each_vector(Kernel::Im2col, &[columns], (self.per_image()[0] / row, row), &[x, columns], images)
    }

    /// A thread for each vector of the outputs of some images, which the first two tensors hold.
    fn each_output(&self, kernel: Kernel, tensors: &[Address], images: Images) -> Result<()> {
        let rows = (self.geometry.co, self.geometry.output_pixels());
        self.each_vector(kernel, &tensors[..2], rows, tensors, images)
    }

    /// A thread for each vector of the inputs of some images, which one of the tensors holds.
    fn each_input(&self, kernel: Kernel, inputs: &[Address], tensors: &[Address], images: Images) -> Result<()> {
        let Geometry { ci, input: [height, width], .. } = *self.geometry;
        self.each_vector(kernel, inputs, (ci * height, width), tensors, images)
    }

    /// One product per group, whose factors may be transposed.
    fn product(&self, [m, n, k]: [usize; 3], ab: [(Address, bool); 2], c: &Output, accumulate: bool) -> Result<()> {
        let (batch, dtype, stride) = (self.geometry.groups, self.dtype, None);
        let [a, b] = ab.map(|(address, transposed)| Factor { address, transposed, stride, row: None });
        let c = Target { address: c.address()?, dtype: accumulator(dtype), stride, row: None, accumulate };
        Ok(kernels::product(self.device, Product { batch, m, n, k, dtype, a, b, c })?)
    }
}
