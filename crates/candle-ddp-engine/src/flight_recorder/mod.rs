//! The flight recorder: the last calls of every rank, written to a file when a group fails.
//!
//! Each rank remembers, for each of its groups, its last collectives and messages: their numbers, what they were for,
//! how far they came and when. With a folder ([`FlightRecorderOptions::folder`], or
//! `CANDLE_DDP_FLIGHT_RECORDER=FOLDER`), each writes them to `FOLDER/rank<N>.flight.json` when a group fails or a call
//! times out, on `ProcessGroup::write_flight_record`, and, if the program asks for it, on
//! SIGUSR1. `ddprun explain FOLDER` says which rank parted from the others, and where. PyTorch has
//! `TORCH_NCCL_TRACE_BUFFER_SIZE` and `TORCH_NCCL_DEBUG_INFO_TEMP_FILE` for this.
//!
//! The file is JSON: `rank`, `world_size`, `host`, `pid`, `reason`, `written_ns`, `started_ns` (when the group of all
//! ranks was made), and `groups`, each with its `name`, its `ranks` (numbered as in the group of all ranks), its
//! `failure`, and its `calls`: `channel` (`collectives`, `send` or `recv`), `sequence` (from 1 on, in each channel),
//! `operation`, `dtype`, `count` (elements), `shape` (if it has at least two dimensions), `reduction`, `root`, `peer`, `label`
//! (what it is for), `place` (the line of the program), `state`
//! (`scheduled`, `started`, `completed` or `failed`), and `scheduled_ns`, `started_ns`, `completed_ns`. These times are
//! nanoseconds since 1970. `waited_ns`, on the CPU engine, is how long a collective waited until the last of the other ranks had come: the one
//! that came last has waited least. On GPUs, a call counts as started when it is on the stream, and its end is noticed up to 20
//! ms late.
mod files;
mod recorder;
mod signal;

pub(crate) use candle_ddp_base::flight_record::{CallRecord, CallState, ChannelKind};
pub use recorder::Recording;
pub(crate) use recorder::{FlightRecorder, Recorded};

use candle_ddp_base::flight_record::FOLDER_VARIABLE;
use candle_ddp_env::Variables;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Options of the flight recorder: how many calls a rank remembers, and where it writes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlightRecorderOptions {
    /// The number of calls to remember for each group; for messages, for each peer and direction. Recording costs
    /// some tens of nanoseconds for each call; 0 turns it off. Default: 2000, as in PyTorch.
    pub entries: usize,
    /// The folder in which each rank writes its file when a group fails. It is created if it does not exist. Default: the
    /// one that the environment variable `CANDLE_DDP_FLIGHT_RECORDER` names, if any. Without a folder, or with an empty path,
    /// nothing is written.
    pub folder: Option<PathBuf>,
    /// Whether the file is also written on SIGUSR1. This installs a handler in the process; other handlers of that
    /// signal are called as well. Needs a folder. Default: false.
    pub on_sigusr1: bool,
}

impl Default for FlightRecorderOptions {
    fn default() -> Self {
        Self { entries: 2000, folder: None, on_sigusr1: false }
    }
}

impl FlightRecorderOptions {
    /// Takes the folder from the environment if the program leaves it to that.
    fn resolve(self, environment: Variables) -> Self {
        let folder = self.folder.or_else(|| environment.path(FOLDER_VARIABLE));
        Self { folder: folder.filter(|folder| !folder.as_os_str().is_empty()), ..self }
    }
}

/// Returns the nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn the_program_takes_precedence_over_the_environment() {
        let resolve = |folder: Option<&str>, value: &str| {
            let options = FlightRecorderOptions { folder: folder.map(PathBuf::from), ..Default::default() };
            options.resolve(Variables::new(&|_| Some(OsString::from(value)))).folder
        };
        assert_eq!([resolve(None, "a"), resolve(None, "")], [Some("a".into()), None]);
        assert_eq!([resolve(Some("b"), "a"), resolve(Some(""), "a")], [Some("b".into()), None]);
    }
}
