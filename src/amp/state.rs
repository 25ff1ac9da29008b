//! The state of a gradient scaler in a checkpoint.
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The state of a [`GradScaler`](super::GradScaler) in a checkpoint: PyTorch's `state_dict`, with its names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerState {
    /// The factor for losses.
    pub scale: f64,
    /// See [`GradScalerOptions`](super::GradScalerOptions).
    pub growth_factor: f64,
    /// See [`GradScalerOptions`](super::GradScalerOptions).
    pub backoff_factor: f64,
    /// See [`GradScalerOptions`](super::GradScalerOptions).
    pub growth_interval: usize,
    /// Steps without overflow since the scale last changed.
    pub growth_tracker: usize,
}

impl GradScalerState {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |argument, value: f64, rule| Err(Error::invalid(argument, format!("{value} is not {rule}")));
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return refuse("scale", self.scale, "positive and finite");
        }
        if !(self.growth_factor >= 1.0 && self.growth_factor.is_finite()) {
            return refuse("growth_factor", self.growth_factor, "at least 1 and finite");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor <= 1.0) {
            return refuse("backoff_factor", self.backoff_factor, "above 0 and at most 1");
        }
        if self.growth_interval == 0 {
            return Err(Error::invalid("growth_interval", "it must be at least 1"));
        }
        Ok(())
    }
}

/// Writes one line `name value` for each field.
impl fmt::Display for GradScalerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scale {}", self.scale)?;
        writeln!(f, "growth_factor {}", self.growth_factor)?;
        writeln!(f, "backoff_factor {}", self.backoff_factor)?;
        writeln!(f, "growth_interval {}", self.growth_interval)?;
        writeln!(f, "growth_tracker {}", self.growth_tracker)
    }
}

impl FromStr for GradScalerState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        fn field<T: FromStr>(text: &str, name: &str) -> Result<T> {
            let mut lines = text.lines().filter_map(|line| line.trim().split_once(' '));
            let value = lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim());
            let refuse = |what: String| Error::invalid("the state of a GradScaler", what);
            let value = value.ok_or_else(|| refuse(format!("it has no line `{name} …`")))?;
            value.parse().map_err(|_| refuse(format!("{name} is {value:?}, which is not a number of its kind")))
        }
        let state = Self {
            scale: field(text, "scale")?,
            growth_factor: field(text, "growth_factor")?,
            backoff_factor: field(text, "backoff_factor")?,
            growth_interval: field(text, "growth_interval")?,
            growth_tracker: field(text, "growth_tracker")?,
        };
        state.check()?;
        Ok(state)
    }
}
