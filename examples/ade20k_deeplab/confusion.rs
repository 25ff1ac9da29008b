//! How well labels are predicted, over all ranks.
use candle_core::{DType, Device, Tensor};
use candle_ddp::vision::IGNORE_INDEX;
use candle_ddp::{ProcessGroup, ReduceOp, Result};

/// For each class (rows), how many of its pixels were predicted to be of each class (columns).
pub(crate) struct ConfusionMatrix {
    classes: usize,
    counts: Vec<i64>,
}

impl ConfusionMatrix {
    pub(crate) fn new(classes: usize) -> Self {
        Self { classes, counts: vec![0; classes * classes] }
    }

    /// Counts the pixels of predictions u32[B, H, W] whose labels u8[B, H, W] are not to be ignored.
    pub(crate) fn add(&mut self, predictions: &Tensor, labels: &Tensor) -> Result<()> {
        let predictions = predictions.flatten_all()?.to_vec1::<u32>()?;
        let labels = labels.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>()?;
        for (prediction, label) in predictions.into_iter().zip(labels) {
            if i64::from(label) != IGNORE_INDEX {
                self.counts[label as usize * self.classes + prediction as usize] += 1;
            }
        }
        Ok(())
    }

    /// Adds up the counts of all ranks.
    pub(crate) fn all_reduce(&mut self, pg: &ProcessGroup) -> Result<()> {
        let counts = Tensor::new(self.counts.as_slice(), &Device::Cpu)?.to_device(pg.device())?;
        pg.all_reduce(&counts, ReduceOp::Sum)?;
        self.counts = counts.to_vec1()?;
        Ok(())
    }

    /// Returns the mean over all classes of intersection over union. Classes that neither the labels nor the predictions
    /// have do not count.
    pub(crate) fn mean_iou(&self) -> f64 {
        let row = |class: usize| self.counts[class * self.classes..][..self.classes].iter().sum::<i64>();
        let column = |class: usize| self.counts[class..].iter().step_by(self.classes).sum::<i64>();
        let hits = |class: usize| self.counts[class * (self.classes + 1)];
        let ious = (0..self.classes).filter_map(|class| {
            let union = row(class) + column(class) - hits(class);
            (union > 0).then(|| hits(class) as f64 / union as f64)
        });
        let ious: Vec<f64> = ious.collect();
        ious.iter().sum::<f64>() / ious.len().max(1) as f64
    }

    /// Returns the fraction of the pixels whose class was predicted.
    pub(crate) fn pixel_accuracy(&self) -> f64 {
        let hits: i64 = self.counts.iter().step_by(self.classes + 1).sum();
        hits as f64 / self.counts.iter().sum::<i64>().max(1) as f64
    }
}
