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

    fn shown(lines: &mut Lines, bytes: &str) -> String {
        String::from_utf8(lines.push(bytes.as_bytes())).unwrap()
    }

    #[test]
    fn unfinished_lines_are_held_back() {
        let mut lines = Lines::new(None, false);
        assert_eq!(shown(&mut lines, "one\ntw"), "one\n");
        assert_eq!(shown(&mut lines, "o"), "");
        assert_eq!(shown(&mut lines, "\nthree"), "two\n");
        assert_eq!(lines.finish(), b"three");
        assert_eq!(lines.finish(), b"");
    }

    #[test]
    fn carriage_returns_end_pieces_but_not_windows_lines() {
        let mut lines = Lines::new(Some("> ".into()), false);
        assert_eq!(shown(&mut lines, "10%\r20%\r"), "> 10%\r");
        assert_eq!(shown(&mut lines, "30%"), "> 20%\r");
        assert_eq!(shown(&mut lines, "\r"), "");
        assert_eq!(shown(&mut lines, "\nnext"), "> 30%\r\n");
        assert_eq!(lines.finish(), b"> next");
    }

    #[test]
    fn a_progress_bar_reaches_the_terminal_at_once() {
        let mut lines = Lines::new(None, true);
        assert_eq!(shown(&mut lines, "plain"), "");
        assert_eq!(shown(&mut lines, "\rbar 1"), "plain\rbar 1");
        assert_eq!(shown(&mut lines, " of 2"), " of 2");
        assert_eq!(shown(&mut lines, "\ntext"), "\n");
    }

    #[test]
    fn every_line_gets_the_prefix_once() {
        let mut lines = Lines::new(Some("[0]:".into()), false);
        assert_eq!(shown(&mut lines, "a\n\nb"), "[0]:a\n[0]:\n");
        assert_eq!(shown(&mut lines, "c\n"), "[0]:bc\n");
    }

    #[test]
    fn an_endless_line_is_shown_in_pieces() {
        let mut lines = Lines::new(Some("> ".into()), false);
        let piece = vec![b'x'; LONGEST];
        assert!(lines.push(&piece).is_empty());
        let first = lines.push(b"yz");
        assert_eq!((first.len(), &first[..3]), (LONGEST + 4, &b"> x"[..]));
        assert_eq!(shown(&mut lines, "end\n"), "end\n");
    }
}
