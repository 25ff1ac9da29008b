//! The questions that ranks ask each other.

/// A question to all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// How far the rank's collectives are: its [`ProgressReport`](crate::failure::ProgressReport).
    Progress,
    /// Where it stands in all groups of its job: its [`Report`](crate::standing).
    Standing,
}

impl Question {
    pub(crate) const ALL: [Self; 2] = [Self::Progress, Self::Standing];
}
