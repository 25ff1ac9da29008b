//! The connectionist temporal classification loss, as one operation.
mod alignments;

use super::cross_entropy::Reduction;
use alignments::Alignments;
use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::error::describe;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Error, accumulator, dispatch, vectorise};
use rayon::prelude::*;

/// Options of [`ctc_loss`]. The default is PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CtcLossOptions {
    /// The class that stands for no label; 0 by default.
    pub blank: usize,
    /// [`Mean`](Reduction::Mean), the default, divides each sample's loss by the length of its target, or by 1 if it is empty, and takes
    /// the mean over the batch. `None` returns the losses of all samples, of shape (N).
    pub reduction: Option<Reduction>,
    /// Whether a sample whose loss is infinite, because its input is too short for its target, counts as a loss of 0 with a gradient of
    /// 0. By default it does not, and its gradient is NaN, unless the gradient of its loss is 0, as after `where_cond`: then its own is 0,
    /// where PyTorch's is NaN.
    pub zero_infinity: bool,
}

impl Default for CtcLossOptions {
    fn default() -> Self {
        Self { blank: 0, reduction: Some(Reduction::Mean), zero_infinity: false }
    }
}

/// −ln of the probability of all alignments of each target with its input: `torch.nn.functional.ctc_loss`, for speech and handwriting,
/// where nobody has said which label belongs to which time.
///
/// `log_probs` has the shape (T, N, C), or (T, C) for one sample, and the dtype f32, f64, f16 or bf16: the result of
/// [`log_softmax`](crate::log_softmax) over C. `targets` are classes of dtype u32, i64 or u8, none of which is the blank: (N, S) with
/// padding at the end of each row, or those of all samples one after the other. Of sample n, the first `input_lengths[n]` times and the
/// first `target_lengths[n]` labels count. The loss is f32 (f64 for f64), and is calculated in f64.
///
/// As in PyTorch, the gradient is that for the input of the `log_softmax`: e^`log_probs` minus the probability that an alignment has the
/// class at this time. `log_softmax` passes it on as it is. On CUDA, `log_probs` and its gradient are copied to the CPU and back, and the
/// loss is calculated there, so the program waits for the GPU.
///
/// ```
/// # use candle_core::{Device, Result, Tensor};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{CtcLossOptions, ctc_loss};
/// // At both times, blank and label 1 have the probability 1/2. Of the four alignments, "1 1", "1 -" and "- 1" say 1.
/// let log_probs = Tensor::full(0.5f32.ln(), (2, 1, 2), &Device::Cpu)?;
/// let targets = Tensor::new(&[[1u32]], &Device::Cpu)?;
/// let loss = ctc_loss(&log_probs, &targets, &[2], &[1], CtcLossOptions::default())?.to_scalar::<f32>()?;
/// assert!((loss + 0.75f32.ln()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`InvalidArgument`](Error::Base), carried by candle's error, for shapes and lengths that do not fit, targets of another dtype, which are no
/// classes, or are the blank; [`Error::UnsupportedDType`].
pub fn ctc_loss(
    log_probs: &Tensor,
    targets: &Tensor,
    input_lengths: &[usize],
    target_lengths: &[usize],
    options: CtcLossOptions,
) -> Result<Tensor> {
    let (times, batch, classes) = match *log_probs.dims() {
        [times, batch, classes] => (times, batch, classes),
        [times, classes] => (times, 1, classes),
        _ => {
            let is = describe(log_probs.dtype(), log_probs.shape());
            let reason = format!("they must be (T, N, C), or (T, C) for one sample, not {is}");
            return Err(Error::invalid("log_probs of ctc_loss", reason).into());
        }
    };
    let CtcLossOptions { blank, reduction, zero_infinity } = options;
    if blank >= classes {
        let reason = format!("it must be a class, less than {classes}, but is {blank}");
        return Err(Error::invalid("blank", reason).into());
    }
    for (name, lengths) in [("input_lengths", input_lengths), ("target_lengths", target_lengths)] {
        if lengths.len() != batch {
            let reason = format!("there must be one for each of the {batch} samples, but there are {}", lengths.len());
            return Err(Error::invalid(name, reason).into());
        }
    }
    if let Some(length) = input_lengths.iter().find(|length| **length > times) {
        let reason = format!("each must be at most {times}, the number of times in log_probs, but one is {length}");
        return Err(Error::invalid("input_lengths", reason).into());
    }
    let labels = labels(targets, target_lengths, classes, blank)?;
    let values = log_probs.detach().to_device(&Device::Cpu)?.contiguous()?.reshape((times, batch, classes))?;
    let alignments = forward(&values, labels, input_lengths, blank)?;
    let losses = alignments.iter().map(|one| if zero_infinity && one.loss.is_infinite() { 0.0 } else { one.loss });
    let weights: Vec<f64> = match reduction {
        Some(Reduction::Mean) => target_lengths.iter().map(|length| 1.0 / (*length.max(&1) * batch) as f64).collect(),
        Some(Reduction::Sum) | None => vec![1.0; batch],
    };
    let y = match reduction {
        Some(Reduction::Mean) if batch == 0 => Tensor::new(f64::NAN, &Device::Cpu)?,
        Some(_) => Tensor::new(losses.zip(&weights).map(|(loss, weight)| loss * weight).sum::<f64>(), &Device::Cpu)?,
        None => Tensor::from_iter(losses, &Device::Cpu)?.reshape(&log_probs.dims()[1..log_probs.rank() - 1])?,
    };
    let y = y.to_device(log_probs.device())?;
    let y = snapshot_tensor(&y, accumulator(log_probs.dtype()))?;
    apply(&[log_probs], y, CtcLoss { log_probs: values, like: log_probs.detach(), alignments, weights, zero_infinity })
}

/// The labels of each sample.
fn labels(targets: &Tensor, lengths: &[usize], classes: usize, blank: usize) -> Result<Vec<Vec<usize>>> {
    const TARGETS: &str = "the targets of ctc_loss";
    let invalid = |reason| Err(Error::invalid(TARGETS, reason).into());
    if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return invalid(format!("their dtype must be u32, i64 or u8, not {}", targets.dtype().as_str()));
    }
    let (total, longest) = (lengths.iter().sum::<usize>(), lengths.iter().max().copied().unwrap_or(0));
    let values = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let row = match *targets.dims() {
        [rows, row] if rows == lengths.len() && row >= longest => Some(row),
        [all] if all == total => None,
        _ => {
            let is = describe(targets.dtype(), targets.shape());
            return invalid(format!(
                "they must be ({}, S) with S at least {longest}, the largest of target_lengths, or ({total}), their sum, not {is}",
                lengths.len()
            ));
        }
    };
    let mut start = 0;
    let mut samples = Vec::with_capacity(lengths.len());
    for length in lengths {
        let sample = &values[start..start + length];
        if let Some(label) =
            sample.iter().find(|label| !(0..classes as i64).contains(*label) || **label == blank as i64)
        {
            return invalid(format!(
                "every label must be a class from 0 to {}, but not the blank, {blank}; one is {label}",
                classes - 1
            ));
        }
        samples.push(sample.iter().map(|label| *label as usize).collect());
        start += row.unwrap_or(*length);
    }
    Ok(samples)
}

fn forward(log_probs: &Tensor, labels: Vec<Vec<usize>>, lengths: &[usize], blank: usize) -> Result<Vec<Alignments>> {
    let (_, batch, classes) = log_probs.dims3()?;
    dispatch!(log_probs.dtype(), "ctc_loss", T => with_slice::<T, _>(log_probs, |log_probs| {
        let samples = labels.into_par_iter().zip(lengths).enumerate();
        Ok(samples.map(|(sample, (labels, length))| {
            let log_prob = |time: usize, class: usize| log_probs[(time * batch + sample) * classes + class].to_f64();
            Alignments::new(labels, *length, blank, log_prob)
        }).collect())
    }))
}

/// The function of log_probs.
struct CtcLoss {
    /// On the CPU, (T, N, C).
    log_probs: Tensor,
    /// The argument: the gradient has its shape and device.
    like: Tensor,
    alignments: Vec<Alignments>,
    /// The weight of each sample's loss in the result, or in its element.
    weights: Vec<f64>,
    zero_infinity: bool,
}

impl Function for CtcLoss {
    fn name(&self) -> &'static str {
        "ctc-loss"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { log_probs, like, alignments, weights, zero_infinity } = self;
        let (times, batch, classes) = log_probs.dims3()?;
        let of_losses = gradient.to_dtype(DType::F64)?.broadcast_as(batch)?.to_vec1::<f64>()?;
        let factors: Vec<f64> = of_losses.iter().zip(weights).map(|(gradient, weight)| gradient * weight).collect();
        let gradient = dispatch!(log_probs.dtype(), "ctc_loss", T => with_slice::<T, _>(log_probs, |log_probs| {
            type Acc = <T as Element>::Real;
            let occupied: Vec<Vec<f64>> = alignments.par_iter().enumerate().map(|(sample, one)| {
                let log_prob = |time: usize, class: usize| log_probs[(time * batch + sample) * classes + class].to_f64();
                one.occupied(log_prob)
            }).collect();
            let mut gradient = vec![T::from_f64(0.0); log_probs.len()];
            let row = (batch * classes).max(1);
            gradient.par_chunks_mut(row).zip(log_probs.par_chunks(row)).enumerate().each(|(time, (row, x))| {
                let mut probabilities = vec![Acc::default(); classes];
                let rows = row.chunks_mut(classes).zip(x.chunks(classes)).zip(alignments).zip(&occupied).zip(&factors);
                for ((((row, x), one), occupied), factor) in rows {
                    // A sample whose loss does not count has none, whatever its loss is.
                    let is_zero = *factor == 0.0 || *zero_infinity && one.loss.is_infinite();
                    if time >= one.length || is_zero {
                        continue;
                    }
                    vectorise!(|| probabilities.iter_mut().zip(x).for_each(|(p, x)| *p = x.widen().exp()));
                    for (class, occupied) in one.classes().zip(&occupied[time * one.states()..]) {
                        probabilities[class] -= Acc::from_f64(*occupied);
                    }
                    // NaN if there is no alignment.
                    let factor = Acc::from_f64(if one.loss.is_infinite() { f64::NAN } else { *factor });
                    vectorise!(|| row.iter_mut().zip(&probabilities).for_each(|(to, p)| *to = T::narrow(*p * factor)));
                }
            });
            Tensor::from_vec(gradient, (times, batch, classes), &Device::Cpu)
        }))?;
        Ok(vec![Some(gradient.reshape(like.shape())?.to_device(like.device())?)])
    }
}
