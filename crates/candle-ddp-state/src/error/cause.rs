//! Who caused an error, as programs, groups and the launcher ask.
use super::{Error, Failure, RankError};

#[doc(hidden)]
impl Error {
    /// The failure of a group in this error, if there is one.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Group(failure) => Some(failure),
            _ => None,
        }
    }

    /// Whether this error of rank `own` only says that another rank failed.
    pub fn is_echo(&self, own: usize) -> bool {
        match self {
            Self::Group(Failure::PeerGone { .. } | Failure::PeerLeft { .. }) => true,
            Self::Group(Failure::PeerFailed { peer: rank, .. }) | Self::RankFailed { rank, .. } => *rank != own,
            _ => false,
        }
    }

    /// The rank that caused this error, as numbered in the group.
    fn culprit(&self) -> Option<usize> {
        match self {
            Self::Group(failure) => failure.culprit(),
            Self::Rendezvous(error) => error.culprit(),
            Self::RankFailed { rank, .. } => Some(*rank),
            Self::NonFinite { rank, .. } => *rank,
            // Of several, nobody knows.
            Self::ReplicasDiffer { ranks, .. } | Self::PartDiffers { ranks, .. } => match ranks[..] {
                [rank] => Some(rank),
                _ => None,
            },
            Self::Connect { peers: ranks, .. } | Self::MonitoredBarrier { missing: ranks, .. } => {
                ranks.first().copied()
            }
            _ => None,
        }
    }

    /// This error as reported to the launcher of `rank`. `number` returns the launcher's number of a rank that the
    /// error names.
    pub fn of_rank(&self, rank: usize, number: impl Fn(usize) -> Option<usize>) -> RankError {
        RankError {
            rank,
            culprit: self.culprit().and_then(number).filter(|culprit| *culprit != rank),
            variant: self.name().to_string(),
            message: self.to_string(),
        }
    }

    /// The variant's name; for a group's failure or an error of the rendezvous, the name of that.
    pub(super) fn name(&self) -> &'static str {
        macro_rules! names {
            ($($variant:ident)+) => {
                match self {
                    Self::Group(failure) => failure.name(),
                    Self::Rendezvous(error) => error.name(),
                    $(Self::$variant { .. } => stringify!($variant),)+
                }
            };
        }
        names!(
            Candle Io InvalidArgument RankOutOfRange Unavailable Connect InvalidTensor UnsupportedDType Nccl Engine RankFailed MonitoredBarrier InputsExhausted
            Mismatch BackwardOutside OtherModelInGraph StaleGraph UnusedParameters NothingCounted NonFinite Parameter Samples
            LoaderTimedOut Replica DataFile CheckpointFile CheckpointMismatch PartDiffers ReplicasDiffer CheckpointPart OtherLength GradScaler
            Kernel
        )
    }
}
