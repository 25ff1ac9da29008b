//! Cutting a stream into pieces that can be shown without splitting lines.

/// The maximum length of a line in bytes. Longer lines are shown in pieces, to bound memory.
const LONGEST: usize = 1 << 20;

/// Holds back the last, unfinished line of a stream and prefixes every line.
///
/// On a terminal, text after a carriage return is a progress bar and passes at once.
#[derive(Debug)]
pub(crate) struct Lines {
    held: Vec<u8>,
    terminal: bool,
    in_place: bool,
    prefix: Option<String>,
    last: u8,
}

impl Lines {
    /// Creates the buffer for a stream that is shown; `terminal` says whether it is shown on a terminal.
    pub(crate) fn new(prefix: Option<String>, terminal: bool) -> Self {
        Self { held: Vec::new(), terminal, in_place: false, prefix, last: b'\n' }
    }

    /// Adds bytes of the stream and returns what can be shown now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        let held = self.held.len();
        self.held.extend_from_slice(bytes);
        // A carriage return at the end may be the first half of a Windows line ending.
        let ends = |(index, &byte): (usize, &u8)| {
            let half = byte == b'\r' && !self.terminal && index + 1 == self.held.len();
            ((byte == b'\n' || byte == b'\r') && !half).then_some((index + 1, byte))
        };
        let from = held.saturating_sub(1);
        let end = self.held.iter().enumerate().skip(from).rev().find_map(ends);
        if let Some((_, byte)) = end {
            self.in_place = byte == b'\r';
        }
        if self.held.len() > LONGEST || (self.terminal && self.in_place) {
            return self.finish();
        }
        let rest = self.held.split_off(end.map_or(0, |(index, _)| index));
        let ready = std::mem::replace(&mut self.held, rest);
        self.decorate(ready)
    }

    /// Returns the rest after the stream has ended.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        let ready = std::mem::take(&mut self.held);
        self.decorate(ready)
    }

    fn decorate(&mut self, ready: Vec<u8>) -> Vec<u8> {
        let Some(prefix) = &self.prefix else { return ready };
        let mut decorated = Vec::with_capacity(ready.len() + prefix.len());
        for piece in ready.split_inclusive(|&byte| byte == b'\n' || byte == b'\r') {
            let starts_line = self.last == b'\n' || (self.last == b'\r' && piece != b"\n");
            if starts_line {
                decorated.extend_from_slice(prefix.as_bytes());
            }
            decorated.extend_from_slice(piece);
            self.last = piece.last().copied().unwrap_or(self.last);
        }
        decorated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text that is shown after each of these pieces, and at the end.
    fn shown(prefix: Option<&str>, terminal: bool, pieces: &[&str]) -> Vec<String> {
        let mut lines = Lines::new(prefix.map(String::from), terminal);
        let mut shown: Vec<Vec<u8>> = pieces.iter().map(|piece| lines.push(piece.as_bytes())).collect();
        shown.extend([lines.finish(), lines.finish()]);
        shown.into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn unfinished_lines_are_held_back() {
        assert_eq!(shown(None, false, &["one\ntw", "o", "\nthree"]), ["one\n", "", "two\n", "three", ""]);
    }

    #[test]
    fn carriage_returns_end_pieces_but_not_windows_lines() {
        let pieces = ["10%\r20%\r", "30%", "\r", "\nnext"];
        assert_eq!(shown(Some("> "), false, &pieces), ["> 10%\r", "> 20%\r", "", "> 30%\r\n", "> next", ""]);
    }

    #[test]
    fn a_progress_bar_reaches_the_terminal_at_once() {
        let pieces = ["plain", "\rbar 1", " of 2", "\ntext"];
        assert_eq!(shown(None, true, &pieces), ["", "plain\rbar 1", " of 2", "\n", "text", ""]);
    }

    #[test]
    fn every_line_gets_the_prefix_once() {
        assert_eq!(shown(Some("[0]:"), false, &["a\n\nb", "c\n"]), ["[0]:a\n[0]:\n", "[0]:bc\n", "", ""]);
    }

    #[test]
    fn an_endless_line_is_shown_in_pieces() {
        let mut lines = Lines::new(Some("> ".into()), false);
        let piece = vec![b'x'; LONGEST];
        assert!(lines.push(&piece).is_empty());
        let first = lines.push(b"yz");
        assert_eq!((first.len(), &first[..3]), (LONGEST + 4, &b"> x"[..]));
        assert_eq!(lines.push(b"end\n"), b"end\n");
    }
}
