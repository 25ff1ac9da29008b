//! The fields of a line of metrics.
use crate::{Error, Result};
use serde_json::Value;

/// A number or a text of a line of metrics; it comes from an `f64`, `u64`, `usize` or `&str`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Field<'a> {
    /// A count, such as the step.
    Integer(u64),
    /// Any other number, NaN and infinities included.
    Number(f64),
    /// A text, which only JSON lines have.
    Text(&'a str),
}

impl From<u64> for Field<'_> {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<usize> for Field<'_> {
    fn from(value: usize) -> Self {
        Self::Integer(value as u64)
    }
}

impl From<f64> for Field<'_> {
    fn from(value: f64) -> Self {
        Self::Number(value)
    }
}

impl<'a> From<&'a str> for Field<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(value)
    }
}

impl From<Field<'_>> for Value {
    fn from(field: Field<'_>) -> Self {
        match field {
            Field::Integer(value) => value.into(),
            // JSON has neither NaN nor infinities: null.
            Field::Number(value) => value.into(),
            Field::Text(value) => value.into(),
        }
    }
}

/// Where the curves of a line's numbers have their points.
pub(super) struct Position;

impl Position {
    /// The fields that say it, the most exact first.
    pub(super) const NAMES: [&'static str; 2] = ["step", "epoch"];

    pub(super) fn of(fields: &[(&str, Field<'_>)]) -> Result<u64> {
        let named = |name: &str| match fields.iter().find(|(other, _)| *other == name)?.1 {
            Field::Integer(value) => Some(value),
            _ => None,
        };
        Self::NAMES.iter().find_map(|name| named(name)).ok_or_else(|| {
            Error::invalid("fields", "one of them must be \"step\" or \"epoch\", a whole number that is not negative")
        })
    }
}

/// A step that TensorBoard can store.
pub(super) fn check_step(step: u64) -> Result<()> {
    match i64::try_from(step) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::invalid("step", format!("it must be at most {}, not {step}", i64::MAX))),
    }
}

pub(super) fn check_tag(tag: &str) -> Result<()> {
    if tag.is_empty() {
        return Err(Error::invalid("tag", "it must not be empty"));
    }
    Ok(())
}
