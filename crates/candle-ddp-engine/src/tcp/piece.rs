//! The pieces of bytes that an exchange moves.
use crate::memory::Region;

/// A piece of what is sent or received: private memory, or a part of a tensor.
#[derive(Clone, Copy)]
pub(crate) enum Piece<'a, M = &'a [u8]> {
    Memory(M),
    Tensor(Region<'a>),
}

/// A piece of what is received.
pub(crate) type PieceMut<'a> = Piece<'a, &'a mut [u8]>;

impl Piece<'_> {
    /// A piece without bytes.
    pub(crate) const EMPTY: Self = Self::Memory(&[]);
}

impl<'a, M: AsRef<[u8]>> Piece<'a, M> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.as_ref().len(),
            Self::Tensor(region) => region.len(),
        }
    }

    pub(crate) fn tensor(&self) -> Option<Region<'a>> {
        match self {
            Self::Memory(_) => None,
            Self::Tensor(region) => Some(*region),
        }
    }
}

impl<'a> From<&'a [u8]> for Piece<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Memory(bytes)
    }
}

impl<'a> From<&'a mut [u8]> for PieceMut<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Memory(bytes)
    }
}

impl<'a, M> From<Region<'a>> for Piece<'a, M> {
    fn from(region: Region<'a>) -> Self {
        Self::Tensor(region)
    }
}

/// The pieces that extend beyond the first `done` bytes, each with the number of its bytes that do not.
pub(crate) fn beyond<P>(
    mut done: usize,
    pieces: impl Iterator<Item = P>,
    length: impl Fn(&P) -> usize,
) -> impl Iterator<Item = (P, usize)> {
    pieces.filter_map(move |piece| {
        let skipped = done.min(length(&piece));
        done -= skipped;
        (skipped < length(&piece)).then_some((piece, skipped))
    })
}
