//! A Python interpreter with PyTorch, for the interoperability tests.
use crate::common::skip_unless;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Returns the interpreter named by `CANDLE_DDP_PYTHON` (default: `python3`) if it can import PyTorch. Otherwise
/// reports that `test` is skipped, or fails if `CANDLE_DDP_REQUIRE_PYTORCH` is set.
pub(crate) fn python(test: &str) -> Option<PathBuf> {
    python_with(test, "torch.distributed")
}

/// The same for an interpreter that can import other modules as well.
pub(crate) fn python_with(test: &str, modules: &str) -> Option<PathBuf> {
    let python = PathBuf::from(std::env::var_os("CANDLE_DDP_PYTHON").unwrap_or_else(|| "python3".into()));
    let imports = Command::new(&python)
        .args(["-c", &format!("import {modules}")])
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success());
    if imports {
        return Some(python);
    }
    let reason =
        format!("{} cannot import {modules} (set CANDLE_DDP_PYTHON to an interpreter that can)", python.display());
    skip_unless("CANDLE_DDP_REQUIRE_PYTORCH", test, reason);
    None
}
