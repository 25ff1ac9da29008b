//! What a rank that fails tells its launcher: the file that torchrun names by `TORCHELASTIC_ERROR_FILE`.
//!
//! torchrun shows the message. `ddprun` also reads which rank caused the failure, so that it parses no text.
use super::{Error, Failure, text};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable with the path of the file.
pub(crate) const FILE_VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// The key of a [`RankError`] in the file.
const KEY: &str = "candle_ddp";

/// The number of bytes of a message that are written, so that the launcher reads the whole file.
const LONGEST: usize = 1 << 16;

/// The variant of an error that the program itself returned.
pub(crate) const OF_PROGRAM: &str = "Program";

/// The error with which a rank ends. Ranks are numbered as the launcher numbers them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankError {
    pub(crate) rank: usize,
    /// The rank because of which this one fails; `None` if the failure is its own, or nobody knows.
    pub(crate) culprit: Option<usize>,
    /// The variant of [`Error`] or [`Failure`], or [`OF_PROGRAM`].
    pub(crate) variant: String,
    pub(crate) message: String,
}

impl RankError {
    /// The error of `rank`. `number` gives the launcher's number of a rank that the error names.
    pub(crate) fn of(rank: usize, error: &Error, number: impl Fn(usize) -> Option<usize>) -> Self {
        Self {
            rank,
            culprit: error.culprit().and_then(number).filter(|culprit| *culprit != rank),
            variant: error.name().to_string(),
            message: error.to_string(),
        }
    }

    /// Whether the culprit left in good order, so that it may be this rank that made a call too many.
    #[cfg(feature = "launcher")]
    pub(crate) fn says_left(&self) -> bool {
        self.variant == "PeerLeft"
    }

    /// Whether the process of the culprit has ended.
    pub(crate) fn says_gone(&self) -> bool {
        self.variant == "PeerGone"
    }

    /// The content of the file.
    pub(crate) fn to_json(&self) -> Value {
        let message = text::shortened(&self.message, LONGEST);
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let told = Self { message: message.clone(), ..self.clone() };
        // torchrun shows `py_callstack` instead of the message.
        let extra = json!({ "py_callstack": message, "timestamp": seconds.to_string(), KEY: told });
        json!({ "message": { "message": message, "extraInfo": extra } })
    }

    /// What [`to_json`](Self::to_json) has written.
    #[cfg(feature = "launcher")]
    pub(crate) fn of_json(json: &Value) -> Option<Self> {
        Self::deserialize(json.get("message")?.get("extraInfo")?.get(KEY)?).ok()
    }
}

impl Error {
    /// The rank because of which there is this error, as the group numbers it.
    pub(crate) fn culprit(&self) -> Option<usize> {
        match self {
            Self::Group(failure) => failure.culprit(),
            Self::RankFailed { rank, .. } => Some(*rank),
            Self::Connect { peers: ranks, .. }
            | Self::MonitoredBarrier { missing: ranks, .. }
            | Self::RanksMissing { ranks, .. } => ranks.first().copied(),
            _ => None,
        }
    }
}

impl Failure {
    /// The rank of the group that caused it, as far as is known.
    pub(crate) fn culprit(&self) -> Option<usize> {
        match self {
            Self::PeerGone { peer, .. } | Self::PeerLeft { peer, .. } | Self::PeerFailed { peer, .. } => Some(*peer),
            Self::TimedOut { waiting_for, .. } => waiting_for.first().copied(),
            // Either of the two may be right.
            Self::Desync { .. } => None,
        }
    }
}

#[cfg(all(test, feature = "launcher"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read_and_is_torchruns_format() {
        let reason = "no \"disk\"\n".to_string() + &"é".repeat(1 << 20);
        let told = RankError::of(5, &Failure::PeerFailed { peer: 1, reason }.into(), |peer| Some(peer + 2));
        assert_eq!((told.culprit, told.variant.as_str()), (Some(3), "PeerFailed"));
        let text = told.to_json().to_string();
        let json: Value = serde_json::from_str(&text).unwrap();
        let read = RankError::of_json(&json).unwrap();
        assert_eq!((read.rank, read.culprit, &read.variant), (5, Some(3), &told.variant));
        assert!(read.message.starts_with("rank 1 ended the group: no \"disk\"\né") && text.len() < 1 << 18);
        let shown = &json["message"];
        let message = json!(read.message);
        assert_eq!((&shown["message"], &shown["extraInfo"]["py_callstack"]), (&message, &message));
        assert!(shown["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().is_ok());
    }

    #[test]
    fn nobody_blames_itself() {
        let own = Error::from(Failure::PeerFailed { peer: 1, reason: "no disk".to_string() });
        assert_eq!(RankError::of(1, &own, Some).culprit, None);
        let unknown = Error::RankFailed { rank: 7, reason: "no disk".to_string() };
        assert_eq!(RankError::of(1, &unknown, |_| None).culprit, None);
    }
}
