//! How much slower than others a rank may be.
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A factor above 1, in hundredths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tolerance(u64);

impl Tolerance {
    pub(crate) fn factor(self) -> f64 {
        self.0 as f64 / 100.0
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self(150)
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.factor())
    }
}

impl FromStr for Tolerance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let factor: Option<f64> = text.trim().parse().ok();
        let factor = factor.filter(|factor| (1.0..=1e9).contains(factor));
        // Rounded, as the cast of what is left is exact.
        factor
            .map(|factor| Self((factor * 100.0).round() as u64))
            .ok_or_else(|| "it must be a number from 1 to 1e9".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors() {
        assert_eq!("1.25".parse::<Tolerance>().unwrap().to_string(), "1.25");
        assert_eq!("1e9".parse::<Tolerance>().unwrap().factor(), 1e9);
        assert_eq!("1.5".parse::<Tolerance>().unwrap(), Tolerance::default());
        for wrong in ["0.9", "", "x", "NaN", "inf", "1e10", "-2"] {
            assert!(wrong.parse::<Tolerance>().is_err(), "{wrong}");
        }
    }
}
