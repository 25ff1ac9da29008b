//! The variables of a model as DDP treats them.
use crate::ddp::buckets::plan::ParameterInfo;
use crate::ddp::model::options::DdpOptions;
use crate::ddp::pass::graph::Registration;
use candle_core::{DType, Shape, Tensor, Var};

/// A trainable variable, and the tensor that the model holds for it, possibly of another dtype.
pub(in crate::ddp) struct Parameter {
    pub(in crate::ddp) name: String,
    pub(in crate::ddp) var: Var,
    pub(in crate::ddp) held: HeldAs,
}

/// The tensor that a model computes with instead of a variable.
pub(in crate::ddp) enum HeldAs {
    /// A replica, if the model was built from a `VarBuilder`.
    Replica(Tensor),
    /// The variable itself, which appears in graphs.
    Variable(#[expect(dead_code, reason = "it is there to be dropped")] Registration),
}

/// A variable that is not trained.
pub(in crate::ddp) struct Frozen {
    pub(in crate::ddp) name: String,
    pub(in crate::ddp) var: Var,
    /// The tensor in another dtype that the model holds for it. None: the model shares the variable's storage.
    pub(in crate::ddp) converted: Option<Tensor>,
}

/// A variable without an averaged gradient.
pub(in crate::ddp) struct Buffer {
    pub(in crate::ddp) name: String,
    pub(in crate::ddp) var: Var,
}

/// All variables of a model, each kind in the order in which the model requested them.
#[derive(Default)]
pub(in crate::ddp) struct Variables {
    pub(in crate::ddp) parameters: Vec<Parameter>,
    pub(in crate::ddp) frozen: Vec<Frozen>,
    pub(in crate::ddp) buffers: Vec<Buffer>,
    pub(in crate::ddp) ignored: Vec<Buffer>,
}

impl Parameter {
    pub(in crate::ddp) fn replica(&self) -> Option<&Tensor> {
        match &self.held {
            HeldAs::Replica(replica) => Some(replica),
            HeldAs::Variable(_) => None,
        }
    }

    /// The shape of the whole parameter. The variable may be a piece of it.
    pub(in crate::ddp) fn shape(&self) -> &Shape {
        self.replica().map_or(self.var.shape(), Tensor::shape)
    }

    /// The dtype in which the model computes with it.
    pub(in crate::ddp) fn held_as(&self) -> DType {
        self.replica().map_or(self.var.dtype(), Tensor::dtype)
    }

    /// `block` is the block to which it belongs, under sharding.
    pub(in crate::ddp) fn info(&self, options: &DdpOptions, block: Option<usize>) -> ParameterInfo {
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
    pub(in crate::ddp) fn shared(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.without_buffers().chain(self.buffers.iter().map(|Buffer { name, var }| (name, var)))
    }

    /// Whether a variable of this name is ignored.
    pub(in crate::ddp) fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| ignored.name == name)
    }

    pub(in crate::ddp) fn without_buffers(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.named_parameters().chain(self.frozen.iter().map(|Frozen { name, var, .. }| (name, var)))
    }

    pub(in crate::ddp) fn named_parameters(&self) -> impl Iterator<Item = (&String, &Var)> {
        self.parameters.iter().map(|Parameter { name, var, .. }| (name, var))
    }
}
