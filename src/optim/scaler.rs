//! The state of a gradient scaler among those of optimizers.
use super::state::{self, Loader, StateDict};
use crate::Result;
use crate::amp::{GradScaler, GradScalerState};
use candle_core::Tensor;
use std::collections::HashMap;

/// The fields of [`GradScalerState`]. As that, it is the same on every rank.
impl StateDict for GradScaler {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let GradScalerState { scale, growth_factor, backoff_factor, growth_interval, growth_tracker } = self.state();
        // An interval of usize::MAX, which means never, is more than a file holds.
        let count = |value: usize| state::count(value.min(i64::MAX as usize) as u64);
        let mut dict = state::begin("GradScaler")?;
        dict.insert("scale".to_string(), state::list(&[scale])?);
        dict.insert("growth_factor".to_string(), state::list(&[growth_factor])?);
        dict.insert("backoff_factor".to_string(), state::list(&[backoff_factor])?);
        dict.insert("growth_interval".to_string(), count(growth_interval)?);
        dict.insert("growth_tracker".to_string(), count(growth_tracker)?);
        Ok(dict)
    }

    /// # Errors
    /// Beside the others: values that cannot be ([`InvalidArgument`](crate::Error::InvalidArgument)), and in the middle of a training step
    /// ([`Error::GradScaler`](crate::Error::GradScaler)).
    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "GradScaler")?;
        let state = GradScalerState {
            scale: loader.list("scale", 1)?[0],
            growth_factor: loader.list("growth_factor", 1)?[0],
            backoff_factor: loader.list("backoff_factor", 1)?[0],
            growth_interval: loader.count("growth_interval")? as usize,
            growth_tracker: loader.count("growth_tracker")? as usize,
        };
        loader.finish()?;
        self.load_state(state)
    }
}
