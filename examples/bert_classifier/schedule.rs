//! The learning rate of a fine-tuning: a linear warm-up, then a straight line to 0.
use candle_ddp::optim::Schedule;
use candle_ddp::{Error, Result};

/// transformers' `get_linear_schedule_with_warmup`, except that the first step already has a learning rate above 0.
pub(crate) struct ParamsWarmupLinear {
    /// The part of all steps in which the learning rate rises, 0 <= warmup < 1.
    pub(crate) warmup: f64,
    pub(crate) total_steps: u64,
}

impl Schedule for ParamsWarmupLinear {
    fn name(&self) -> &'static str {
        "WarmupLinear"
    }

    fn check(&self) -> Result<()> {
        if (0.0..1.0).contains(&self.warmup) {
            return Ok(());
        }
        let reason = format!("it is {}, and must be at least 0 and less than 1", self.warmup);
        Err(Error::InvalidArgument { argument: "warmup", reason })
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let warmup_steps = (self.warmup * self.total_steps as f64) as u64;
        let rising = (step + 1) as f64 / (warmup_steps + 1) as f64;
        let falling = self.total_steps.saturating_sub(step) as f64 / (self.total_steps - warmup_steps) as f64;
        base * rising.min(falling)
    }

    fn length(&self) -> Option<u64> {
        Some(self.total_steps)
    }
}
