//! The environment variables of [candle-ddp](https://docs.rs/candle-ddp): a table of all of them, and the one way in which they
//! are read. It is for candle-ddp's other crates, and changes with them.
//!
//! [`PROCESS`] has the variables of this process. Blanks around a value do not count, and a blank value counts as unset, except
//! in place of a number. A value that is not one of those in the table is an [`Invalid`], which names the variable, the value and
//! the valid values.
mod row;
mod table;

pub use row::{Kind, Row};
pub use table::SECTIONS;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use table::kind;

/// The result of reading a variable.
pub type Result<T> = std::result::Result<T, Invalid>;

/// An environment variable has an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The variable's name.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// The values that it may have.
    pub reason: String,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}: {}", self.variable, self.value, self.reason)
    }
}

impl std::error::Error for Invalid {}

/// The variables of this process.
pub const PROCESS: Variables<'static> = Variables(&|name| std::env::var_os(name));

/// The variables of this process that begin with one of `starts`, in the table or not: for a launcher that passes them on as they are.
pub fn beginning_with(starts: &[&str]) -> Vec<(OsString, OsString)> {
    let is_wanted = |name: &OsString| starts.iter().any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()));
    let mut found: Vec<_> = std::env::vars_os().filter(|(name, _)| is_wanted(name)).collect();
    found.sort();
    found
}

/// Environment variables, which are read by name. Each name must be in the table ([`SECTIONS`]).
#[derive(Clone, Copy)]
pub struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl fmt::Debug for Variables<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Variables")
    }
}

impl<'a> Variables<'a> {
    /// The variables that `lookup` returns.
    pub fn new(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        Self(lookup)
    }

    /// Whether the variable is set, if only to a blank text.
    pub fn is_set(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    /// The value as it is, for variables whose owner is another program or library. What is not UTF-8 is replaced by `U+FFFD`.
    pub fn raw(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.to_string_lossy().into_owned())
    }

    /// A text.
    pub fn text(&self, name: &str) -> Option<String> {
        self.raw(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    /// A path, with the blanks around it.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        debug_assert_eq!(kind(name), Kind::Path, "{name}");
        let is_blank = |value: &OsString| value.to_str().is_some_and(|value| value.trim().is_empty());
        (self.0)(name).filter(|value| !is_blank(value)).map(PathBuf::from)
    }

    /// Whether it is on.
    ///
    /// # Errors
    /// Returns an error unless the value is 1, true, yes or on, or 0, false, no or off, in capitals or not.
    pub fn switch(&self, name: &'static str) -> Result<Option<bool>> {
        debug_assert_eq!(kind(name), Kind::Switch, "{name}");
        self.parse(name, |value| match value.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => None,
        })
    }

    /// The word that was chosen of those in the table.
    ///
    /// # Errors
    /// Returns an error for another word.
    pub fn choice(&self, name: &'static str) -> Result<Option<&'static str>> {
        let Kind::Choice(words) = kind(name) else {
            debug_assert!(false, "{name} is not a choice in the table");
            return Ok(None);
        };
        self.parse(name, |value| words.iter().copied().find(|word| *word == value))
    }

    /// A number.
    ///
    /// # Errors
    /// Returns an error if it is not a number, or not one that a `T` can hold. A blank text is not a number.
    pub fn number<T: FromStr>(&self, name: &'static str) -> Result<Option<T>> {
        debug_assert!(matches!(kind(name), Kind::Number(_)), "{name}");
        let Some(value) = self.raw(name) else { return Ok(None) };
        value.trim().parse().map(Some).map_err(|_| invalid(name, value))
    }

    fn parse<T>(&self, name: &'static str, parse: impl FnOnce(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        parse(&value).map(Some).ok_or_else(|| invalid(name, value))
    }
}

fn invalid(variable: &'static str, value: String) -> Invalid {
    Invalid { variable, value, reason: format!("it must be {}", kind(variable).accepted()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    fn with<T>(value: &str, read: impl FnOnce(&Variables) -> T) -> T {
        read(&Variables::new(&|_| Some(OsString::from(value))))
    }

    #[test]
    fn nothing_is_set() {
        let none = Variables::new(&|_| None);
        assert!(!none.is_set("RANK"));
        assert_eq!((none.raw("RANK"), none.text("ROLE_NAME"), none.path("TMPDIR")), (None, None, None));
        assert_eq!(none.switch("CANDLE_DDP_AMX"), Ok(None));
        assert_eq!(none.choice("CANDLE_DDP_CPU_TRANSPORT"), Ok(None));
        assert_eq!(none.number::<u64>("RANK"), Ok(None));
    }

    #[test]
    fn switches() {
        let read = |value| with(value, |variables| variables.switch("CANDLE_DDP_AMX"));
        for on in ["1", "true", "True", "YES", " on\n"] {
            assert_eq!(read(on), Ok(Some(true)), "{on:?}");
        }
        for off in ["0", "false", "no", "Off", "\t0 "] {
            assert_eq!(read(off), Ok(Some(false)), "{off:?}");
        }
        assert_eq!([read(""), read(" ")], [Ok(None), Ok(None)]);
        for wrong in ["2", "-1", "nein", "0 1", "00"] {
            let error = read(wrong).unwrap_err();
            assert_eq!((error.variable, error.value.as_str()), ("CANDLE_DDP_AMX", wrong));
            assert_eq!(error.to_string(), format!("CANDLE_DDP_AMX={wrong:?}: it must be 1 or 0"));
        }
    }

    #[test]
    fn numbers() {
        let read = |value| with(value, |variables| variables.number::<u16>("MASTER_PORT"));
        assert_eq!([read("0"), read(" 29500\n"), read("65535")], [Ok(Some(0)), Ok(Some(29500)), Ok(Some(65535))]);
        for wrong in ["", " ", "65536", "-1", "1.5", "0x10", "29500 29501", "port"] {
            let error = read(wrong).unwrap_err().to_string();
            assert_eq!(error, format!("MASTER_PORT={wrong:?}: it must be a port (0 to 65535)"));
        }
    }

    #[test]
    fn choices() {
        let read = |value| with(value, |variables| variables.choice("CANDLE_DDP_CPU_TRANSPORT"));
        assert_eq!([read("tcp"), read(" shm "), read("")], [Ok(Some("tcp")), Ok(Some("shm")), Ok(None)]);
        let error = read("TCP").unwrap_err().to_string();
        assert_eq!(error, "CANDLE_DDP_CPU_TRANSPORT=\"TCP\": it must be auto, tcp or shm");
    }

    #[test]
    fn texts_and_paths() {
        assert_eq!(with(" a b ", |variables| variables.text("ROLE_NAME")).as_deref(), Some("a b"));
        assert_eq!(with(" a b ", |variables| variables.raw("ROLE_NAME")).as_deref(), Some(" a b "));
        assert_eq!(with(" ", |variables| variables.text("ROLE_NAME")), None);
        // Names of folders may begin and end with blanks.
        assert_eq!(with(" a b ", |variables| variables.path("TMPDIR")), Some(PathBuf::from(" a b ")));
        assert_eq!(with("\n", |variables| variables.path("TMPDIR")), None);
        assert!(with("", |variables| variables.is_set("ROLE_NAME")));
    }

    #[test]
    fn values_that_are_not_text() {
        let bytes = OsString::from_vec(vec![b'1', 0xff]);
        let lookup = |_: &str| Some(bytes.clone());
        let variables = Variables::new(&lookup);
        assert_eq!(variables.path("TMPDIR"), Some(PathBuf::from(bytes.clone())));
        assert_eq!(variables.raw("ROLE_NAME").as_deref(), Some("1\u{fffd}"));
        assert!(variables.switch("CANDLE_DDP_AMX").is_err() && variables.number::<u64>("RANK").is_err());
    }

    #[test]
    fn families_have_one_row() {
        assert_eq!(kind("CANDLE_DDP_TEST_ANYTHING"), Kind::Text("text"));
        assert_eq!(Kind::Choice(&["a"]).accepted(), "a");
        assert_eq!(Kind::Choice(&["a", "b"]).accepted(), "a or b");
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
