//! The area under the ROC curves of several classes.
use super::scores::{area, misfit};
use super::{Average, check_class, classes, floats, ratio};
use crate::process_group::{ProcessGroup, same_on_all};
use crate::{Error, Result};
use candle_core::Tensor;

/// The area under the ROC curve of each class against all others, exactly: torchmetrics' `MulticlassAUROC` without thresholds. Keeps all
/// scores, 4 bytes for each class of a sample.
///
/// A class that is the target of no sample, or of all, has no curve. Here its area is NaN and no part of an average; torchmetrics warns,
/// and takes the area for 0, also in the macro average.
#[derive(Clone, Debug)]
pub struct MulticlassAuroc {
    classes: usize,
    /// Row by row: the scores of each sample.
    scores: Vec<f32>,
    targets: Vec<usize>,
}

impl MulticlassAuroc {
    /// A metric for `classes` classes, without samples.
    pub fn new(classes: usize) -> Self {
        Self { classes, scores: Vec::new(), targets: Vec::new() }
    }

    /// Takes samples with `scores` of shape (N, classes), which are probabilities, such as the softmax of logits, and `targets` of shape
    /// (N) and dtype u8, u32 or i64. Waits for the device. Gradients end here.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other shapes and dtypes, NaN, scores outside of 0 to 1, and classes that do not exist. Then
    /// nothing is taken.
    pub fn update(&mut self, scores: &Tensor, targets: &Tensor) -> Result<()> {
        if targets.rank() != 1 || scores.dims() != [targets.elem_count(), self.classes] {
            return Err(misfit(&format!("(N, {})", self.classes), scores, targets));
        }
        let scores = floats("scores", &scores.detach())?;
        if let Some(score) = scores.iter().find(|score| !(0. ..=1.).contains(*score)) {
            // The curve of a class compares samples, whose logits have no common scale.
            let reason = format!("they must be probabilities, such as the softmax of logits, but one is {score}");
            return Err(Error::invalid("scores", reason));
        }
        let targets = classes(targets)?.into_iter().map(|class| check_class("targets", class, self.classes));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        self.scores.extend(scores);
        self.targets.extend(targets);
        Ok(())
    }

    /// The mean of the areas for the samples of all ranks, on every rank; NaN if no class has one. Every rank needs memory for all scores.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for [`Average::Micro`], and if ranks have different numbers of classes; and errors of the group.
    #[track_caller]
    pub fn compute(&self, pg: &ProcessGroup, average: Average) -> Result<f64> {
        if average == Average::Micro {
            let reason = "each class has a curve of its own, so it must be Average::Macro or Average::Weighted";
            return Err(Error::invalid("average", reason));
        }
        let (mut sum, mut weights) = (0., 0.);
        for (area, targets) in self.areas(pg)?.into_iter().filter(|(area, _)| !area.is_nan()) {
            let weight = if average == Average::Macro { 1. } else { targets };
            sum += weight * area;
            weights += weight;
        }
        Ok(ratio(sum, weights))
    }

    /// The area of each class for the samples of all ranks, on every rank: torchmetrics' `average="none"`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if ranks have different numbers of classes, and errors of the group.
    #[track_caller]
    pub fn compute_each(&self, pg: &ProcessGroup) -> Result<Vec<f64>> {
        Ok(self.areas(pg)?.into_iter().map(|(area, _)| area).collect())
    }

    /// The area of each class, and how often it is the target.
    #[track_caller]
    fn areas(&self, pg: &ProcessGroup) -> Result<Vec<(f64, f64)>> {
        let all = pg.all_gather_object(&(self.classes, self.scores.clone(), self.targets.clone()))?;
        same_on_all("classes", &all.iter().map(|(classes, ..)| *classes).collect::<Vec<_>>())?;
        let areas = (0..self.classes).map(|class| {
            let of_rank = |(_, scores, targets): &(_, Vec<f32>, Vec<usize>)| -> Vec<(f32, bool)> {
                let scores = scores.iter().copied().skip(class).step_by(self.classes);
                scores.zip(targets.iter().map(|target| *target == class)).collect()
            };
            let mut samples: Vec<(f32, bool)> = all.iter().flat_map(of_rank).collect();
            let targets = samples.iter().filter(|sample| sample.1).count() as f64;
            (area(&mut samples), targets)
        });
        Ok(areas.collect())
    }
}
