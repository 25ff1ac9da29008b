//! A row of the table of variables.

/// Variables that have everything but the name in common. The texts are Markdown.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The names. A `*` at the end stands for any rest.
    pub names: &'static [&'static str],
    /// The valid values.
    pub kind: Kind,
    /// Who sets them.
    pub set_by: &'static str,
    /// The crates or libraries that read them.
    pub read_by: &'static str,
    /// Their meaning.
    pub meaning: &'static str,
    /// The effect of an unset variable.
    pub default: &'static str,
}

/// The valid values of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// On or off.
    Switch,
    /// A number, which the text describes.
    Number(&'static str),
    /// A file or folder.
    Path,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Another text, which this one describes.
    Text(&'static str),
}

impl Kind {
    /// The valid values, in words.
    pub fn accepted(self) -> String {
        match self {
            Self::Switch => "1 or 0".to_string(),
            Self::Number(text) | Self::Text(text) => text.to_string(),
            Self::Path => "a path".to_string(),
            Self::Choice(words) => match words {
                [words @ .., last] if !words.is_empty() => format!("{} or {last}", words.join(", ")),
                words => words.concat(),
            },
        }
    }
}
