//! The cross entropy by kernels of CUDA, which keep one number per sample, and do not wait for the GPU.
use super::options::{CrossEntropyOptions, Reduction};
use crate::embedding::wide_indices;
use crate::softmax::extents;
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output, Temporary, address, address_or_none};

/// Like [`cross_entropy_with`](super::cross_entropy_with), which has checked the arguments.
pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    kernels::supported(logits.dtype(), "cross_entropy")?;
    let logits = logits.contiguous()?;
    let device = logits.device().as_cuda_device()?;
    let (classes, inner, block) = extents(logits.shape(), 1);
    let weights = match &options.weight {
        Some(weight) => Some(weight.detach().to_dtype(accumulator(logits.dtype()))?.contiguous()?),
        None => None,
    };
    let samples = targets.elem_count();
    // Its gradient is, too.
    let vector = |row| Ok::<_, candle_core::Error>(Address::vector(&[address(&logits)?], row, logits.dtype()));
    let of_rows = vector(0)?;
    let is_mean = usize::from(options.reduction == Reduction::Mean);
    let of = CrossEntropy {
        x: logits.detach(),
        targets: wide_indices(targets)?,
        weights,
        // The bits of a signed number.
        numbers: [
            logits.elem_count() / block,
            classes,
            inner,
            options.ignore_index as usize,
            is_mean,
            usize::from(of_rows > 1),
            kernels::lanes(classes, of_rows),
            vector(inner)?,
            classes,
        ],
        smoothing: options.label_smoothing,
        norms: Output::new(device, DType::F64, samples)?,
        scale: Output::new(device, DType::F64, 2)?,
    };
    let (pairs, loss) =
        (Temporary::new(device, DType::F64, 2 * samples)?, Output::new(device, accumulator(logits.dtype()), ())?);
    let launch = |kernel, dtype, grid, tensors: &[_]| {
        let (numbers, reals) = (&of.numbers, &[of.smoothing]);
        kernels::launch(device, Launch { kernel, dtype, grid, tensors, numbers, reals })
    };
    let (kernel, grid) = match inner {
        1 => (Kernel::LossesOfRows, of.blocks(samples)),
        _ => (Kernel::LossesOfColumns, of.threads(samples)),
    };
    let weights = address_or_none(of.weights.as_ref())?;
    let tensors = [address(&logits)?, address(&of.targets)?, weights, of.norms.address()?, pairs.address()?];
    launch(kernel, logits.dtype(), grid, &tensors)?;
    launch(
        Kernel::LossTotal,
        loss.dtype(),
        Grid::Blocks(1),
        &[pairs.address()?, loss.address()?, weights, of.scale.address()?],
    )?;
    apply(&[&logits], loss.into_result(), of)
}

/// Values that the gradient needs.
struct CrossEntropy {
    x: Tensor,
    targets: Tensor,
    weights: Option<Tensor>,
    numbers: [usize; 9],
    smoothing: f64,
    /// log Σ e^x of each sample.
    norms: Output,
    /// The factor of sums over samples, and the sum of the weights.
    scale: Output,
}

impl CrossEntropy {
    /// The grid of the kernels for rows.
    fn blocks(&self, samples: usize) -> Grid {
        Grid::Blocks(kernels::blocks_of_rows(samples, self.numbers[6]))
    }

    /// The grid of the kernels for columns.
    fn threads(&self, samples: usize) -> Grid {
        Grid::Threads(samples / self.numbers[7])
    }
}

impl Function for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { x, targets, weights, numbers, smoothing, norms, scale } = self;
        let device = x.device().as_cuda_device()?;
        let dx = Output::new(device, x.dtype(), x.shape())?;
        let tensors = [
            address(x)?,
            address(targets)?,
            address_or_none(weights.as_ref())?,
            norms.address()?,
            address(gradient)?,
            scale.address()?,
            dx.address()?,
        ];
        let samples = targets.elem_count();
        let (kernel, grid) = match numbers[2] {
            1 => (Kernel::LossRowsBackward, self.blocks(samples)),
            _ => (Kernel::LossColumnsBackward, self.threads(samples)),
        };
        let launch = Launch { kernel, dtype: x.dtype(), grid, tensors: &tensors, numbers, reals: &[*smoothing] };
        kernels::launch(device, launch)?;
        Ok(vec![Some(dx.into_tensor())])
    }
}
