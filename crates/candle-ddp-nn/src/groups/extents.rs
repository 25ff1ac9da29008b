//! The extents of a batch.

/// The extents of a batch: samples, groups, channels per group, and numbers per sample and channel.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    pub(super) samples: usize,
    pub(super) groups: usize,
    pub(super) in_group: usize,
    pub(super) spatial: usize,
}

impl Extents {
    /// The number of elements of a group, which are neighbours.
    pub(super) fn size(self) -> usize {
        self.in_group * self.spatial
    }

    /// The number of planes, each of which is a sample's channel.
    pub(super) fn planes(self) -> usize {
        self.samples * self.groups * self.in_group
    }
}
