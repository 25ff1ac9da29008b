//! The variables of a model, as DDP sees them.
use super::bucket::ParameterInfo;
use super::graph::Registration;
use candle_core::{DType, Tensor, Var};

/// A trainable variable, and the tensor that the model holds for it; its dtype may be another one.
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) held: HeldAs,
}

/// What a model computes with in place of a variable.
pub(super) enum HeldAs {
    /// A replica, of a model that was built from a `VarBuilder`.
    Replica(Tensor),
    /// The variable itself, which graphs contain.
    Variable(#[expect(dead_code, reason = "it is there to be dropped")] Registration),
}

/// A variable that is not trained.
pub(super) struct Frozen {
    pub(super) name: String,
    pub(super) var: Var,
    /// The tensor in another dtype that the model holds for it. None: it holds the variable's own elements.
    pub(super) converted: Option<Tensor>,
}

/// A variable without an averaged gradient.
pub(super) struct Buffer {
    pub(super) name: String,
    pub(super) var: Var,
}

/// All variables of a model, each kind in the order in which the model asked for them.
#[derive(Default)]
pub(super) struct Variables {
    pub(super) parameters: Vec<Parameter>,
    pub(super) frozen: Vec<Frozen>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) ignored: Vec<Buffer>,
}

/// How DDP treats a variable.
pub(super) enum Role {
    /// Its gradient is averaged over the ranks.
    Parameter,
    /// It stays as it is.
    Frozen,
    /// It has no gradient; rank 0's value is broadcast.
    Buffer,
    /// It is each rank's own business.
    Ignored,
}

impl Parameter {
    pub(super) fn replica(&self) -> Option<&Tensor> {
        match &self.held {
            HeldAs::Replica(replica) => Some(replica),
            HeldAs::Variable(_) => None,
        }
    }

    /// The dtype with which the model computes.
    pub(super) fn held_as(&self) -> DType {
        self.replica().map_or(self.var.dtype(), Tensor::dtype)
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

impl Variables {
    /// The variables of which all ranks have the same, with their names.
    pub(super) fn shared(&self) -> impl Iterator<Item = (&String, &Var)> {
        let parameters = self.parameters.iter().map(|Parameter { name, var, .. }| (name, var));
        let frozen = self.frozen.iter().map(|Frozen { name, var, .. }| (name, var));
        parameters.chain(frozen).chain(self.buffers.iter().map(|Buffer { name, var }| (name, var)))
    }
}
