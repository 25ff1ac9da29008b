//! The pieces of bytes that an exchange moves.
use super::storage::Region;

/// What is sent: private memory, or a part of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Piece<'a> {
    Memory(&'a [u8]),
    Tensor(Region<'a>),
}

/// Where received bytes go: private memory, or a part of a tensor.
pub(super) enum PieceMut<'a> {
    Memory(&'a mut [u8]),
    Tensor(Region<'a>),
}

impl<'a> Piece<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::Tensor(region) => region.len(),
        }
    }

    pub(super) fn tensor(&self) -> Option<Region<'a>> {
        match self {
            Self::Memory(_) => None,
            Self::Tensor(region) => Some(*region),
        }
    }
}

impl<'a> PieceMut<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::Tensor(region) => region.len(),
        }
    }

    pub(super) fn tensor(&self) -> Option<Region<'a>> {
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

impl<'a> From<Region<'a>> for Piece<'a> {
    fn from(region: Region<'a>) -> Self {
        Self::Tensor(region)
    }
}

impl<'a> From<&'a mut [u8]> for PieceMut<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Memory(bytes)
    }
}

impl<'a> From<Region<'a>> for PieceMut<'a> {
    fn from(region: Region<'a>) -> Self {
        Self::Tensor(region)
    }
}

/// The pieces that reach beyond the first `done` bytes, and for each the number of its bytes that do not.
pub(super) fn beyond<P>(
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
