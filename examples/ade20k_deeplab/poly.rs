//! The schedule of DeepLab.
use candle_ddp::optim::Schedule;
use candle_ddp::{Error, Result};

/// The learning rate falls with (1 − step / `total_steps`)^`power`.
pub(crate) struct ParamsPoly {
    pub(crate) total_steps: u64,
    pub(crate) power: f64,
}

impl Schedule for ParamsPoly {
    fn name(&self) -> &'static str {
        "ParamsPoly"
    }

    fn check(&self) -> Result<()> {
        if self.total_steps > 0 {
            return Ok(());
        }
        Err(Error::InvalidArgument { argument: "total_steps", reason: "it must be at least 1".to_string() })
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let left = self.total_steps.saturating_sub(step) as f64 / self.total_steps as f64;
        base * left.powf(self.power)
    }

    fn length(&self) -> Option<u64> {
        Some(self.total_steps)
    }
}
