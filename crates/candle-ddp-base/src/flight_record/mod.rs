//! The flight recorder's files, `rank<N>.flight.json`: the format in which a rank writes its last calls, and what the
//! files of all ranks say together.
mod explain;
mod folder;
mod record;

pub use explain::{explain, newest};
#[cfg(any(test, fuzzing))]
pub use folder::fuzz_records;
pub use folder::read_folder;
pub use record::{CallRecord, CallState, ChannelKind, GroupRecord, RankRecord};

/// The version of the format.
pub const VERSION: u32 = 1;
/// How the names of the files end.
pub const SUFFIX: &str = ".flight.json";

/// The environment variable for the folder of the files.
pub const FOLDER_VARIABLE: &str = "CANDLE_DDP_FLIGHT_RECORDER";
