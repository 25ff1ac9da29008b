//! How lists of names and other ranks' words are written in messages.
use std::borrow::Borrow;
use std::fmt::{self, Write};

/// Text that may come from the store or from a peer: control characters, with which it could drive a terminal or fake
/// lines of a log, are shown escaped. A line feed stays, as compilers' messages have several lines.
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

/// `a, b, c`, or the first of very many.
pub fn some<S: Borrow<str>>(names: &[S]) -> String {
    const SHOWN: usize = 20;
    let text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN { format!("{text} and {} more", names.len() - SHOWN) } else { text }
}

/// `[0, 1]`, or the first of very many.
pub fn ranks(ranks: &[usize]) -> String {
    format!("[{}]", some(&ranks.iter().map(usize::to_string).collect::<Vec<_>>()))
}

/// The beginning of `text`, at most `longest` bytes.
pub(super) fn shortened(text: &str, longest: usize) -> String {
    let mut end = text.len().min(longest);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_string()
}

/// The beginning of the description of what a bucket's collective is for.
pub const GRADIENTS: &str = "the gradients of ";

/// A hint for calls that ranks made where others did not. If one of them averages gradients and the other does not, a rank
/// may have ended its loop early.
pub(super) struct Uneven<'a>(pub(super) &'a str, pub(super) &'a str);

impl fmt::Display for Uneven<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let averages = |call: &str| call.contains(&format!(" for {GRADIENTS}"));
        match averages(self.0) != averages(self.1) {
            true => f.write_str(". If ranks have different numbers of batches, train inside of `ddp.join`"),
            false => Ok(()),
        }
    }
}
