//! The parameters that an optimizer trains.
use crate::ddp::DistributedDataParallel;
use candle_core::Var;

/// Parameters that are trained with the same options.
#[derive(Clone, Debug)]
pub struct ParameterGroup<R> {
    /// The parameters with their names.
    pub parameters: Vec<(String, Var)>,
    /// Their options.
    pub options: R,
}

/// The argument of [`FusedOptimizer::new`](super::FusedOptimizer::new): made from a `&DistributedDataParallel`, from
/// variables with names, or from variables without names.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub(super) variables: Vec<(String, Var)>,
    /// Whether the names are the caller's.
    pub(super) named: bool,
}

/// All [`named_parameters`](DistributedDataParallel::named_parameters).
impl<M> From<&DistributedDataParallel<M>> for Parameters {
    fn from(ddp: &DistributedDataParallel<M>) -> Self {
        ddp.named_parameters().into()
    }
}

impl From<Vec<(String, Var)>> for Parameters {
    fn from(variables: Vec<(String, Var)>) -> Self {
        Self { variables, named: true }
    }
}

/// An optimizer of these cannot be saved.
impl From<Vec<Var>> for Parameters {
    fn from(variables: Vec<Var>) -> Self {
        let number = |(index, var)| (format!("#{index}"), var);
        Self { variables: variables.into_iter().enumerate().map(number).collect(), named: false }
    }
}
