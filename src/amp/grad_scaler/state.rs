//! The state of a scaler in checkpoints.
use super::{GradScaler, GradScalerOptions, misuse};
use crate::Result;
use crate::state::{self, Loader, StateDict};
use candle_core::Tensor;
use std::collections::HashMap;

/// The names of PyTorch's `state_dict`; the same on every rank.
impl StateDict for GradScaler {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        let (scale, clean_steps) = self.settled()?;
        let GradScalerOptions { growth_factor, backoff_factor, growth_interval, .. } = self.options;
        // An interval of usize::MAX, which means never, is too large for a file.
        let count = |value: usize| state::count(value.min(i64::MAX as usize) as u64);
        let mut dict = state::begin("GradScaler")?;
        dict.insert("scale".to_string(), state::list(&[scale])?);
        dict.insert("growth_factor".to_string(), state::list(&[growth_factor])?);
        dict.insert("backoff_factor".to_string(), state::list(&[backoff_factor])?);
        dict.insert("growth_interval".to_string(), count(growth_interval)?);
        dict.insert("growth_tracker".to_string(), count(clean_steps)?);
        Ok(dict)
    }

    /// As documented for the trait; [`InvalidArgument`](crate::Error::InvalidArgument) for invalid values, and
    /// [`GradScaler`](crate::Error::GradScaler) for a call in the middle of a training step.
    fn load_state_dict(&mut self, dict: &HashMap<String, Tensor>) -> Result<()> {
        let mut loader = Loader::new(dict, "GradScaler")?;
        let options = GradScalerOptions {
            init_scale: loader.list("scale", 1)?[0],
            growth_factor: loader.list("growth_factor", 1)?[0],
            backoff_factor: loader.list("backoff_factor", 1)?[0],
            growth_interval: loader.count("growth_interval")? as usize,
            enabled: self.options.enabled,
        };
        let clean_steps = loader.count("growth_tracker")? as usize;
        loader.finish()?;
        options.check("scale")?;
        if !self.is_scaled() {
            return Err(misuse("load_state_dict", "a training step is under way: call `update` first"));
        }
        (self.scale, self.clean_steps, self.late, self.options) = (options.init_scale, clean_steps, None, options);
        Ok(())
    }
}
