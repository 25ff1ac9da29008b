//! Options of `ddprun`.
use crate::row::Kind::{Path, Text};
use crate::row::Row;

/// The rows.
pub(super) const ROWS: &[Row] = &[
    Row {
        names: &[
            "PET_NNODES",
            "PET_NPROC_PER_NODE",
            "PET_NODE_RANK",
            "PET_MASTER_ADDR",
            "PET_MASTER_PORT",
            "PET_STANDALONE",
            "PET_RDZV_BACKEND",
            "PET_RDZV_ENDPOINT",
            "PET_RDZV_ID",
            "PET_RDZV_CONF",
            "PET_MAX_RESTARTS",
            "PET_SIGNALS_TO_HANDLE",
            "PET_ROLE",
            "PET_NUMA_BINDING",
            "PET_VIRTUAL_LOCAL_RANK",
            "PET_NO_PYTHON",
            "PET_LOG_DIR",
            "PET_REDIRECTS",
            "PET_TEE",
        ],
        kind: Text("a value of the option"),
        set_by: "you, Kubeflow",
        read_by: "ddprun",
        meaning: "the option of that name, as in torchrun; `ddprun` lists those that are set if the command line is wrong",
        default: "the option's, in `ddprun --help`",
    },
    Row {
        names: &["PET_MONITOR_INTERVAL", "PET_START_METHOD"],
        kind: Text("a value of the option"),
        set_by: "you",
        read_by: "ddprun",
        meaning: "accepted and ignored",
        default: "–",
    },
    Row {
        names: &["PET_MODULE", "PET_LOCAL_ADDR", "PET_LOCAL_RANKS_FILTER"],
        kind: Text("a value of the option"),
        set_by: "you",
        read_by: "ddprun",
        meaning: "refused with a hint, as the options are",
        default: "–",
    },
    Row {
        names: &["CARGO"],
        kind: Path,
        set_by: "you, cargo",
        read_by: "ddprun",
        meaning: "the cargo that builds `--bin` and `--example`",
        default: "`cargo`",
    },
    Row {
        names: &["TMPDIR"],
        kind: Path,
        set_by: "you",
        read_by: "ddprun",
        meaning: "the folder for the files between `ddprun` and its workers. Where none can be made, as with a read-only root, `ddprun` says so and takes the reason of a failure from the output alone",
        default: "`/tmp`",
    },
];
