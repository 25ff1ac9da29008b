//! Groups of parameters.
use candle_core::Var;

/// Parameters that are trained with the same options.
#[derive(Clone, Debug)]
pub struct ParameterGroup<R> {
    /// The parameters with their names.
    pub parameters: Vec<(String, Var)>,
    /// Their options.
    pub options: R,
}
