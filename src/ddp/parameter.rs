//! The variables of a model as DDP treats them.
use super::graph::Registration;
use super::options::DdpOptions;
use super::plan::ParameterInfo;
use candle_core::{DType, Shape, Tensor, Var};

/// A trainable variable, and the tensor that the model holds for it, possibly of another dtype.
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) var: Var,
    pub(super) held: HeldAs,
}

/// The tensor that a model computes with instead of a variable.
pub(super) enum HeldAs {
    /// A replica, if the model was built from a `VarBuilder`.
    Replica(Tensor),
    /// The variable itself, which appears in graphs.
    Variable(#[expect(dead_code, reason = "it is there to be dropped")] Registration),
}

/// A variable that is not trained.
pub(super) struct Frozen {
    pub(super) name: String,
    pub(super) var: Var,
    /// The tensor in another dtype that the model holds for it. None: the model shares the variable's storage.
    pub(super) converted: Option<Tensor>,
}

/// A variable without an averaged gradient.
pub(super) struct Buffer {
    pub(super) name: String,
    pub(super) var: Var,
}

/// All variables of a model, each kind in the order in which the model requested them.
#[derive(Default)]
pub(super) struct Variables {
    pub(super) parameters: Vec<Parameter>,
    pub(super) frozen: Vec<Frozen>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) ignored: Vec<Buffer>,
}

impl Parameter {
    pub(super) fn replica(&self) -> Option<&Tensor> {
        match &self.held {
            HeldAs::Replica(replica) => Some(replica),
            HeldAs::Variable(_) => None,
        }
    }

    /// The shape of the whole parameter, of which the variable may be a piece.
    pub(super) fn shape(&self) -> &Shape {
        self.replica().map_or(self.var.shape(), Tensor::shape)
    }

    /// The dtype in which the model computes with it.
    pub(super) fn held_as(&self) -> DType {
        self.replica().map_or(self.var.dtype(), Tensor::dtype)
    }

    /// `block` is the block to which it belongs, under sharding.
    pub(super) fn info(&self, options: &DdpOptions, block: Option<usize>) -> ParameterInfo {
        let dtype = options.buckets.reduce_dtype.unwrap_or(self.held_as());
        ParameterInfo {
            name: self.name.clone(),
            shape: self.shape().clone(),
            block,
            dtype,
            arrives_as: self.held_as(),
            leaves_as: if options.buckets.keep_low_precision_grads { dtype } else { self.var.dtype() },
            device: self.var.device().clone(),
            may_be_unused: options.unused.allows(&self.name),
        }
    }
}

impl Variables {
    /// The variables that are the same on all ranks, with their names.
    pub(super) fn shared(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.without_buffers().chain(self.buffers.iter().map(|Buffer { name, var }| (name, var)))
    }

    /// Whether a variable of this name is ignored.
    pub(super) fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored.name == name)
    }

    pub(super) fn without_buffers(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.named_parameters().chain(self.frozen.iter().map(|Frozen { name, var, .. }| (name, var)))
    }

    pub(super) fn named_parameters(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.parameters.iter().map(|Parameter { name, var, .. }| (name, var))
    }
}
