//! Options of the cross entropy.
use candle_core::Tensor;

/// Options of [`cross_entropy_with`](crate::cross_entropy_with). The default is PyTorch's.
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions {
    /// A weight for each class, of shape (C). `None`, the default: all classes have the same weight. Weights that require a
    /// gradient are refused.
    pub weight: Option<Tensor>,
    /// Targets with this value are ignored; −100 by default.
    pub ignore_index: i64,
    /// The share of the target that is spread over all classes, from 0 (the default) to 1.
    pub label_smoothing: f64,
    /// How the losses of the samples are reduced; by default to their mean.
    pub reduction: Reduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self { weight: None, ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Mean }
    }
}

/// How the losses of the samples are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum, divided by the sum of the weights of the samples' targets: without class weights, by the number of
    /// samples that are not ignored.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}
