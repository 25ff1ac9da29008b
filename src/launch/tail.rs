//! The last lines of a stream, kept for the summary of a failure.
use std::collections::VecDeque;

/// Lines that are kept.
const LINES: usize = 20;
/// Bytes of a line that are kept.
const LINE_BYTES: usize = 2048;

/// The last lines that went through, as a terminal would show them: text that a carriage return overwrote is gone.
#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<Vec<u8>>,
    current: Vec<u8>,
    after_return: bool,
}

impl Tail {
    /// Takes what the stream brought.
    pub(super) fn push(&mut self, bytes: &[u8]) {
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
        self.lines.push_back(std::mem::take(&mut self.current));
    }

    /// The lines, the oldest first, without colours and other control sequences, and without empty ones at the end.
    pub(super) fn lines(&self) -> Vec<String> {
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

/// `text` without ANSI control sequences (ESC [ … final byte) and control characters.
fn plain(text: &str) -> String {
    let mut characters = text.chars().peekable();
    let mut result = String::with_capacity(text.len());
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            if characters.next_if_eq(&'[').is_some() {
                characters.by_ref().find(|character| ('@'..='~').contains(character));
            }
        } else if !character.is_control() || character == '\t' {
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
    fn what_a_carriage_return_overwrote_is_gone() {
        assert_eq!(lines(&["10%\r20%", "\r30%\n", "end\r", "\n"]), ["30%", "end"]);
    }

    #[test]
    fn control_sequences_are_left_out() {
        assert_eq!(lines(&["\r\x1b[2K\x1b[1;31merror\x1b[0m:\tbad\u{7}\n"]), ["error:\tbad"]);
        assert_eq!(lines(&["cut \x1b[12"]), ["cut "]);
    }
}
