//! The losses of rows of logits.
use super::layer::Layer;
use crate::cross_entropy::{CrossEntropyOptions, Reduction};
use crate::embedding::wide_indices;
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::kernels::{self, Address, Grid, Kernel, Launch, Output, Temporary, address, address_or_none};
use std::ops::Range;

pub(super) struct Losses<'a> {
    layer: &'a Layer,
    targets: Tensor,
    weights: Option<Tensor>,
    ignore_index: i64,
    is_mean: bool,
    smoothing: f64,
    /// For each sample its loss, and the weight of its target.
    pairs: Temporary,
    /// The factor of sums over samples, and the sum of the classes' weights.
    scale: Output,
}

impl<'a> Losses<'a> {
    pub(super) fn new(layer: &'a Layer, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Self> {
        let weights = match &options.weight {
            Some(weight) => Some(weight.detach().to_dtype(accumulator(layer.dtype()))?.contiguous()?),
            None => None,
        };
        let of = Self {
            layer,
            targets: wide_indices(targets)?,
            weights,
            ignore_index: options.ignore_index,
            is_mean: options.reduction == Reduction::Mean,
            smoothing: options.label_smoothing,
            pairs: Temporary::new(&layer.device, DType::F64, 2 * layer.rows)?,
            scale: Output::new(&layer.device, DType::F64, 2)?,
        };
        of.launch_total(Kernel::LossScale, address(&of.targets)?, Address::NONE)?;
        Ok(of)
    }

    /// Calculates the losses of some samples from their logits, which their gradients replace if these are wanted.
    pub(super) fn launch(&self, logits: &Output, samples: Range<usize>, with_gradients: bool) -> Result<()> {
        let Layer { ref device, classes, .. } = *self.layer;
        let (dtype, logits) = (self.layer.dtype(), logits.address()?);
        let vector = Address::vector(&[logits], 0, dtype);
        let lanes = kernels::lanes(classes, vector);
        let blocks = kernels::blocks_of_rows(samples.len(), lanes);
        let (kernel, scale) = match with_gradients {
            true => (Kernel::LossesAndSlopesOfRows, self.scale.address()?),
            false => (Kernel::LossesOfRows, Address::NONE),
        };
        let tensors = [
            logits,
            address(&self.targets)?.skip(samples.start, DType::I64),
            address_or_none(self.weights.as_ref())?,
            Address::NONE,
            self.pairs.address()?.skip(2 * samples.start, DType::F64),
            scale,
        ];
        let numbers = &self.numbers(samples.len(), vector > 1, lanes);
        let (grid, reals) = (Grid::Blocks(blocks), &[self.smoothing]);
        Ok(kernels::launch(device, Launch { kernel, dtype, grid, tensors: &tensors, numbers, reals })?)
    }

    /// Returns the loss, and the factor of sums over samples.
    pub(super) fn total(self) -> Result<(Output, Output)> {
        let loss = Output::new(&self.layer.device, accumulator(self.layer.dtype()), ())?;
        self.launch_total(Kernel::LossTotal, self.pairs.address()?, loss.address()?)?;
        Ok((loss, self.scale))
    }

    fn launch_total(&self, kernel: Kernel, from: Address, loss: Address) -> Result<()> {
        let dtype = accumulator(self.layer.dtype());
        let tensors = [from, loss, address_or_none(self.weights.as_ref())?, self.scale.address()?];
        let numbers = &self.numbers(self.layer.rows, false, 1);
        let launch = Launch { kernel, dtype, grid: Grid::Blocks(1), tensors: &tensors, numbers, reals: &[] };
        Ok(kernels::launch(&self.layer.device, launch)?)
    }

    /// `Rows` and `Losses` of softmax.cu.
    fn numbers(&self, samples: usize, are_aligned: bool, lanes: usize) -> [usize; 9] {
        let [is_mean, are_aligned] = [self.is_mean, are_aligned].map(usize::from);
        // The bits of a signed number.
        let ignore = self.ignore_index as usize;
        [samples, self.layer.classes, 1, ignore, is_mean, are_aligned, lanes, 1, self.layer.stride]
    }
}
