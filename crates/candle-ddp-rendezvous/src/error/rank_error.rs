//! How a failing rank reports its error to its launcher: in the file that torchrun names in `TORCHELASTIC_ERROR_FILE`.
//!
//! torchrun shows the message. `ddprun` also reads which rank caused the failure, so it need not parse text.
use candle_ddp_base::wire::beginning;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The environment variable that holds the path of the file.
pub const FILE_VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// The key of a [`RankError`] in the file.
const KEY: &str = "candle_ddp";

/// The maximum length in bytes of a message in the file, so that the launcher reads all of it.
const LONGEST: usize = 1 << 16;

/// The variant for errors of the program itself.
pub const OF_PROGRAM: &str = "Program";

/// The error that ended a rank. Ranks are numbered as by the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankError {
    /// The rank.
    pub rank: usize,
    /// The rank that made this one fail; `None` if this rank failed by itself, or if the culprit is unknown.
    pub culprit: Option<usize>,
    /// The variant of the error or of the [`Failure`](super::Failure), or [`OF_PROGRAM`].
    pub variant: String,
    /// Its text.
    pub message: String,
}

impl RankError {
    /// Whether the culprit left in good order. Then this rank may be the one at fault, with one call too many.
    pub fn says_left(&self) -> bool {
        self.variant == "PeerLeft"
    }

    /// Whether the process of the culprit has ended.
    pub fn says_gone(&self) -> bool {
        self.variant == "PeerGone"
    }

    /// The content of the file.
    pub fn to_json(&self) -> Value {
        let message = beginning(&self.message, LONGEST);
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let told = Self { message: message.to_string(), ..self.clone() };
        // torchrun shows `py_callstack` instead of the message.
        let extra = json!({ "py_callstack": message, "timestamp": seconds.to_string(), KEY: told });
        json!({ "message": { "message": message, "extraInfo": extra } })
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    pub fn of_json(json: &Value) -> Option<Self> {
        Self::deserialize(json.get("message")?.get("extraInfo")?.get(KEY)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read_and_is_torchruns_format() {
        let reason = "no \"disk\"\n".to_string() + &"é".repeat(1 << 20);
        let message = format!("rank 1 ended the group: {reason}");
        let told = RankError { rank: 5, culprit: Some(3), variant: "PeerFailed".to_string(), message };
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
}
