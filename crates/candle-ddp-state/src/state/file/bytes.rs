//! The bytes of one tensor in a file.
use candle_ddp_base::hash::{CONTENT_PART, content_part};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The hashes of the parts of a tensor; None for those that were not read.
pub type PartHashes = Vec<Option<u64>>;

/// Which parts of a tensor are hashed, and for that read as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hashed {
    Nothing,
    /// Only the parts of which something is needed.
    Needed,
    All,
}

/// Reads a range of a file from its beginning to its end with bounded memory, and hashes its parts.
pub(super) struct Bytes<'a> {
    file: &'a File,
    /// The range that has not been read from the file.
    rest: Range<u64>,
    /// Bytes that were read to be hashed, some of them not taken yet.
    part: Vec<u8>,
    taken: usize,
    hashed: Hashed,
    hashes: PartHashes,
}

impl<'a> Bytes<'a> {
    pub(super) fn new(file: &'a File, range: Range<u64>, hashed: Hashed) -> Self {
        Self { file, rest: range, part: Vec::new(), taken: 0, hashed, hashes: Vec::new() }
    }

    /// Passes over the next bytes.
    pub(super) fn skip(&mut self, mut bytes: u64) -> io::Result<()> {
        loop {
            let there = bytes.min((self.part.len() - self.taken) as u64);
            self.taken += there as usize;
            bytes -= there;
            let next = self.next_length() as u64;
            match self.hashed {
                _ if bytes == 0 => return Ok(()),
                _ if next == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Hashed::Nothing => {
                    self.rest.start = self.rest.end.min(self.rest.start + bytes);
                    return Ok(());
                }
                Hashed::Needed if bytes >= next => {
                    self.rest.start += next;
                    bytes -= next;
                    self.hashes.push(None);
                }
                Hashed::Needed | Hashed::All => self.next_part()?,
            }
        }
    }

    /// Reads the next part, after all of the last one was taken.
    fn next_part(&mut self) -> io::Result<()> {
        let length = self.next_length();
        let mut part = std::mem::take(&mut self.part);
        part.resize(length, 0);
        self.fill(&mut part)?;
        (self.part, self.taken) = (part, 0);
        Ok(())
    }

    fn next_length(&self) -> usize {
        (self.rest.end - self.rest.start).min(CONTENT_PART as u64) as usize
    }

    /// Reads the next part.
    fn fill(&mut self, part: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(part, self.rest.start)?;
        self.rest.start += part.len() as u64;
        if self.hashed != Hashed::Nothing {
            self.hashes.push(Some(content_part(part)));
        }
        Ok(())
    }

    /// The hash of one part.
    pub(super) fn hash(mut self, part: usize) -> io::Result<Option<u64>> {
        self.rest.start = self.rest.end.min(self.rest.start + (part * CONTENT_PART) as u64);
        self.next_part()?;
        Ok(self.hashes.pop().flatten())
    }

    /// The hashes of all parts; content of no bytes counts as one part. Passes over what was not read.
    pub(super) fn finish(mut self) -> io::Result<PartHashes> {
        self.skip((self.part.len() - self.taken) as u64 + self.rest.end - self.rest.start)?;
        if self.hashes.is_empty() && self.hashed != Hashed::Nothing {
            self.hashes.push(Some(content_part(&[])));
        }
        Ok(self.hashes)
    }
}

impl Read for Bytes<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.part.len() {
            let length = self.next_length();
            if length == 0 {
                return Ok(0);
            }
            // Parts are hashed where they are read to, while the processor's cache has them.
            if to.len() >= length {
                self.fill(&mut to[..length])?;
                return Ok(length);
            }
            self.next_part()?;
        }
        let copied = to.len().min(self.part.len() - self.taken);
        to[..copied].copy_from_slice(&self.part[self.taken..self.taken + copied]);
        self.taken += copied;
        Ok(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn any_piece_is_read_and_the_parts_are_hashed() {
        let part = CONTENT_PART;
        let content: Vec<u8> = (0..3 * part + 13).map(|at| (at % 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[&[7; 5], &content[..], &[7; 5]].concat()).unwrap();
        let end = content.len();
        let ranges = [0..0, 0..1, 0..part, 0..end, 5..part + 1, part..2 * part, part - 1..3 * part + 2, 3 * part..end];
        for range in ranges {
            for hashed in [Hashed::Nothing, Hashed::Needed, Hashed::All] {
                let mut bytes = Bytes::new(&file, 5..5 + end as u64, hashed);
                let mut found = vec![0; range.len()];
                bytes.skip(range.start as u64).unwrap();
                bytes.read_exact(&mut found).unwrap();
                assert_eq!(found, content[range.clone()], "{range:?}");
                let hashes = bytes.finish().unwrap();
                let is_needed = |index: usize| range.start < (index + 1) * part && index * part < range.end;
                let expected = content.chunks(part).enumerate();
                let expected = expected.map(|(index, chunk)| match hashed {
                    Hashed::Needed if !is_needed(index) => None,
                    _ => Some(content_part(chunk)),
                });
                let expected: Vec<_> = expected.filter(|_| hashed != Hashed::Nothing).collect();
                assert_eq!(hashes, expected, "{range:?}, {hashed:?}");
            }
        }
        assert_eq!(Bytes::new(&file, 5..5, Hashed::All).finish().unwrap(), [Some(content_part(&[]))]);
        let mut cut = Bytes::new(&file, 5..20 + end as u64, Hashed::All);
        assert!(cut.skip(end as u64 + 15).is_err());
    }
}
