//! What a backward pass tells ranks that have no inputs left.
use super::core::Core;
use super::order::Member;
use crate::process_group::{Active, Operation};
use crate::{Error, Result};
use std::sync::Arc;

/// Tells ranks without inputs that a backward pass of `models` comes next, if those that send gradients are in a join. Returns
/// the ranks that have inputs.
pub(super) fn announce(models: &[Member]) -> Result<Option<Active>> {
    let adds_up = models.iter().any(|model| model.synchronises && model.adds_up);
    let models: Vec<&Core> = models.iter().filter(|model| model.synchronises).map(|model| model.core).collect();
    let Some(join) = models.iter().find_map(|model| model.group().current_join()) else { return Ok(None) };
    let mut mask = 0;
    for model in &models {
        let place = join.models.iter().position(|number| *number == model.number);
        let is_joined = model.group().current_join().is_some_and(|own| Arc::ptr_eq(&own, &join));
        let Some(place) = place.filter(|_| is_joined) else {
            let parameter = model.variables.parameters.first().map_or("", |parameter| &parameter.name);
            let reason = format!(
                "the one with the parameter {parameter} is not in the join in which it is trained: give all models to it, \
                 `candle_ddp::join(&[&a, &b], …)`"
            );
            return Err(Error::invalid("models", reason));
        };
        mask |= 1 << place;
    }
    models[0].group().announce(Operation::Backward { models: mask, adds_up })
}

/// Returns the place of `model` among those of the join that its group is in.
pub(super) fn place(model: &Core) -> Option<usize> {
    model.group().current_join()?.models.iter().position(|number| *number == model.number)
}
