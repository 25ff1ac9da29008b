//! How often each class was taken for each, and the metrics that follow.
use super::{check_class, classes, ratio};
use crate::backend::ReduceOp;
use crate::error::describe;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// How a metric of several classes becomes one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// The average over all samples together.
    Micro,
    /// The mean over the classes that were targets or predictions.
    Macro,
    /// The mean over these classes, weighted by how often each was the target.
    Weighted,
}

/// How often each class was predicted for each target: torchmetrics' `MulticlassConfusionMatrix`, with the metrics that follow from it,
/// which are `MulticlassAccuracy`, `MulticlassPrecision`, `MulticlassRecall`, `MulticlassF1Score` and `MulticlassJaccardIndex` (the mean
/// intersection over union). A metric of no samples is NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfusionMatrix {
    classes: usize,
    ignore_index: Option<i64>,
    /// Row by row: a row for each target, a column for each prediction.
    counts: Vec<i64>,
}

impl ConfusionMatrix {
    /// An empty matrix for `classes` classes.
    pub fn new(classes: usize) -> Self {
        Self { classes, ignore_index: None, counts: vec![0; classes * classes] }
    }

    /// Does not count samples with the target `ignore_index`, which need not be a class.
    pub fn with_ignore_index(self, ignore_index: i64) -> Self {
        Self { ignore_index: Some(ignore_index), ..self }
    }

    /// Counts a batch of `targets`, of shape (N, …) and dtype u8, u32 or i64. `predictions` are logits or probabilities of shape
    /// (N, classes, …), of which the largest is the prediction, or classes of the targets' shape. Waits for the device.
    /// Gradients end here.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other shapes and dtypes, NaN, and classes that do not exist. Then nothing is counted.
    pub fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        let predicted = self.predicted(&predictions.detach(), targets)?;
        let mut pairs = Vec::new();
        for (target, prediction) in classes(targets)?.into_iter().zip(classes(&predicted)?) {
            if Some(target) != self.ignore_index {
                let target = check_class("targets", target, self.classes)?;
                pairs.push(target * self.classes + check_class("predictions", prediction, self.classes)?);
            }
        }
        pairs.into_iter().for_each(|pair| self.counts[pair] += 1);
        Ok(())
    }

    /// The predicted classes.
    fn predicted(&self, predictions: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let dims = targets.dims();
        if predictions.dims() == dims && !predictions.dtype().is_float() {
            return Ok(predictions.clone());
        }
        let fits = |(first, rest): (&usize, &[usize])| {
            let expected: Vec<usize> = [*first, self.classes].into_iter().chain(rest.iter().copied()).collect();
            predictions.dims() == expected && predictions.dtype().is_float()
        };
        if !dims.split_first().is_some_and(fits) {
            let [predictions, targets] = [predictions, targets].map(|tensor| describe(tensor.dtype(), tensor.shape()));
            let reason = format!(
                "they must be numbers of shape (N, {}, …) or classes of the targets' shape, (N, …), not {predictions} for targets of {targets}",
                self.classes
            );
            return Err(Error::invalid("predictions", reason));
        }
        if targets.elem_count() == 0 {
            return Ok(targets.clone());
        }
        // Only NaN differs from itself.
        let undefined = predictions.ne(predictions)?.to_dtype(DType::U32)?.sum_all()?.to_scalar::<u32>()?;
        if undefined > 0 {
            return Err(Error::invalid("predictions", format!("{undefined} of them are NaN")));
        }
        Ok(predictions.argmax(1)?)
    }

    /// The sum over all ranks, which must have the same number of classes.
    ///
    /// # Errors
    /// Returns errors of the group.
    #[track_caller]
    pub fn all_reduce(&self, pg: &ProcessGroup) -> Result<Self> {
        let counts = Tensor::from_slice(&self.counts, self.counts.len(), pg.device())?;
        pg.all_reduce_async(&counts, ReduceOp::Sum)?.synchronize()?;
        Ok(Self { counts: counts.to_vec1()?, ..self.clone() })
    }

    /// How often `prediction` was predicted for `target`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for classes that do not exist.
    pub fn count(&self, target: usize, prediction: usize) -> Result<u64> {
        let class = |name, class: usize| check_class(name, i64::try_from(class).unwrap_or(-1), self.classes);
        Ok(self.counts[class("target", target)? * self.classes + class("prediction", prediction)?].unsigned_abs())
    }

    /// The part of the samples that was predicted right; with [`Average::Macro`], the mean of [`recall`](Self::recall).
    pub fn accuracy(&self, average: Average) -> f64 {
        self.recall(average)
    }

    /// The share of the predictions of a class that were right.
    pub fn precision(&self, average: Average) -> f64 {
        self.mean(average, |of| (of.hits, of.predictions))
    }

    /// The share of the samples of a class that were predicted right.
    pub fn recall(&self, average: Average) -> f64 {
        self.mean(average, |of| (of.hits, of.targets))
    }

    /// The harmonic mean of precision and recall.
    pub fn f1(&self, average: Average) -> f64 {
        self.mean(average, |of| (2. * of.hits, of.targets + of.predictions))
    }

    /// The intersection over union of predictions and targets: the Jaccard index.
    pub fn iou(&self, average: Average) -> f64 {
        self.mean(average, |of| (of.hits, of.targets + of.predictions - of.hits))
    }

    fn mean(&self, average: Average, metric: impl Fn(Class) -> (f64, f64)) -> f64 {
        let all = self.by_class();
        if average == Average::Micro {
            let parts = all.into_iter().map(metric);
            let (of, whole) = parts.fold((0., 0.), |(of, whole), part| (of + part.0, whole + part.1));
            return ratio(of, whole);
        }
        let (mut sum, mut weights) = (0., 0.);
        for class in all.into_iter().filter(|class| class.targets + class.predictions > 0.) {
            let weight = if average == Average::Weighted { class.targets } else { 1. };
            let (of, whole) = metric(class);
            // A class that is never predicted has precision 0.
            sum += weight * if whole == 0. { 0. } else { of / whole };
            weights += weight;
        }
        ratio(sum, weights)
    }

    fn by_class(&self) -> Vec<Class> {
        let at = |target: usize, prediction: usize| self.counts[target * self.classes + prediction] as f64;
        let all = 0..self.classes;
        let class = |class: usize| Class {
            hits: at(class, class),
            targets: all.clone().map(|prediction| at(class, prediction)).sum(),
            predictions: all.clone().map(|target| at(target, class)).sum(),
        };
        all.clone().map(class).collect()
    }
}

/// The counts of a class.
#[derive(Clone, Copy)]
struct Class {
    hits: f64,
    targets: f64,
    predictions: f64,
}
