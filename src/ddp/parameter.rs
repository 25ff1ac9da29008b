//! The variables of a model, as DDP sees them.
use super::bucket::ParameterInfo;
use candle_core::{DType, Tensor, Var};

/// A trainable variable, and the tensor that the model holds for it; its dtype may be another one.
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) var: Var,
    /// None for models that were not built from a `VarBuilder`: they hold the variable itself.
    pub(super) replica: Option<Tensor>,
}

/// A variable without an averaged gradient.
pub(super) struct Buffer {
    pub(super) name: String,
    pub(super) var: Var,
}

/// How DDP treats a variable.
pub(super) enum Role {
    /// Its gradient is averaged over the ranks.
    Parameter,
    /// It has no gradient; rank 0's value is broadcast.
    Buffer,
    /// It is each rank's own business.
    Ignored,
}

impl Parameter {
    /// The dtype with which the model computes.
    pub(super) fn held_as(&self) -> DType {
        self.replica.as_ref().map_or(self.var.dtype(), Tensor::dtype)
    }

    pub(super) fn info(&self, reduce_dtype: Option<DType>) -> ParameterInfo {
        ParameterInfo {
            name: self.name.clone(),
            shape: self.var.shape().clone(),
            dtype: reduce_dtype.unwrap_or(self.held_as()),
            arrives_as: self.held_as(),
            leaves_as: self.var.dtype(),
            device: self.var.device().clone(),
        }
    }
}
