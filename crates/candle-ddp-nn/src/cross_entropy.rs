//! The cross entropy between logits and classes, as one operation.
mod cuda;
mod options;

pub use options::{CrossEntropyOptions, Reduction};

use super::softmax::{BLOCK_ELEMENTS, TILE, column_sums, extents, row_sum};
use super::view::contiguous;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::borrow::{slice, with_slice};
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::op1;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Real, dispatch, vectorise};
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

const TARGETS: &str = "the targets of cross_entropy";

/// The mean of −log softmax(logits)\[target\]: `torch.nn.functional.cross_entropy`, and a drop-in for
/// `candle_nn::loss::cross_entropy`. [`cross_entropy_with`] with the default options.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::cross_entropy;
/// let logits = Tensor::new(&[[0f32, 0.], [0., 3f32.ln()]], &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &Tensor::new(&[0u32, 1], &Device::Cpu)?)?.to_scalar::<f32>()?;
/// // The mean of −ln 1/2 and −ln 3/4.
/// assert!((loss + (0.5f32.ln() + 0.75f32.ln()) / 2.).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`cross_entropy_with`].
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, CrossEntropyOptions::default())
}

/// The cross entropy between logits and classes, as a scalar of dtype f32 (f64 for logits in f64), as under PyTorch's
/// autocast: `torch.nn.functional.cross_entropy`. One operation, which keeps one number per sample for the backward pass.
///
/// `logits` has the shape (N, C) or (N, C, d1, …) and the dtype f32, f64, f16 or bf16; calculated in f32 (f64 for
/// f64). `targets` has the shape (N) or (N, d1, …) and the dtype u32, i64 or u8: classes from 0 to C − 1, or
/// `ignore_index`. If all targets are ignored, the mean is NaN and the gradient zero.
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for shapes that do not fit, targets of another dtype or out
/// of range, a `label_smoothing` outside 0 to 1, and class weights that require a gradient, as in PyTorch;
/// [`Error::UnsupportedDType`]. On a GPU, where a check would force
/// a synchronisation, targets out of range make the loss NaN instead.
pub fn cross_entropy_with(logits: &Tensor, targets: &Tensor, options: CrossEntropyOptions) -> Result<Tensor> {
    let shape = logits.dims();
    if shape.len() < 2 || targets.dims() != [&shape[..1], &shape[2..]].concat() || shape[1] == 0 {
        let (logits, targets) = (describe(logits.dtype(), logits.shape()), describe(targets.dtype(), targets.shape()));
        let reason = format!("they must be (N, C, …) and (N, …) with C at least 1, not {logits} and {targets}");
        return Err(Error::invalid("logits and targets of cross_entropy", reason).into());
    }
    check(targets, shape[1], &options)?;
    if logits.device().is_cuda() {
        return cuda::cross_entropy(logits, targets, &options);
    }
    op1(&contiguous(logits)?, CrossEntropy::new(targets, shape[1], &options)?)
}

/// Refuses targets of other dtypes, and options that do not fit so many classes.
pub(crate) fn check(targets: &Tensor, classes: usize, options: &CrossEntropyOptions) -> Result<()> {
    let smoothing = options.label_smoothing;
    if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
        let reason = format!("their dtype must be u32, i64 or u8, not {}", targets.dtype().as_str());
        return Err(Error::invalid(TARGETS, reason).into());
    }
    if !(0.0..=1.0).contains(&smoothing) {
        return Err(Error::invalid("label_smoothing", format!("it must be from 0 to 1, not {smoothing}")).into());
    }
    if let Some(weight) = &options.weight
        && weight.dims() != [classes]
    {
        let weight = describe(weight.dtype(), weight.shape());
        let reason = format!("they must have the shape ({classes}), one weight per class, not {weight}");
        return Err(Error::invalid("the weights of cross_entropy", reason).into());
    }
    if options.weight.as_ref().is_some_and(|weight| weight.track_op() && !weight.is_variable()) {
        let reason = "they were computed from variables, and their gradient would end here: pass weight.detach()";
        return Err(Error::invalid("the weights of cross_entropy", reason).into());
    }
    Ok(())
}

thread_local! {
    /// Whether this thread has computed a mean over no targets.
    static NOTHING_COUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread has computed a cross entropy on a CPU whose mean no target counted in, since the last call.
pub fn take_nothing_counted() -> bool {
    NOTHING_COUNTED.take()
}

/// Stands for the target of a sample that is ignored.
const IGNORED: u32 = u32::MAX;

fn classes(targets: &Tensor, count: usize, ignore_index: i64) -> Result<Vec<u32>> {
    let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let class = |target: &i64| match u32::try_from(*target) {
        _ if *target == ignore_index => Ok(IGNORED),
        Ok(class) if (class as usize) < count => Ok(class),
        _ => {
            let reason = format!(
                "every target must be a class from 0 to {} or ignore_index, {ignore_index}, but one is {target}",
                count - 1
            );
            Err(Error::invalid(TARGETS, reason).into())
        }
    };
    targets.iter().map(class).collect()
}

/// Without label smoothing: p × `by_p`.
fn gradient_row<T: Element>(dx: &mut [T], x: &[T], norm: T::Real, by_p: T::Real) {
    vectorise!(move || {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = T::narrow((x.widen() - norm).exp() * by_p);
        }
    })
}

/// p × `by_p` − weight × `by_weight` for neighbouring samples, whose classes are `inner` elements apart.
fn gradient_tile<T: Element>(dx: &mut [T], x: &[T], inner: usize, weights: &[T::Real], factors: [&[T::Real]; 3]) {
    vectorise!(move || {
        let [norm, by_p, by_weight] = factors;
        let count = norm.len();
        for ((dx, x), weight) in dx.chunks_mut(inner).zip(x.chunks(inner)).zip(weights) {
            let elements = dx[..count].iter_mut().zip(&x[..count]).zip(norm).zip(by_p).zip(by_weight);
            for ((((dx, x), norm), by_p), by_weight) in elements {
                *dx = T::narrow((x.widen() - *norm).exp() * *by_p - *by_weight * *weight);
            }
        }
    })
}

pub(crate) struct CrossEntropy {
    targets: Vec<u32>,
    weights: Arc<[f64]>,
    smoothing: f64,
    /// The factor of sums over samples.
    pub(crate) scale: f64,
    /// log Σ e^x of each sample.
    normalisers: OnceLock<Vec<f64>>,
}

impl CrossEntropy {
    /// The loss of `targets`, after [`check`].
    pub(crate) fn new(targets: &Tensor, count: usize, options: &CrossEntropyOptions) -> Result<Self> {
        let targets = classes(targets, count, options.ignore_index)?;
        let weights: Arc<[f64]> = match &options.weight {
            Some(weight) => weight.to_dtype(DType::F64)?.to_vec1()?.into(),
            None => vec![1.0; count].into(),
        };
        let total: f64 = targets.iter().filter_map(|target| weights.get(*target as usize)).sum();
        let scale = if options.reduction == Reduction::Mean { 1.0 / total } else { 1.0 };
        if total == 0. && options.reduction == Reduction::Mean {
            NOTHING_COUNTED.set(true);
        }
        Ok(Self { targets, weights, smoothing: options.label_smoothing, scale, normalisers: OnceLock::new() })
    }

    /// The loss of some of its samples, with another factor.
    pub(crate) fn part(&self, samples: Range<usize>, scale: f64) -> Self {
        let (targets, weights) = (self.targets[samples].to_vec(), Arc::clone(&self.weights));
        Self { targets, weights, smoothing: self.smoothing, scale, normalisers: OnceLock::new() }
    }

    /// The weights of the target's and of every class's negative log-probability.
    fn shares(&self, target: u32) -> (f64, f64) {
        match self.weights.get(target as usize) {
            Some(weight) => (weight * (1.0 - self.smoothing), self.smoothing / self.weights.len() as f64),
            None => (0.0, 0.0),
        }
    }

    /// The sum of the samples' losses, without the factor.
    pub(crate) fn sum<T: Element>(&self, x: &[T], shape: &Shape) -> f64 {
        let (classes, inner, block) = extents(shape, 1);
        let total_weight: f64 = self.weights.iter().sum();
        let mut normalisers = vec![0.0; self.targets.len()];
        // The loss of one sample, whose logits are `inner` elements apart.
        let loss = |x: &[T], target: u32, normaliser: f64| {
            let (own, each) = self.shares(target);
            let value = |class: usize| x[class * inner].widen().to_f64();
            let mut loss = if target == IGNORED { 0.0 } else { own * (normaliser - value(target as usize)) };
            if each > 0.0 {
                let sum: f64 = (0..classes).map(|class| self.weights[class] * value(class)).sum();
                loss += each * (total_weight * normaliser - sum);
            }
            loss
        };
        let blocks = x.par_chunks_exact(block).zip(self.targets.par_chunks_exact(inner));
        let blocks = blocks.zip(normalisers.par_chunks_exact_mut(inner));
        let zero = T::Real::from_f64(0.0);
        let scratch = || vec![zero; if inner == 1 { classes } else { 2 * TILE }];
        let blocks = blocks.with_min_len((BLOCK_ELEMENTS / block).max(1));
        let mut losses = vec![0.0; self.targets.len() / inner];
        blocks.zip(&mut losses).each_with(scratch, |scratch, (((x, targets), normalisers), of_block)| {
            if inner == 1 {
                let (max, sum) = row_sum(x, scratch);
                normalisers[0] = max.to_f64() + sum.to_f64().ln();
            } else {
                let (max, sums) = scratch.split_at_mut(TILE);
                for (tile, normalisers) in normalisers.chunks_mut(TILE).enumerate() {
                    let (max, sums) = (&mut max[..normalisers.len()], &mut sums[..normalisers.len()]);
                    column_sums(&x[tile * TILE..], inner, max, sums);
                    for ((normaliser, max), sum) in normalisers.iter_mut().zip(&*max).zip(&*sums) {
                        *normaliser = max.to_f64() + sum.to_f64().ln();
                    }
                }
            }
            let samples = targets.iter().zip(&*normalisers).enumerate();
            *of_block = samples.map(|(index, (target, normaliser))| loss(&x[index..], *target, *normaliser)).sum();
        });
        // Block by block, so that the result does not depend on the number of threads.
        let total: f64 = losses.iter().sum();
        let _ = self.normalisers.set(normalisers);
        total
    }

    pub(crate) fn backward<T: Element>(&self, x: &[T], shape: &Shape, gradient: f64) -> Result<Vec<T>> {
        let Some(normalisers) = self.normalisers.get() else {
            candle_core::bail!("cross_entropy's forward pass did not run")
        };
        let (_, inner, block) = extents(shape, 1);
        let total_weight: f64 = self.weights.iter().sum();
        let zero = T::Real::from_f64(0.0);
        let weights: Vec<_> = self.weights.iter().map(|weight| T::Real::from_f64(*weight)).collect();
        let mut dx = vec![T::from_f64(0.0); x.len()];
        let blocks = dx.par_chunks_exact_mut(block).zip(x.par_chunks_exact(block));
        let blocks = blocks.zip(self.targets.par_chunks_exact(inner)).zip(normalisers.par_chunks_exact(inner));
        blocks.with_min_len((BLOCK_ELEMENTS / block).max(1)).each(|(((dx, x), targets), normalisers)| {
            // For each sample: its normaliser, and the factors of the classes' probabilities and weights.
            let (mut norm, mut by_p, mut by_weight) = ([zero; TILE], [zero; TILE], [zero; TILE]);
            for (tile, targets) in targets.chunks(TILE).enumerate() {
                let (start, count) = (tile * TILE, targets.len());
                for (index, target) in targets.iter().enumerate() {
                    let (own, each) = self.shares(*target);
                    let factor = if *target == IGNORED { 0.0 } else { gradient * self.scale };
                    norm[index] = T::Real::from_f64(normalisers[start + index]);
                    by_p[index] = T::Real::from_f64(factor * (own + each * total_weight));
                    by_weight[index] = T::Real::from_f64(factor * each);
                }
                let (norm, by_p, by_weight) = (&norm[..count], &by_p[..count], &by_weight[..count]);
                let (dx_tile, x_tile) = (&mut dx[start..], &x[start..]);
                if inner == 1 && by_weight[0] == zero {
                    gradient_row(dx_tile, x_tile, norm[0], by_p[0]);
                } else {
                    gradient_tile(dx_tile, x_tile, inner, &weights, [norm, by_p, by_weight]);
                }
                for (index, target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORED) {
                    let (element, class) = (*target as usize * inner + start + index, *target as usize);
                    let probability = (x[element].widen() - norm[index]).exp() * by_p[index];
                    let own = gradient * self.scale * self.shares(*target).0;
                    let weight = T::Real::from_f64(own) + by_weight[index] * T::Real::from_f64(self.weights[class]);
                    dx[element] = T::narrow(probability - weight);
                }
            }
        });
        Ok(dx)
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let loss = dispatch!(x.dtype(), self.name(), T => {
            type Wide = <T as Element>::Real;
            let loss = self.sum(slice::<T>(x, layout)?, layout.shape()) * self.scale;
            Ok(Wide::to_cpu_storage_owned(vec![Wide::from_f64(loss)]))
        })?;
        Ok((loss, Shape::from(())))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        dispatch!(x.dtype(), self.name(), T => {
            let dx = with_slice::<T, _>(x, |x_values| self.backward(x_values, x.shape(), gradient))?;
            Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
        })
    }
}
