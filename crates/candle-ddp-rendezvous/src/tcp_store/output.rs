//! Replies that are being sent to a client.
use super::shared::Shared;
use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};

/// The maximum length of values that are copied into a reply. Longer ones are sent from the store's memory, so that a
/// reply takes little memory whatever the client asks for.
const COPIED: usize = 64;
/// The maximum size of a piece that the reply owns.
const PIECE: usize = 1 << 16;
/// The maximum number of pieces in one write.
const PIECES: usize = 64;

enum Piece {
    Own(Vec<u8>),
    Shared(Shared),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

/// The bytes that are still to be sent to one client. No piece is empty.
#[derive(Default)]
pub(super) struct Output {
    pieces: VecDeque<Piece>,
    /// The number of bytes of the first piece that have been sent.
    written: usize,
    /// The number of bytes in pieces that are not shared.
    own: usize,
}

impl Output {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Appends plain bytes.
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.own += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Own(last)) if last.len() + bytes.len() <= PIECE => last.extend_from_slice(bytes),
            _ if bytes.is_empty() => {}
            _ => self.pieces.push_back(Piece::Own(bytes.to_vec())),
        }
    }

    /// Appends an integer of 8 bytes.
    pub(super) fn put_i64(&mut self, number: i64) {
        self.put(&number.to_le_bytes());
    }

    /// Appends the length of `bytes` and then `bytes`.
    pub(super) fn put_bytes(&mut self, bytes: &[u8]) {
        self.put_i64(bytes.len() as i64);
        self.put(bytes);
    }

    /// Like [`Output::put_bytes`], without copying long values.
    pub(super) fn put_shared(&mut self, bytes: &Shared) {
        if bytes.len() <= COPIED {
            return self.put_bytes(bytes);
        }
        self.put_i64(bytes.len() as i64);
        self.pieces.push_back(Piece::Shared(bytes.clone()));
    }

    /// Returns the memory used, without shared data.
    pub(super) fn held(&self) -> usize {
        self.pieces.len() * size_of::<Piece>() + self.own
    }

    /// Writes once and returns the number of bytes written.
    pub(super) fn write_to(&mut self, writer: &mut impl Write) -> io::Result<usize> {
        let mut skip = self.written;
        let slices: Vec<IoSlice> = self
            .pieces
            .iter()
            .take(PIECES)
            .map(|piece| IoSlice::new(piece.bytes().get(std::mem::take(&mut skip)..).unwrap_or_default()))
            .collect();
        let count = writer.write_vectored(&slices)?;
        self.written += count;
        while let Some(first) = self.pieces.front().filter(|first| first.bytes().len() <= self.written) {
            self.written -= first.bytes().len();
            if let Some(Piece::Own(bytes)) = self.pieces.pop_front() {
                self.own -= bytes.len();
            }
        }
        if self.pieces.is_empty() {
            // A single long reply must not occupy memory for the rest of the connection.
            self.pieces.shrink_to(PIECES);
        }
        Ok(count)
    }

    /// Returns all bytes that are still to be sent.
    #[cfg(test)]
    pub(super) fn to_vec(&self) -> Vec<u8> {
        let all: Vec<u8> = self.pieces.iter().flat_map(Piece::bytes).copied().collect();
        all.get(self.written..).unwrap_or_default().to_vec()
    }
}
