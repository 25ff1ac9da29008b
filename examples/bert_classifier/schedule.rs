//! The learning rate of a fine-tuning: a linear warm-up, then a straight line to 0.
use candle_ddp::optim::Schedule;
use candle_ddp::{Error, Result};

/// transformers' `get_linear_schedule_with_warmup`, in which the first step already has a learning rate above 0.
pub(crate) struct ParamsWarmupLinear {
    pub(crate) warmup_steps: u64,
    pub(crate) total_steps: u64,
}

impl Schedule for ParamsWarmupLinear {
    const NAME: &'static str = "WarmupLinear";

    fn check(&self) -> Result<()> {
        let Self { warmup_steps, total_steps } = *self;
        if warmup_steps < total_steps {
            return Ok(());
        }
        let reason = format!("it is {warmup_steps} steps, and must be fewer than all {total_steps}");
        Err(Error::InvalidArgument { argument: "warmup", reason })
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let Self { warmup_steps, total_steps } = *self;
        let rising = (step + 1) as f64 / (warmup_steps + 1) as f64;
        let falling = total_steps.saturating_sub(step) as f64 / (total_steps - warmup_steps) as f64;
        base * rising.min(falling)
    }
}
