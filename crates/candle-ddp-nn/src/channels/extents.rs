//! The extents of a batch.

/// The extents of a batch: samples, channels, and numbers per sample and channel.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    pub(super) samples: usize,
    pub(super) channels: usize,
    pub(super) spatial: usize,
}

impl Extents {
    /// `dims` has at least two dimensions.
    pub(super) fn of(dims: &[usize]) -> Self {
        Self { samples: dims[0], channels: dims[1], spatial: dims[2..].iter().product() }
    }
}
