//! Announces backward passes to ranks that have no inputs left.
use crate::ddp::model::DistributedModel;
use crate::ddp::pass::order::Member;
use crate::process_group::{Active, Kind, Operation};
use crate::{Error, Result};
use std::sync::Arc;

/// Tells ranks without inputs that a backward pass of `models` comes next, if those that send gradients are in a
/// join. Returns the ranks that have inputs.
pub(in crate::ddp) fn announce(models: &[Member], is_weighted: bool) -> Result<Option<Active>> {
    let models: Vec<&Member> = models.iter().filter(|model| model.sends()).collect();
    let Some(join) = models.iter().find_map(|model| model.core.group().current_join()) else { return Ok(None) };
    let synchronises = models[0].synchronises;
    if models.iter().any(|model| model.synchronises != synchronises) {
        let reason = "of the models of one backward pass in a join, either all that send gradients are under no_sync or none, since ranks \
                      without inputs treat them alike: let their guards of no_sync begin and end together";
        return Err(Error::invalid("models", reason));
    }
    // Whether gradients add up is of interest to shards alone.
    let kind = Kind { synchronises, adds_up: models.iter().any(|model| model.adds_up), is_weighted };
    let mut mask = 0;
    for model in models.iter().map(|model| model.core) {
        let place = join.models.iter().position(|number| *number == model.number);
        let is_joined = model.group().current_join().is_some_and(|own| Arc::ptr_eq(&own, &join));
        let Some(place) = place.filter(|_| is_joined) else {
            let parameter = model.variables.parameters.first().map_or("", |parameter| &parameter.name);
            let reason = format!(
                "the model with the parameter {parameter} is trained inside a join that does not include it: pass all \
                 models to the join, `candle_ddp::join(&[&a, &b], …)`"
            );
            return Err(Error::invalid("models", reason));
        };
        mask |= 1 << place;
    }
    models[0].core.group().announce(Operation::Backward { models: mask, kind })
}

/// Returns the position of `model` among the models of its group's current join.
pub(in crate::ddp) fn place(model: &DistributedModel) -> Option<usize> {
    model.group().current_join()?.models.iter().position(|number| *number == model.number)
}
