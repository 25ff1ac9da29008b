//! Records of a run.
use crate::row::Kind::{Path, Switch, Text};
use crate::row::Row;

/// The rows.
pub(super) const ROWS: &[Row] = &[
    Row {
        names: &["CANDLE_DDP_TRACE"],
        kind: Path,
        set_by: "you",
        read_by: "candle-ddp",
        meaning: "a folder: every rank writes a [timeline](measuring.md#seeing-what-happens) of its training steps there",
        default: "nothing is written",
    },
    Row {
        names: &["CANDLE_DDP_FLIGHT_RECORDER"],
        kind: Path,
        set_by: "you",
        read_by: "candle-ddp-engine",
        meaning: "a folder: every rank writes [its last calls](ranks_that_differ.md#finding-the-rank-that-diverged) there when its group fails",
        default: "nothing is written",
    },
    Row {
        names: &["CANDLE_DDP_NAN_CHECK"],
        kind: Switch,
        set_by: "you",
        read_by: "candle-ddp",
        meaning: "`1`: DDP checks every gradient for NaN and infinity, and [names the parameter](ranks_that_differ.md#gradients-that-are-not-finite)",
        default: "`0`",
    },
    Row {
        names: &["RUST_LOG"],
        kind: Text("a level, or a list of levels"),
        set_by: "you",
        read_by: "loggers",
        meaning: "`warn`, `info` or `debug`: the log of this crate, in programs with a logger such as `env_logger`. [Warnings that matter](troubleshooting.md#when-something-goes-wrong) need no logger",
        default: "the logger's",
    },
];
