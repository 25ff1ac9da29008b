//! The last lines of a stream, and the last error in it, for the report of a failure.
use std::collections::VecDeque;

/// The number of lines that are kept.
const LINES: usize = 20;
/// The number of bytes of each line that are kept.
const LINE_BYTES: usize = 2048;

/// The last lines of a stream as a terminal would show them, without text that a carriage return overwrote.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<Vec<u8>>,
    current: Vec<u8>,
    after_return: bool,
    /// The last error. Many lines may follow it, such as a backtrace or cleanup messages.
    error: Option<String>,
    /// Whether the error is a panic whose message is on the next line.
    panicked: bool,
}

impl Tail {
    /// Adds bytes of the stream.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n' || byte == b'\r') {
            let (text, end) = match piece.split_last() {
                Some((end @ (b'\n' | b'\r'), text)) => (text, Some(*end)),
                _ => (piece, None),
            };
            if self.after_return && !text.is_empty() {
                self.current.clear();
                self.after_return = false;
            }
            let room = LINE_BYTES.saturating_sub(self.current.len()).min(text.len());
            self.current.extend_from_slice(text.get(..room).unwrap_or_default());
            match end {
                Some(b'\n') => {
                    self.end_line();
                    self.after_return = false;
                }
                Some(_) => self.after_return = true,
                None => {}
            }
        }
    }

    fn end_line(&mut self) {
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        let line = std::mem::take(&mut self.current);
        // Errors contain a colon; other lines need no closer look.
        if self.panicked || line.contains(&b':') {
            self.look_for_error(&plain(&String::from_utf8_lossy(&line)));
        }
        self.lines.push_back(line);
    }

    fn look_for_error(&mut self, line: &str) {
        if let Some(error) = self.error.as_mut().filter(|_| std::mem::take(&mut self.panicked)) {
            error.push('\n');
            error.push_str(line);
        } else if is_error(line) {
            self.error = Some(line.to_owned());
            self.panicked = line.contains(PANICKED);
        }
    }

    /// Handles the end of the stream.
    pub(crate) fn end(&mut self) {
        if !self.current.is_empty() {
            self.end_line();
        }
    }

    /// Returns the last error if it is no longer among [`Self::lines`].
    pub(crate) fn earlier_error(&self) -> Option<&str> {
        let lines = self.lines();
        self.error.as_deref().filter(|error| !lines.iter().any(|line| error.lines().next() == Some(line)))
    }

    /// Returns the lines, oldest first, without control sequences such as colours and without trailing empty lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        let unfinished = Some(&self.current).filter(|line| !line.is_empty());
        let lines = self.lines.iter().chain(unfinished).map(|line| plain(&String::from_utf8_lossy(line)));
        let mut lines: Vec<String> = lines.collect();
        lines.drain(..lines.len().saturating_sub(LINES));
        while lines.last().is_some_and(|line| line.trim().is_empty()) {
            lines.pop();
        }
        lines
    }
}

const PANICKED: &str = "' panicked at ";

/// Returns whether a line is an error message of a program: `Error: …` of a Rust `main`, a panic, or a Python exception
/// such as `ValueError: …`.
fn is_error(line: &str) -> bool {
    let kind = line.split_once(": ").map_or("", |(kind, _)| kind);
    let is_name = kind.chars().all(|character| character.is_alphanumeric() || "._".contains(character));
    (is_name && (kind.ends_with("Error") || kind.ends_with("Exception"))) || line.contains(PANICKED)
}

/// Returns `text` as [`plain`] does, in one line. For text that somebody else has written: a line of it must not look like one of
/// ddprun's.
pub(crate) fn line(text: &str) -> String {
    plain(text).replace('\n', "\\n")
}

/// Returns `text` without ANSI control sequences (ESC [ … final byte) and control characters, except for line feeds.
pub(crate) fn plain(text: &str) -> String {
    let mut characters = text.chars().peekable();
    let mut result = String::with_capacity(text.len());
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            if characters.next_if_eq(&'[').is_some() {
                characters.by_ref().find(|character| ('@'..='~').contains(character));
            }
        } else if !character.is_control() || character == '\t' || character == '\n' {
            result.push(character);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&str]) -> Vec<String> {
        let mut tail = Tail::default();
        pieces.iter().for_each(|piece| tail.push(piece.as_bytes()));
        tail.lines()
    }

    #[test]
    fn keeps_the_last_lines() {
        let text: String = (0..30).map(|n| format!("line {n}\n")).collect();
        let expected: Vec<String> = (10..30).map(|n| format!("line {n}")).collect();
        assert_eq!(lines(&[&text, "\n\n"]), expected[2..]);
        assert_eq!(lines(&[&text]), expected);
        assert_eq!(lines(&["whole\npar", "tial"]), ["whole", "partial"]);
        assert_eq!(lines(&["x".repeat(9999).as_str()]), ["x".repeat(2048)]);
    }

    #[test]
    fn text_overwritten_after_a_carriage_return_is_dropped() {
        assert_eq!(lines(&["10%\r20%", "\r30%\n", "end\r", "\n"]), ["30%", "end"]);
    }

    #[test]
    fn the_last_error_is_kept_however_much_follows() {
        let noise = "freeing memory\n".repeat(LINES);
        let mut tail = Tail::default();
        tail.push(b"Error: an older one\nError: rank 3 ended the group: no memory\n   0: std::backtrace\n");
        assert_eq!(tail.earlier_error(), None);
        tail.push(noise.as_bytes());
        assert_eq!(tail.earlier_error(), Some("Error: rank 3 ended the group: no memory"));
        tail.push(format!("thread 'main' panicked at src/main.rs:1:2:\nno data\nnote: {noise}").as_bytes());
        assert_eq!(tail.earlier_error(), Some("thread 'main' panicked at src/main.rs:1:2:\nno data"));
        tail.push(format!("torch.cuda.OutOfMemoryError: 3 GiB\n{noise}").as_bytes());
        assert_eq!(tail.earlier_error(), Some("torch.cuda.OutOfMemoryError: 3 GiB"));
        tail.push(format!("no Error: here\n{noise}warning: rank 4 failed: no").as_bytes());
        tail.end();
        assert_eq!(tail.earlier_error(), Some("torch.cuda.OutOfMemoryError: 3 GiB"));
    }

    #[test]
    fn control_sequences_are_removed() {
        assert_eq!(lines(&["\r\x1b[2K\x1b[1;31merror\x1b[0m:\tbad\u{7}\n"]), ["error:\tbad"]);
        assert_eq!(lines(&["cut \x1b[12"]), ["cut "]);
        assert_eq!(line("a\nddprun: \x1b[1mb\r\n"), "a\\nddprun: b\\n");
    }
}
