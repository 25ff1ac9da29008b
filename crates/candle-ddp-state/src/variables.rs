//! Variables returned by a `VarBuilder`, predicates on their names, and lists of them as arguments.
use crate::error::describe;
use crate::panic::lock;
use crate::placement::Placement;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor, Var};
use candle_nn::VarMap;
use std::sync::Arc;

/// A predicate on the full names of variables, such as `layer1.0.bn1.running_mean`.
pub type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A model's parameters as an argument: a `&DistributedDataParallel`, a `&DataParallel`, a `&VarMap`, variables with names, or
/// variables without names.
///
/// It iterates over names and variables, as for groups of parameters with different options:
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_ddp::optim::Parameters;
/// # use candle_nn::{VarBuilder, VarMap, linear};
/// # fn main() -> candle_ddp::Result<()> {
/// # let varmap = VarMap::new();
/// # linear(4, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
/// let (biases, weights): (Vec<_>, Vec<_>) =
///     Parameters::from(&varmap).into_iter().partition(|(name, _)| name.ends_with("bias"));
/// # assert_eq!((biases.len(), weights.len()), (1, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Parameters {
    #[doc(hidden)]
    pub variables: Vec<(String, Var)>,
    /// Whether the names are the caller's.
    #[doc(hidden)]
    pub named: bool,
}

/// All variables of the map, sorted by name: the same order on every rank. Batch norms' running statistics are among them.
impl From<&VarMap> for Parameters {
    fn from(varmap: &VarMap) -> Self {
        let mut variables: Vec<_> = lock(varmap.data()).iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        variables.sort_by(|(a, _), (b, _)| a.cmp(b));
        variables.into()
    }
}

impl From<Vec<(String, Var)>> for Parameters {
    fn from(variables: Vec<(String, Var)>) -> Self {
        Self { variables, named: true }
    }
}

/// Errors refer to these variables by index, and nothing that is made of them can be saved.
impl From<Vec<Var>> for Parameters {
    fn from(variables: Vec<Var>) -> Self {
        let number = |(index, var)| (format!("#{index}"), var);
        Self { variables: variables.into_iter().enumerate().map(number).collect(), named: false }
    }
}

impl IntoIterator for Parameters {
    type Item = (String, Var);
    type IntoIter = std::vec::IntoIter<(String, Var)>;

    fn into_iter(self) -> Self::IntoIter {
        self.variables.into_iter()
    }
}

/// Refuses pieces, where the parameters themselves are needed. `instead` says what to do.
///
/// # Errors
/// [`Error::Parameter`] for the first piece.
pub fn check_whole<'a>(variables: impl IntoIterator<Item = (&'a String, &'a Var)>, instead: &str) -> Result<()> {
    match variables.into_iter().find(|(_, var)| Placement::of(var).is_sharded()) {
        Some((name, _)) => {
            let reason = format!("its variable is this rank's piece of it, since its model is sharded: {instead}");
            Err(Error::parameter(name, reason))
        }
        None => Ok(()),
    }
}

/// Checks that variables have names, without which `whole` cannot be.
pub fn check_named(named: bool, whole: &str) -> Result<()> {
    if named {
        return Ok(());
    }
    let reason = format!(
        "they must have names for {whole}, since the order of a VarMap's variables differs from run to run: pass the \
         DistributedDataParallel, the VarMap, or pairs of name and variable"
    );
    Err(Error::invalid("parameters", reason))
}

/// Checks that a variable handed out as `tensor` is requested again with the same shape and dtype (tied weights).
pub fn check_shared(name: &str, tensor: &Tensor, dtype: DType, shape: &Shape) -> candle_core::Result<()> {
    if tensor.shape() != shape {
        candle_core::bail!(
            "{name} was requested as {} and as {}: a shared variable must have one shape and dtype",
            describe(tensor.dtype(), tensor.shape()),
            describe(dtype, shape)
        )
    }
    Ok(())
}

/// The error for a variable that is requested without a shape and does not exist.
pub fn not_in_varmap(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "{name} is not in the VarMap: request it with its shape, by `get`, so that it can \
                                     be created"
    ))
}

/// The error for a variable that a second model of the same variables requests, and the first does not have.
pub fn not_in_model(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!("{name} is not a variable of the model: build the same model, with the same names"))
}

/// Whether a variable's name is one of a batch norm's running statistics.
pub fn is_batch_norm_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    ["running_mean", "running_var", "num_batches_tracked"].contains(&last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_varmaps_parameters_are_sorted_by_name() {
        let varmap = VarMap::new();
        let names: Vec<String> = (0..50).map(|number| format!("layer{number:02}")).collect();
        for name in names.iter().rev() {
            lock(varmap.data()).insert(name.clone(), Var::zeros(1, DType::F32, &Device::Cpu).unwrap());
        }
        let parameters = Parameters::from(&varmap);
        assert!(parameters.named);
        assert_eq!(parameters.into_iter().map(|(name, _)| name).collect::<Vec<_>>(), names);
    }
}
