//! How messages show lists of names, and text from elsewhere.
use std::borrow::Borrow;
use std::fmt::{self, Write};

/// Text that may come from the store or from a peer. Control characters are escaped, since they could drive a terminal
/// or fake lines of a log. Line feeds remain, because compilers' messages have several lines.
#[derive(Debug)]
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '\n' | '\t' => f.write_char(c),
            c if c.is_control() => write!(f, "{}", c.escape_default()),
            c => f.write_char(c),
        })
    }
}

/// `a, b, c`; of a very long list, only the beginning.
pub fn some<S: Borrow<str>>(names: &[S]) -> String {
    const SHOWN: usize = 20;
    let text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{text} and {} more", names.len() - SHOWN) } else { text }
}

/// `[0, 1]`; of a very long list, only the beginning.
pub fn ranks(ranks: &[usize]) -> String {
    format!("[{}]", some(&ranks.iter().map(usize::to_string).collect::<Vec<_>>()))
}
