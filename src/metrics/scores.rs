//! Metrics of the order of scores.
use super::{check_class, classes, floats, ratio};
use crate::backend::ReduceOp;
use crate::error::describe;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::Tensor;

/// The part of the samples whose target is among the `k` classes with the largest scores: torchmetrics' `MulticlassAccuracy` with
/// `top_k` and `average="micro"`. Among equal scores, the first class counts as larger.
#[derive(Clone, Debug)]
pub struct TopKAccuracy {
    k: usize,
    hits: f64,
    samples: f64,
}

impl TopKAccuracy {
    /// A metric without samples.
    pub fn new(k: usize) -> Self {
        Self { k, hits: 0., samples: 0. }
    }

    /// Counts samples with `scores` of shape (N, classes) and `targets` of shape (N) and dtype u8, u32 or i64. Waits for the device.
    /// Gradients end here.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other shapes and dtypes, NaN, and classes that do not exist. Then nothing is counted.
    pub fn update(&mut self, scores: &Tensor, targets: &Tensor) -> Result<()> {
        let (rows, count) = match scores.dims() {
            &[rows, count] if targets.dims() == [rows] => (rows, count),
            _ => return Err(misfit("(N, classes)", scores, targets)),
        };
        let (scores, mut hits) = (floats("scores", &scores.detach())?, 0.);
        for (row, target) in classes(targets)?.into_iter().enumerate() {
            let target = check_class("targets", target, count)?;
            let scores = &scores[row * count..][..count];
            let own = scores[target];
            let is_before = |class: usize, score: f32| score > own || score == own && class < target;
            let before = scores.iter().enumerate().filter(|(class, score)| is_before(*class, **score)).count();
            hits += f64::from(u8::from(before < self.k));
        }
        (self.hits, self.samples) = (self.hits + hits, self.samples + rows as f64);
        Ok(())
    }

    /// The accuracy for the samples of all ranks, on every rank; NaN without any.
    ///
    /// # Errors
    /// Returns errors of the group.
    #[track_caller]
    pub fn compute(&self, pg: &ProcessGroup) -> Result<f64> {
        let [hits, samples] = pg.all_reduce_scalars([self.hits, self.samples], ReduceOp::Sum)?;
        Ok(ratio(hits, samples))
    }
}

/// The area under the ROC curve of two classes, exactly: torchmetrics' `BinaryAUROC` without thresholds. It is the probability that a
/// positive sample has a larger score than a negative one. Keeps all scores, 8 bytes for each.
#[derive(Clone, Debug, Default)]
pub struct BinaryAuroc {
    /// Scores, and whether the target is positive.
    samples: Vec<(f32, bool)>,
}

impl BinaryAuroc {
    /// A metric without samples.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes samples with `scores` and `targets` of the same shape; targets are 0 or 1, of any dtype. Waits for the device.
    /// Gradients end here.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other shapes and dtypes, NaN, and other targets. Then nothing is taken.
    pub fn update(&mut self, scores: &Tensor, targets: &Tensor) -> Result<()> {
        if scores.dims() != targets.dims() {
            return Err(misfit("the targets' shape", scores, targets));
        }
        let scores = floats("scores", &scores.detach())?;
        let targets = match targets.dtype().is_float() {
            true => floats("targets", &targets.detach())?.into_iter().map(whole).collect::<Result<_>>()?,
            false => classes(targets)?,
        };
        let targets = targets.into_iter().map(|class| Ok(check_class("targets", class, 2)? == 1));
        let targets = targets.collect::<Result<Vec<bool>>>()?;
        self.samples.extend(scores.into_iter().zip(targets));
        Ok(())
    }

    /// The area for the samples of all ranks, on every rank; NaN if all have the same target. Every rank needs memory for all scores.
    ///
    /// # Errors
    /// Returns errors of the group.
    #[track_caller]
    pub fn compute(&self, pg: &ProcessGroup) -> Result<f64> {
        let (scores, targets): (Vec<f32>, Vec<bool>) = self.samples.iter().copied().unzip();
        let all = pg.all_gather_object(&(scores, targets))?;
        let mut samples: Vec<(f32, bool)> =
            all.into_iter().flat_map(|(scores, targets)| scores.into_iter().zip(targets)).collect();
        Ok(area(&mut samples))
    }
}

/// A class that is given as a floating-point number.
fn whole(target: f32) -> Result<i64> {
    match target.fract() == 0. {
        true => Ok(target as i64),
        false => Err(Error::invalid("targets", format!("they must be 0 or 1, but one is {target}"))),
    }
}

/// The area under the ROC curve of samples with a score each, which are positive or not.
pub(super) fn area(samples: &mut [(f32, bool)]) -> f64 {
    samples.sort_by(|one, other| one.0.total_cmp(&other.0));
    let positives = samples.iter().filter(|sample| sample.1).count() as f64;
    let negatives = samples.len() as f64 - positives;
    // Pairs of which the positive is larger; of equal ones, half.
    let (mut pairs, mut smaller) = (0., 0.);
    for equal in samples.chunk_by(|one, other| one.0 == other.0) {
        let own = equal.iter().filter(|sample| sample.1).count() as f64;
        let others = equal.len() as f64 - own;
        pairs += own * (smaller + others / 2.);
        smaller += others;
    }
    ratio(pairs, positives * negatives)
}

pub(super) fn misfit(expected: &str, scores: &Tensor, targets: &Tensor) -> Error {
    let [scores, targets] = [scores, targets].map(|tensor| describe(tensor.dtype(), tensor.shape()));
    Error::invalid("scores", format!("they must have {expected}, not {scores} for targets of {targets}"))
}
