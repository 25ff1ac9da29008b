//! Options of a scaler.
use crate::{Error, Result};

/// The smallest scale: f32, in which losses and gradients are multiplied, has both it and its reciprocal as normal numbers.
pub(super) const MIN_SCALE: f64 = f32::MIN_POSITIVE as f64;

/// Options of a [`GradScaler`](super::GradScaler).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerOptions {
    /// The initial scale, from 1.2e-38 to 3.4e38, which f32 can carry. Default: 65536.
    pub init_scale: f64,
    /// The factor by which the scale grows after `growth_interval` steps without overflow; with 1 it never grows.
    /// Default: 2.
    pub growth_factor: f64,
    /// The factor by which the scale shrinks after an overflow, but not below 1.2e-38; with 1 it never shrinks.
    /// Default: 0.5.
    pub backoff_factor: f64,
    /// The number of consecutive steps without overflow before the scale grows. Default: 2000.
    pub growth_interval: usize,
    /// If false, the scaler does nothing: it leaves losses and gradients unchanged, and skips no step. Default: true.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        Self { init_scale: 65536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true }
    }
}

impl GradScalerOptions {
    /// `scale` is the name of `init_scale` in errors.
    pub(super) fn check(&self, scale: &'static str) -> Result<()> {
        let refuse =
            |argument, value: f64, rule| Err(Error::invalid(argument, format!("it must be {rule}, not {value}")));
        if !(MIN_SCALE..=f64::from(f32::MAX)).contains(&self.init_scale) {
            return refuse(scale, self.init_scale, "from 1.2e-38 to 3.4e38, which f32 can carry");
        }
        if !(self.growth_factor >= 1.0 && self.growth_factor.is_finite()) {
            return refuse("growth_factor", self.growth_factor, "at least 1 and finite");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor <= 1.0) {
            return refuse("backoff_factor", self.backoff_factor, "above 0 and at most 1");
        }
        if self.growth_interval == 0 {
            return Err(Error::invalid("growth_interval", "it must be at least 1, not 0"));
        }
        Ok(())
    }
}
