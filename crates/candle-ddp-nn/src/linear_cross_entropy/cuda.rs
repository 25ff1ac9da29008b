//! The head of a language model by cuBLAS and kernels of CUDA, which do not wait for the GPU.
mod layer;
mod losses;

use super::head::Head;
use crate::cross_entropy::CrossEntropyOptions;
use candle_core::{DType, Result, Shape, Tensor};
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::kernels::{self, Grid, Kernel, Launch, Output, Temporary, address, supported};
use layer::{Layer, Sums, scaled};
use losses::Losses;

/// The arguments have been checked.
pub(super) fn linear_cross_entropy(head: &Head, targets: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
    supported(head.x.dtype(), "linear_cross_entropy")?;
    let (rows, ..) = head.extents()?;
    let (needed, layer) = (head.needed(), Layer::new(head)?);
    let losses = Losses::new(&layer, targets, options)?;
    let with_gradients = needed.contains(&true);
    let (mut d_logits, mut sums) = (None, Sums::default());
    for start in (0..rows).step_by(head.chunk) {
        let samples = start..rows.min(start + head.chunk);
        let logits = layer.logits(samples.clone())?;
        losses.launch(&logits, samples.clone(), with_gradients)?;
        let logits = logits.into_tensor();
        if head.chunk >= rows {
            d_logits = Some(logits);
        } else if with_gradients {
            layer.add_gradients(&logits, samples, needed, &mut sums)?;
        }
    }
    let shapes: Vec<Shape> = head.arguments().into_iter().map(|argument| argument.shape().clone()).collect();
    let (loss, scale) = losses.total()?;
    let kept = match d_logits {
        Some(d_logits) => Kept::Logits(layer, d_logits),
        None => Kept::Sums(head.x.dtype(), sums),
    };
    apply(&head.arguments(), loss.into_result(), Gradients { kept, scale, shapes })
}

/// The backward pass scales or multiplies these gradients, which belong to a sum of losses with the gradient 1.
enum Kept {
    /// The gradients of the logits of all rows, and the layer that made the logits.
    Logits(Layer, Tensor),
    /// The gradients of the arguments, and their dtype.
    Sums(DType, Sums),
}

struct Gradients {
    kept: Kept,
    /// The factor of sums over samples.
    scale: Output,
    /// The shapes of the arguments.
    shapes: Vec<Shape>,
}

impl Function for Gradients {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn backward(&self, gradient: &Tensor, needed: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let device = gradient.device().as_cuda_device()?;
        let scalars = Temporary::new(device, gradient.dtype(), 2)?;
        let tensors = [address(gradient)?, self.scale.address()?, scalars.address()?];
        let (kernel, grid) = (Kernel::LossFactor, Grid::Blocks(1));
        let launch = Launch { kernel, dtype: gradient.dtype(), grid, tensors: &tensors, numbers: &[], reals: &[] };
        kernels::launch(device, launch)?;
        let scalars = scalars.address()?;
        match &self.kept {
            Kept::Logits(layer, d_logits) => layer.gradients(d_logits, needed, &self.shapes, scalars),
            Kept::Sums(dtype, sums) => {
                let gradient = |((sums, shape), needed): ((&Option<Tensor>, &Shape), &bool)| match sums {
                    Some(sums) if *needed => Ok(Some(scaled(device, *dtype, sums, shape, scalars)?)),
                    // There are no rows.
                    None if *needed => Ok(Some(Output::zeros(device, *dtype, shape)?.into_tensor())),
                    _ => Ok(None),
                };
                sums.iter().zip(&self.shapes).zip(needed).map(gradient).collect()
            }
        }
    }
}
